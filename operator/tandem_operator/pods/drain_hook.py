"""preStop of a decode engine: tell the sidecar of this pod to drain, and wait until it has.

    python3 -c SOURCE SOCKET PORT PATH

This file's text is the command, run in the engine's image: the standard library is all there is.
SOCKET names a Unix socket in Linux's abstract namespace, with `{host}` and `{port}` in it: only the
containers of this pod reach it. Not a hook of type httpGet: that request comes from the node by
TCP, and the sidecar could not tell it from one of another pod.
"""

import http.client
import os
import socket
import sys


def main(name: str, port: str, path: str) -> None:
    """POST `path` to the sidecar; an answer other than 200 is an error for the kubelet."""
    connection = http.client.HTTPConnection("sidecar")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect("\0" + name.format(host=os.environ["POD_IP"], port=port))
    connection.request("POST", path)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"{path}: {answer.status} {answer.read().decode()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
