"""Reward by a language model behind an OpenAI-compatible endpoint (``POST {url}/chat/completions``)."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import JudgeConfig
from e2e_fp8.errors import UserError

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

KEY_VARIABLE = "E2E_FP8_JUDGE_KEY"
_SCORE = re.compile(r"score\W{0,6}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FIELDS = re.compile(r"\{(prompt|answer|response)\}")
_BACKOFF_S = 0.25
"""Wait before the first retry; doubled for each further one."""


class JudgeError(UserError):
    """The judge cannot be reached, refuses, or does not answer with a score."""


def judge_reward(prompt: "Prompt", response_text: str, cfg: JudgeConfig) -> float:
    """The judge's score over ``cfg.best_score``, cut to [0, 1]. Asked at temperature 0.

    Raises:
        JudgeError: after all retries, or at once where a retry cannot help; names endpoint, prompt and cause.
    """
    values = {"prompt": prompt.text, "answer": prompt.answer, "response": response_text}
    # one pass, so that a response that spells {answer} stays as it is
    question = _FIELDS.sub(lambda match: values[match[1]], cfg.template)
    answer = _ask(question, cfg, prompt.uid)
    scores = _SCORE.findall(answer) or _NUMBER.findall(answer)
    if not scores:
        raise JudgeError(
            f"the judge {cfg.model!r} gave no score for prompt {prompt.uid} ({answer[-80:]!r}); "
            "ask for a number in task.judge.template, or raise task.judge.max_tokens."
        )
    return min(1.0, max(0.0, float(scores[-1]) / cfg.best_score))


def _ask(question: str, cfg: JudgeConfig, uid: str) -> str:
    """Text of the judge's answer."""
    body = {"model": cfg.model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": cfg.max_tokens}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{str(cfg.url).rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST")
    cause = ""
    for attempt in range(cfg.retries + 1):
        if attempt:
            time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=cfg.timeout_s) as response:
                return _content(json.load(response))
        except urllib.error.HTTPError as error:
            cause = f"status {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code != 429 and error.code < 500:
                break
        except TimeoutError:
            cause = f"no answer within {cfg.timeout_s:g} s"
        except (urllib.error.URLError, HTTPException, OSError) as error:
            cause = f"{getattr(error, 'reason', None) or error}"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            cause = f"the answer is not a chat completion ({type(error).__name__}: {error})"
            break
    raise JudgeError(
        f"the judge at {cfg.url} (task.judge) did not score prompt {uid} after {attempt + 1} requests, last: {cause}. Check url, model and "
        f"{KEY_VARIABLE}, or raise task.judge.timeout_s or retries."
    )


def _content(answer: Any) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content
