"""preStop of a decode engine: tell the sidecar of this pod to drain, and wait until it has.

    python3 -c SOURCE PORT PATH

This file's text is the command, run in the engine's image: the standard library is all there is.
Not a hook of type httpGet: that request comes from the node, and the sidecar could not tell it from
one of another pod.
"""

import http.client
import os
import sys


def main(port: str, path: str) -> None:
    """POST `path` to this pod's `port`; an answer other than 200 is an error for the kubelet."""
    connection = http.client.HTTPConnection(os.environ["POD_IP"], int(port))
    connection.request("POST", path)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"{path}: {answer.status} {answer.read().decode()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
