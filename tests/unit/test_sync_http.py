"""The control connection against a real HTTP server: kept open, opened again where the server has closed it, errors in one sentence."""

import os
import random
import resource
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from json_server import JsonHandler, serving

from e2e_fp8.errors import EngineError
from e2e_fp8.sync import http_client
from e2e_fp8.sync.http_client import ServerClient


class Echo(JsonHandler):
    timeout = 0.5  # closes a connection that is idle for longer

    def answer(self, body: Any) -> Any:
        if self.path == "/slow":
            time.sleep(1.0)
        return {"path": self.path, "body": body, "peer": self.client_address[1]}


@pytest.fixture
def client():
    with serving(Echo) as url:
        client = ServerClient(url, "t", timeout_s=5)
        yield client
        client.close()


def test_calls_share_a_connection_until_the_server_closes_it(client):
    first, second = client.post("/a", {"n": 1}), client.post("/b")
    assert (first["path"], first["body"], second["body"]) == ("/a", {"n": 1}, {})
    assert first["peer"] == second["peer"]
    time.sleep(1.0)
    assert client.post("/c")["peer"] != first["peer"]


def test_closing_ends_a_call_that_another_thread_waits_in(client):
    told: list[EngineError] = []

    def wait() -> None:
        try:
            client.post("/slow")
        except EngineError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    client.close()
    thread.join()
    assert time.monotonic() - started < 0.5
    assert "cannot be reached for /slow" in str(told[0])
    assert client.post("/a")["path"] == "/a"


def test_connections_beyond_the_1024th_file_are_asked_too(client):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        peers = [client.post("/a")["peer"] for _ in range(2)]
        assert client._open.sock.fileno() > 1023
    assert peers[0] == peers[1]


def test_a_late_answer_is_an_error_and_never_taken_for_the_next_one(client):
    with pytest.raises(EngineError, match=r"did not answer /slow within 0\.2 s"):
        client.post("/slow", timeout_s=0.2)
    assert client.post("/next")["path"] == "/next"


def test_a_server_that_is_gone_is_one_sentence():
    with pytest.raises(EngineError, match=r"cannot be reached for /a .*it died or never started"):
        ServerClient("http://127.0.0.1:9", "t", timeout_s=2).post("/a")


def test_a_connection_that_was_idle_for_long_is_not_used_again(client, monkeypatch):
    """Before the server closes it: what is sent then could cross with the end."""
    monkeypatch.setattr(http_client, "_FRESH_S", 0.2)
    first = client.post("/a")
    time.sleep(0.1)
    assert client.post("/b")["peer"] == first["peer"]
    time.sleep(0.3)
    assert client.post("/c")["peer"] != first["peer"]


OK = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"results": []}'


class ClosingServer:
    """Answers with ``answers`` in turn, an entry for each connection: one element for each request on it; then closes the connection."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self.answers, self.requests = answers, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(5)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with self.listener:
            for answers in self.answers:
                connection, _ = self.listener.accept()
                connection.settimeout(5)
                with connection, connection.makefile("rb") as lines:
                    for answer in answers:
                        head = lines.readline()
                        assert head, "the client has closed the connection"
                        while (line := lines.readline()) != b"\r\n":
                            head += line
                        (length,) = [int(line.split()[1]) for line in head.splitlines() if line.startswith(b"Content-Length")] or [0]
                        self.requests.append(head.split()[1].decode() + " " + lines.read(length).decode())
                        connection.sendall(answer)

    def client(self) -> ServerClient:
        return ServerClient(f"http://127.0.0.1:{self.listener.getsockname()[1]}", "t", timeout_s=5)

    def routes(self) -> list[str]:
        """Once all connections were served."""
        self.thread.join(5)
        assert not self.thread.is_alive()
        return [request.split()[0] for request in self.requests]


REPEATED = {
    "get": lambda client: client.get("/is_paused"),
    "resume": lambda client: client.post("/resume?compared=3"),
    "state": lambda client: client.collective("weight_state"),
}


@pytest.mark.parametrize("call", REPEATED)
def test_a_kept_connection_that_closes_under_a_request_is_opened_again(call):
    server = ClosingServer([[OK, b""], [OK]])
    client = server.client()
    client.post("/a")
    REPEATED[call](client)
    routes = server.routes()
    assert routes[0] == "/a"
    assert len(routes) == 3
    assert server.requests[1] == server.requests[2]


NOT_REPEATED = {
    "update": lambda client: client.update({"begin": True}, pause="wait"),
    "channel": lambda client: client.post("/init_weight_transfer_engine", {"init_info": {}}),
    "unknown method": lambda client: client.collective("save_sharded_state"),
}


@pytest.mark.parametrize("call", NOT_REPEATED)
def test_what_must_not_come_twice_is_sent_once(call):
    server = ClosingServer([[OK, b""]])
    client = server.client()
    client.post("/a")
    with pytest.raises(EngineError, match=r"cannot be reached"):
        NOT_REPEATED[call](client)
    assert len(server.routes()) == 2


def test_a_request_is_repeated_once_and_never_on_a_new_connection():
    server = ClosingServer([[b""], [OK, b""], [b""]])
    client = server.client()
    with pytest.raises(EngineError, match=r"cannot be reached for /resume"):
        client.post("/resume")
    assert client.post("/pause") == {"results": []}
    with pytest.raises(EngineError, match=r"cannot be reached for /resume"):
        client.post("/resume")
    assert server.routes() == ["/resume", "/pause", "/resume", "/resume"]


def test_an_answer_that_has_begun_is_not_asked_for_again():
    server = ClosingServer([[OK, OK[:-4]]])
    client = server.client()
    client.post("/pause")
    with pytest.raises(EngineError, match=r"cannot be reached for /resume \(IncompleteRead"):
        client.post("/resume")
    assert server.routes() == ["/pause", "/resume"]


def test_no_moment_of_an_idle_end_is_taken_for_a_death():
    """The server closes after 20 ms, and requests come at about that time."""

    class Hasty(Echo):
        timeout = 0.02

    with serving(Hasty) as url:
        client = ServerClient(url, "t", timeout_s=5)
        try:
            for _ in range(150):
                assert client.post("/resume")["path"] == "/resume"
                time.sleep(0.02 + random.uniform(-0.001, 0.001))
        finally:
            client.close()
