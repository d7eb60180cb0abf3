"""An HTTP server with the shape of an OpenAI chat endpoint, or of any other with ``json:ANSWER``.

``judge_server.py LOG MODE...``, one mode a request, the last repeats.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOG, MODES = Path(sys.argv[1]), sys.argv[2:]


class Handler(BaseHTTPRequestHandler):
    """Records the request, then does what the mode says."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = MODES.pop(0) if len(MODES) > 1 else MODES[0]
        with LOG.open("a") as file:
            file.write(json.dumps({"path": self.path, "authorization": self.headers.get("Authorization"), "body": body}) + "\n")
        kind, _, value = mode.partition(":")
        if kind == "hang":
            time.sleep(30)
        elif kind == "drop":
            self.close_connection = True
        elif kind == "status":
            self._send(int(value), b'{"error": {"message": "as asked"}}')
        elif kind == "json":
            self._send(200, value.encode())
        elif kind == "late":
            time.sleep(0.5)
            self._send(200, value.encode())
        elif kind == "junk":
            self._send(200, b"<html>")
        else:
            content = None if kind == "null" else value
            self._send(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode())

    def _send(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
