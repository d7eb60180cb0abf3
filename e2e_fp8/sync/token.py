"""The bearer token that trainer and rollout server share."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from e2e_fp8.errors import ConfigError

TOKEN_VARIABLE = "E2E_FP8_TOKEN"
TOKEN_FILE_VARIABLE = "E2E_FP8_TOKEN_FILE"
_SHORTEST = 16


def read_token(environ: Mapping[str, str] = os.environ) -> str:
    """The token of ``E2E_FP8_TOKEN``, or of the file that ``E2E_FP8_TOKEN_FILE`` names.

    Raises ConfigError when neither is set, when the token has fewer than 16 characters, or when others can read the file.
    """
    token, path = environ.get(TOKEN_VARIABLE, ""), environ.get(TOKEN_FILE_VARIABLE, "")
    if path and not token:
        token = _read_private(Path(path))
    if len(token) < _SHORTEST:
        found = f"has {len(token)} characters" if token else "is not set"
        raise ConfigError(
            f"The rollout server's token {found}: set {TOKEN_VARIABLE} to at least {_SHORTEST} random characters, or "
            f"{TOKEN_FILE_VARIABLE} to a file of mode 0600 that holds them."
        )
    return token


def _read_private(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"{TOKEN_FILE_VARIABLE}: {path} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 600 it.")
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE}: cannot read {path} ({error.strerror}); give a readable file of mode 0600.") from error


def write_token(path: Path, token: str) -> None:
    """Write ``token`` into a new file that only the owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)


def require_token_for_dev_routes(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when vLLM's unauthenticated control routes are on (``VLLM_SERVER_DEV_MODE=1``) and there is no token."""
    if environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        read_token(environ)
