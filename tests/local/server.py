"""The program of the containers in the runner's tests: a small HTTP server.

    python server.py HOST PORT [ARG …]

GET /          200
GET /me        the server's arguments, environment and pid, as JSON
GET /exit?N    exits with code N, without an answer
GET /touch?F   appends a line to file F
SIGTERM        appends `sigterm NAME` to $EVENTS, if set, and exits with 0
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, urlsplit(self.path).query
        if path == "/exit":
            os._exit(int(query))
        if path == "/touch":
            append(query, f"prestop {os.environ.get('NAME', '')}")
        body = {"argv": sys.argv[3:], "env": dict(os.environ), "pid": os.getpid()}
        self.send_response(200 if path in ("/", "/me", "/touch") else 503)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def append(file: str, line: str) -> None:
    with open(file, "a") as out:
        out.write(line + "\n")


def exit_on_sigterm(*_: object) -> None:
    if file := os.environ.get("EVENTS"):
        append(file, f"sigterm {os.environ.get('NAME', '')}")
    os._exit(0)


if __name__ == "__main__":
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, exit_on_sigterm)
    if "--grandchild" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "grandchild"])
    print("serving", flush=True)
    HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
