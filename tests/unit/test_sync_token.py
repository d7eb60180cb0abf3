"""Where the server's token comes from, and what is refused."""

import os

import pytest

from e2e_fp8.errors import ConfigError, EngineError
from e2e_fp8.rollout.token_guard import TokenGuard
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.token import read_token, require_token_for_dev_routes, write_token

TOKEN = "0123456789abcdef"


def test_token_from_the_environment_or_a_private_file(tmp_path):
    path = tmp_path / "token"
    write_token(path, TOKEN)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token({"E2E_FP8_TOKEN_FILE": str(path)}) == TOKEN
    assert read_token({"E2E_FP8_TOKEN": TOKEN * 2, "E2E_FP8_TOKEN_FILE": str(path)}) == TOKEN * 2
    write_token(path, TOKEN * 3)
    assert read_token({"E2E_FP8_TOKEN_FILE": str(path)}) == TOKEN * 3


def test_unsafe_tokens_are_refused(tmp_path):
    for environ, message in (
        ({}, "is not set: set E2E_FP8_TOKEN"),
        ({"E2E_FP8_TOKEN": "short"}, "has 5 characters"),
        ({"E2E_FP8_TOKEN_FILE": str(tmp_path / "absent")}, "cannot read .*absent"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_token(environ)
    path = tmp_path / "token"
    write_token(path, TOKEN)
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 0640\): chmod 600"):
        read_token({"E2E_FP8_TOKEN_FILE": str(path)})


def test_control_routes_need_a_token(monkeypatch):
    require_token_for_dev_routes({})
    require_token_for_dev_routes({"VLLM_SERVER_DEV_MODE": "0"})
    require_token_for_dev_routes({"VLLM_SERVER_DEV_MODE": "1", "E2E_FP8_TOKEN": TOKEN})
    with pytest.raises(ConfigError, match="token is not set"):
        require_token_for_dev_routes({"VLLM_SERVER_DEV_MODE": "1"})
    for name in ("E2E_FP8_TOKEN", "E2E_FP8_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="token is not set"):
        TokenGuard(None)  # type: ignore[arg-type]


def test_client_names_the_server_it_cannot_reach():
    client = ServerClient("http://127.0.0.1:9", TOKEN, timeout_s=5)
    assert not client.is_healthy()
    with pytest.raises(EngineError, match=r"The rollout server http://127.0.0.1:9 cannot be reached for /pause"):
        client.post("/pause")
    with pytest.raises(ConfigError, match="URL 'localhost:8000' is not http"):
        ServerClient("localhost:8000", TOKEN, timeout_s=5)
