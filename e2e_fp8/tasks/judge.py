"""Reward by a language model behind an OpenAI-compatible endpoint (``POST {url}/chat/completions``)."""

import re
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import JudgeConfig
from e2e_fp8.tasks.served import ServedError, post_json

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

KEY_VARIABLE = "E2E_FP8_JUDGE_KEY"
_SCORE = re.compile(r"score\W{0,6}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FIELDS = re.compile(r"\{(prompt|answer|response)\}")


class JudgeError(ServedError):
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
    try:
        return post_json(
            f"{str(cfg.url).rstrip('/')}/chat/completions",
            body,
            _content,
            what="a chat completion",
            key_variable=KEY_VARIABLE,
            timeout_s=cfg.timeout_s,
            retries=cfg.retries,
        )
    except ServedError as error:
        raise JudgeError(
            f"the judge at {cfg.url} (task.judge) did not score prompt {uid} {error}. Check url, model and {KEY_VARIABLE}, or raise "
            "task.judge.timeout_s or retries."
        ) from error


def _content(answer: Any) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content
