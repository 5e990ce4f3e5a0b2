"""An engine that is up at once: what `tandem up` needs of one, without torch.

python fake_engine.py HOST PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tandem_contract import metrics

GAUGES = (metrics.ENGINE_RUNNING, metrics.ENGINE_WAITING, metrics.ENGINE_KV_USAGE)
METRICS = "".join(f'# TYPE {g} gauge\n{g}{{model_name="m"}} 0\n' for g in GAUGES)
PAGES = {
    "/health": "",
    "/metrics": METRICS,
    "/v1/models": json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = PAGES.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("content-length", str(len(body or "")))
        self.end_headers()
        self.wfile.write((body or "").encode())


ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
