"""One JSON request to a served model, with retries where they may help. Free of torch."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from e2e_fp8.errors import UserError

_BACKOFF_S = 0.25
"""Wait before the first retry; doubled for each further one."""


class ServedError(UserError):
    """A served model cannot be reached, refuses, or answers with something else than asked."""


def post_json[T](
    url: str,
    body: dict[str, Any],
    read: Callable[[Any], T],
    *,
    what: str,
    key_variable: str,
    timeout_s: float,
    retries: int,
) -> T:
    """What ``read`` finds in the answer; the key, if ``key_variable`` is set in the environment, goes as a bearer token.

    Time-outs, broken connections and status 429 or 5xx are retried.

    Raises:
        ServedError: ``after N requests, last: CAUSE``, for the caller to complete into a sentence; ``what`` says what the answer should
            have been where ``read`` raises KeyError, IndexError, TypeError or ValueError.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_variable):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    cause = ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return read(json.load(response))
        except urllib.error.HTTPError as error:
            cause = f"status {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code != 429 and error.code < 500:
                break
        except TimeoutError:
            cause = f"no answer within {timeout_s:g} s"
        except (urllib.error.URLError, HTTPException, OSError) as error:
            cause = f"{getattr(error, 'reason', None) or error}"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            cause = f"the answer is not {what} ({type(error).__name__}: {error})"
            break
    raise ServedError(f"after {attempt + 1} requests, last: {cause}")
