"""Reward by a served reward model: a sequence classifier or reward head behind vLLM's pooling endpoints.

| ``task.reward_model.endpoint`` | request | read |
|---|---|---|
| classify | ``input`` with prompt and response in the template | ``data[0].probs[class_index]`` |
| score | ``queries`` the prompt, ``documents`` the response (a cross encoder) | ``data[0].score`` |
| pooling | ``input`` as for classify | ``data[0].data``: the vector's ``class_index``, or the last token's where there is one a token |
"""

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import RewardModelConfig
from e2e_fp8.tasks.served import ServedError, post_json

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

KEY_VARIABLE = "E2E_FP8_REWARD_MODEL_KEY"
_FIELDS = re.compile(r"\{(prompt|answer|response)\}")


class RewardModelError(ServedError):
    """The reward model cannot be reached, refuses, or answers with no finite number."""


def reward_model_reward(prompt: "Prompt", response_text: str, cfg: RewardModelConfig) -> float:
    """The model's number, times ``cfg.factor`` and cut to ``cfg.smallest .. cfg.largest``.

    Raises:
        RewardModelError: after all retries, or at once where a retry cannot help; names endpoint, prompt and cause.
    """
    try:
        value = post_json(
            f"{str(cfg.url).rstrip('/')}/{cfg.endpoint}",
            _request(prompt, response_text, cfg),
            lambda answer: _number(answer, cfg),
            what=f"that of /{cfg.endpoint}",
            key_variable=KEY_VARIABLE,
            timeout_s=cfg.timeout_s,
            retries=cfg.retries,
        )
    except ServedError as error:
        raise RewardModelError(
            f"the reward model at {cfg.url}/{cfg.endpoint} (task.reward_model) did not score prompt {prompt.uid} {error}. Check url, "
            f"endpoint, model, class_index and {KEY_VARIABLE}, or raise task.reward_model.timeout_s or retries."
        ) from error
    return min(cfg.largest, max(cfg.smallest, cfg.factor * value))


def reward_model_rewards(responses: "Sequence[tuple[Prompt, str]]", cfg: RewardModelConfig) -> list[float]:
    """``reward_model_reward`` of each, ``cfg.parallel`` requests under way at once, in order; the first failure is raised."""
    with ThreadPoolExecutor(max_workers=cfg.parallel) as pool:
        pending = [pool.submit(reward_model_reward, prompt, text, cfg) for prompt, text in responses]
        try:
            return [future.result() for future in pending]
        except BaseException:
            # what has not been sent yet would be scored for nothing
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _request(prompt: "Prompt", response_text: str, cfg: RewardModelConfig) -> dict[str, Any]:
    body: dict[str, Any] = {"model": cfg.model}
    if cfg.activation is not None:
        body["use_activation"] = cfg.activation
    if cfg.endpoint == "score":
        return body | {"queries": prompt.text, "documents": response_text}
    values = {"prompt": prompt.text, "answer": prompt.answer, "response": response_text}
    # one pass, so that a response that spells {answer} stays as it is
    return body | {"input": _FIELDS.sub(lambda match: values[match[1]], cfg.template)}


def _number(answer: Any, cfg: RewardModelConfig) -> float:
    entry = answer["data"][0]
    if cfg.endpoint == "score":
        value = entry["score"]
    else:
        value = entry["probs"] if cfg.endpoint == "classify" else entry["data"]
        if not isinstance(value, list):
            raise TypeError(f"a list of numbers was expected, not {type(value).__name__}")
        if value and isinstance(value[-1], list):
            value = value[-1]
        value = value[cfg.class_index]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
