"""The control connection against a real HTTP server: kept open, opened again where the server has closed it, errors in one sentence."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.http_client import ServerClient


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 0.5  # closes a connection that is idle for longer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/slow":
            time.sleep(1.0)
        content = json.dumps({"path": self.path, "body": body, "peer": self.client_address[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def client():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = ServerClient(f"http://127.0.0.1:{server.server_port}", "t", timeout_s=5)
    yield client
    client.close()
    server.shutdown()
    server.server_close()
    thread.join()


def test_calls_share_a_connection_until_the_server_closes_it(client):
    first, second = client.post("/a", {"n": 1}), client.post("/b")
    assert (first["path"], first["body"], second["body"]) == ("/a", {"n": 1}, {})
    assert first["peer"] == second["peer"]
    time.sleep(1.0)
    assert client.post("/c")["peer"] != first["peer"]


def test_a_late_answer_is_an_error_and_never_taken_for_the_next_one(client):
    with pytest.raises(EngineError, match=r"did not answer /slow within 0\.2 s"):
        client.post("/slow", timeout_s=0.2)
    assert client.post("/next")["path"] == "/next"


def test_a_server_that_is_gone_is_one_sentence():
    with pytest.raises(EngineError, match=r"cannot be reached for /a .*it died or never started"):
        ServerClient("http://127.0.0.1:9", "t", timeout_s=2).post("/a")
