"""Reward functions, which of them a configuration asks for, and the strict wrapper around them. Free of torch."""

import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import TaskConfig
from e2e_fp8.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

RewardFunction = Callable[["Prompt", str], float]


def reward_functions(task: TaskConfig) -> dict[str, RewardFunction]:
    """The functions of ``task.reward_weights``, or of ``task.reward``, by name and in order.

    Raises:
        ConfigError: a user's function cannot be imported.
    """
    return {name: _reward_function(name, task) for name in task.reward_weights or {task.reward: 1.0}}


def _reward_function(name: str, task: TaskConfig) -> RewardFunction:
    if name == "verifier":
        return _verifier(task)
    if name == "math":
        return math_reward
    if name == "code":
        from e2e_fp8.tasks.code_reward import code_reward

        return lambda prompt, response: code_reward(prompt, response, task.code)
    if name == "judge":
        from e2e_fp8.tasks.judge import judge_reward

        return lambda prompt, response: judge_reward(prompt, response, task.judge)
    if name == "reward_model":
        from e2e_fp8.tasks.reward_model import reward_model_reward

        return lambda prompt, response: reward_model_reward(prompt, response, task.reward_model)
    if ":" not in name:
        raise ConfigError(f"task.reward: {name!r} is not verifier, math, code, judge, reward_model or package.module:function.")
    return user_reward(name)


def _verifier(task: TaskConfig) -> RewardFunction:
    if task.kind == "file":
        return lambda prompt, response: float(response.strip() == prompt.answer.strip())
    from e2e_fp8.tasks.gym import GymVerifier

    return GymVerifier(task)


def math_reward(prompt: "Prompt", response_text: str) -> float:
    """1.0 when math-verify finds the response's final expression equal to the reference answer, else 0.0.

    Raises:
        ValueError: math-verify finds no expression in the reference answer, so no response could ever be right.
    """
    from math_verify import parse, verify

    # 0 turns the timeouts off: they are signal alarms, which work in the main thread alone
    reference = parse(f"${prompt.answer}$", parsing_timeout=0)
    if not reference:
        raise ValueError(f"no mathematical expression in the reference answer {prompt.answer!r}")
    return 1.0 if verify(reference, parse(response_text, parsing_timeout=0), timeout_seconds=0) else 0.0


def user_reward(import_path: str) -> RewardFunction:
    """``package.module:function`` called as ``function(prompt_text, response_text, answer, metadata) -> float``.

    Raises:
        ConfigError: the module or the function cannot be imported.
    """
    function = imported_function(import_path, "task.reward")
    return lambda prompt, response: function(prompt.text, response, prompt.answer, prompt.metadata)


def imported_function(import_path: str, field: str) -> Callable[..., Any]:
    """The function at ``package.module:function``; ``field`` is the configuration field that names it.

    Raises:
        ConfigError: the module or the function cannot be imported.
    """
    module_name, _, attribute = import_path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{field}: {import_path} cannot be imported ({error}); give package.module:function on the Python path."
        ) from error
    if not callable(function):
        raise ConfigError(f"{field}: {import_path} is a {type(function).__name__}, not a function; give package.module:function.")
    return function


def strict_score(reward: RewardFunction, prompt: "Prompt", response_text: str) -> float:
    """Finite reward of one response.

    Raises:
        UserError: what the function itself says is the user's to mend (a judge that does not answer).
        DataError: the function raised anything else, or returned something that is not a finite number; names the prompt.
    """
    try:
        value = float(reward(prompt, response_text))
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"the reward of prompt {prompt.uid} raised {type(error).__name__}: {error} "
            f"(response {response_text[:60]!r}); fix the reward function."
        ) from error
    if not math.isfinite(value):
        raise DataError(
            f"the reward of prompt {prompt.uid} is {value} (response {response_text[:60]!r}); a reward must be a finite number."
        )
    return value
