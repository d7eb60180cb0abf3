"""The trainer's end of the rollout server's control routes: JSON over HTTP with a bearer token, standard library only."""

import http.client
import json
import re
from typing import Any
from urllib.parse import urlsplit

from e2e_fp8.errors import ConfigError, EngineError

_VLLM_WRAPPING = re.compile(r"^(?:Call to \w+ method failed: |Worker failed with error ')+")


class ServerClient:
    """Calls to one server; every failure is an EngineError of one sentence that names the route and the server."""

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

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _request(self, method: str, route: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        connection = self._connection(timeout_s)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, route, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError as error:
            raise EngineError(f"The rollout server {self.url} did not answer {route} within {timeout_s:g} s.") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"The rollout server {self.url} cannot be reached for {route} ({type(error).__name__}: {error}); it died or never started."
            ) from error
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            return self._request("GET", "/health", None, 5.0)[0] == 200
        except EngineError:
            return False

    def get(self, route: str) -> Any:
        """JSON that a GET of ``route`` returns."""
        return self._checked(route, *self._request("GET", route, None, self.timeout_s))

    def post(self, route: str, body: Any = None) -> Any:
        """JSON that a POST of ``body`` to ``route`` returns; None for an empty answer."""
        return self._checked(route, *self._request("POST", route, {} if body is None else body, self.timeout_s))

    def collective(self, method: str, *args: str) -> list[dict[str, Any]]:
        """What ``method`` of the worker extension returns at every rank.

        Raises EngineError with the worker's own sentence when a rank answers ``{"error": sentence}``.
        """
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)})
        results = answer["results"]
        for result in results:
            if "error" in result:
                raise EngineError(result["error"])
        return results

    def _checked(self, route: str, status: int, content: bytes) -> Any:
        if status == 401:
            raise EngineError(f"The rollout server {self.url} refused the token for {route}: give trainer and server the same token.")
        if status != 200:
            raise EngineError(f"The rollout server refused {route} ({status}): {_sentence(content)}")
        return json.loads(content) if content else None


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
