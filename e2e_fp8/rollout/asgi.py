"""Requests and answers of the token guard, as ASGI has them."""

import json
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from e2e_fp8.rollout.in_flight import Receive, Scope, Send


def query_of(scope: Scope) -> dict[str, str]:
    """Last value of each parameter of the query, which is the one that vLLM takes."""
    return {name: values[-1] for name, values in parse_qs(scope.get("query_string", b"").decode(), keep_blank_values=True).items()}


def fields_of(text: str | bytes) -> dict[str, Any]:
    """A JSON object, an ``UpdateStep`` for example; empty where it is none, which the workers, who read steps whole, refuse."""
    try:
        fields = json.loads(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def version_to_compare(fields: Mapping[str, Any]) -> int | None:
    """The policy version of an ``UpdateStep`` that names a channel, if its trainer is going to compare bytes."""
    try:
        return int(fields["policy_version"]) if fields["compare"] and isinstance(fields["channel"], str) else None
    except (ValueError, KeyError, TypeError, OverflowError):
        # refused by the workers
        return None


async def body_of(receive: Receive) -> bytes | None:
    """The body of the request; None when the client went away before it had sent all of it."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def again(body: bytes, receive: Receive) -> Receive:
    """``receive`` for who has not seen that ``body_of`` has read it."""
    given = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def with_status(send: Send, seen: list[int]) -> Send:
    """``send`` that notes in ``seen`` with what status an answer begins."""

    async def noting(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])
        await send(message)

    return noting


async def refuse_request(scope: Scope, send: Send, status: int, sentence: str) -> None:
    """Answer with an error of one sentence; a WebSocket is closed with it."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": sentence})
        return
    await answer_request(send, status, {"error": {"message": sentence, "type": "e2e_fp8", "code": status}})


async def answer_request(send: Send, status: int, content: Any) -> None:
    """Answer with JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
