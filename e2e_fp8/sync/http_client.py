"""The trainer's end of the rollout server's control routes: JSON over HTTP with a bearer token, standard library only."""

import http.client
import json
import re
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from e2e_fp8.errors import ConfigError, EngineError

UPDATE_ROUTE = "/weight_update"
"""The token guard's own route: one step of a weight update, or all of it announced ahead."""
REFUSE_ROUTE = "/refuse_generation"
"""The guard's route by which a trainer marks weights as unusable until the next finished update."""
METHOD_ROUTE = "/collective_rpc"
REPEATABLE_ROUTES = ("/pause", "/resume", REFUSE_ROUTE)
"""POST routes that may be asked twice: the second time changes nothing."""
REPEATABLE_METHODS = ("describe_worker", "weight_state", "prepare_update", "receipt", "close_channel", "open_flags")
"""Worker methods of which the same holds. Not ``weight_update``, whose messages come once, nor what opens a channel."""
_FRESH_S = 2.0
"""How long an idle connection is taken for open; vLLM closes it after 5 seconds."""
_VLLM_WRAPPING = re.compile(r"^(?:Call to \w+ method failed: |Worker failed with error ')+")


class ServerClient:
    """Calls to one server over one connection; every failure is an EngineError of one sentence that names route and server."""

    def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
        """``url`` like ``http://127.0.0.1:8000``; ``timeout_s`` bounds each call."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"The rollout server's URL {url!r} is not http://HOST:PORT or https://HOST:PORT: correct it.")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._token = token
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._open: http.client.HTTPConnection | None = None
        self._idle_since = 0.0
        self._lock = threading.Lock()

    def _connected(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """The connection of the last call and True, or a new one where the server has closed that, or may be about to."""
        connection = self._open
        if connection is not None and connection.sock is not None:
            is_fresh = time.monotonic() - self._idle_since < _FRESH_S
            # Nothing may come unasked: a readable socket is one that the server closed while it was idle.
            if is_fresh and not _is_readable(connection.sock):
                connection.sock.settimeout(timeout_s)
                return connection, True
            connection.close()
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        self._open = kind(self._host, self._port, timeout=timeout_s)
        return self._open, False

    def _answered(self, method: str, route: str, body: str | None, timeout_s: float, *, repeatable: bool) -> http.client.HTTPResponse:
        """The answer, of which the body is still to be read.

        A server may close an idle connection just as a request is sent, which looks like its death. If nothing was answered on a kept
        connection, a repeatable request is therefore sent once more, on a new one.
        """
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection, is_kept = self._connected(timeout_s)
        try:
            connection.request(method, route, body, headers)
            return connection.getresponse()
        except ConnectionError:
            if not (is_kept and repeatable):
                raise
        self._drop()
        connection, _ = self._connected(timeout_s)
        connection.request(method, route, body, headers)
        return connection.getresponse()

    def _request(self, method: str, route: str, body: Any, timeout_s: float, *, repeatable: bool) -> tuple[int, bytes]:
        content = None if body is None else json.dumps(body)
        with self._lock:
            try:
                response = self._answered(method, route, content, timeout_s, repeatable=repeatable)
                status, content = response.status, response.read()
                self._idle_since = time.monotonic()
                return status, content
            except BaseException as error:
                self._drop()
                if isinstance(error, TimeoutError):
                    raise EngineError(f"The rollout server {self.url} did not answer {route} within {timeout_s:g} s.") from error
                if isinstance(error, OSError | http.client.HTTPException):
                    raise EngineError(
                        f"The rollout server {self.url} cannot be reached for {route} ({type(error).__name__}: {error}); it died or "
                        "never started."
                    ) from error
                raise

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def close(self) -> None:
        """Close the connection, and end a call that another thread waits in, with an EngineError there; another call opens a new one."""
        connection = self._open
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        elif connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            return self._request("GET", "/health", None, 5.0, repeatable=True)[0] == 200
        except EngineError:
            return False

    def get(self, route: str) -> Any:
        """JSON that a GET of ``route`` returns."""
        return self._checked(route, *self._request("GET", route, None, self.timeout_s, repeatable=True))

    def post(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """JSON that a POST of ``body`` to ``route`` returns; None for an empty answer. ``timeout_s`` replaces the client's."""
        body = {} if body is None else body
        return self._checked(
            route, *self._request("POST", route, body, timeout_s or self.timeout_s, repeatable=_is_repeatable(route, body))
        )

    def collective(self, method: str, *args: str, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """What ``method`` of the worker extension returns at every rank.

        Raises EngineError with the worker's own sentence when a rank answers ``{"error": sentence}``.
        """
        return _results(self.post(METHOD_ROUTE, {"method": method, "args": list(args)}, timeout_s=timeout_s))

    def update(self, step: dict[str, Any], *, pause: str | None = None, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """What ``weight_update`` returns at every rank for ``step``, an ``UpdateStep``; errors as of :meth:`collective`.

        ``pause`` (``wait`` or ``abort``): generation is paused first and counts as torn from then on, see ``TokenGuard``.
        """
        return _results(self.post(UPDATE_ROUTE if pause is None else f"{UPDATE_ROUTE}?pause={pause}", step, timeout_s=timeout_s))

    def _checked(self, route: str, status: int, content: bytes) -> Any:
        if status == 401:
            raise EngineError(f"The rollout server {self.url} refused the token for {route}: give trainer and server the same token.")
        if status != 200:
            raise EngineError(f"The rollout server refused {route} ({status}): {_sentence(content)}")
        return json.loads(content) if content else None


def _is_readable(connection: socket.socket) -> bool:
    # not select, which refuses file numbers above 1023
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _is_repeatable(route: str, body: Any) -> bool:
    return route.partition("?")[0] in REPEATABLE_ROUTES or (route == METHOD_ROUTE and body.get("method") in REPEATABLE_METHODS)


def _results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    for result in answer["results"]:
        if "error" in result:
            raise EngineError(result["error"])
    return answer["results"]


def _sentence(content: bytes) -> str:
    """The message in an error body of vLLM's or FastAPI's shape, without the wrapping that vLLM adds on the way."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return _VLLM_WRAPPING.sub("", str(message))[:600]
