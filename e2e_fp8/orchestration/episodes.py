"""Responses of several turns: the policy writes, a tool answers, the policy writes on.

An episode is one sequence. Its response is every token after the prompt, in the order in which the engine saw them, so packing
and log-probs need nothing new; tokens of a tool result have ``response_mask`` False, and are neither trained nor corrected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy

from e2e_fp8.tasks.tokenizer import Tokenizer
from e2e_fp8.tasks.tools import Tool, tool_call, tool_result
from e2e_fp8.types import Prompt, Sample


class Generator(Protocol):
    """The part of a rollout engine that episodes need."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]: ...


def joined(first: Sample, tool_tokens: Sequence[int], then: Sample) -> Sample:
    """One sample of ``first``, a tool's tokens and ``then``, whose prompt was all of that.

    Text and end are those of ``then``, which is what rewards read. Routing of a token that ``first`` forwarded is that of ``first``, whose
    log-probs came of it; ``then`` may have computed the same token once more, and otherwise.

    Raises:
        ValueError: ``then`` did not start from those tokens, or another policy version wrote it.
    """
    prefix = (*first.prompt.token_ids, *first.response_token_ids, *tool_tokens)
    if then.prompt.token_ids != prefix:
        raise ValueError(f"prompt {first.prompt.uid}: a turn does not continue the one before")
    if then.policy_version != first.policy_version:
        raise ValueError(f"prompt {first.prompt.uid}: turns of policy versions {first.policy_version} and {then.policy_version}")
    before = first.response_mask or (True,) * len(first.response_token_ids)
    return replace(
        then,
        prompt=first.prompt,
        group_id=first.group_id,
        response_token_ids=(*first.response_token_ids, *tool_tokens, *then.response_token_ids),
        rollout_log_probs=(*first.rollout_log_probs, *(0.0 for _ in tool_tokens), *then.rollout_log_probs),
        response_mask=(*before, *(False for _ in tool_tokens), *(True for _ in then.response_token_ids)),
        routed_experts=_joined_rows(first.routed_experts, then.routed_experts),
        routed_weights=_joined_rows(first.routed_weights, then.routed_weights),
        cached_tokens=first.cached_tokens,
        preemptions=None if first.preemptions is None or then.preemptions is None else first.preemptions + then.preemptions,
    )


def _joined_rows(first: Any, then: Any) -> Any:
    """Rows of the first turn, and of the second for the tokens after them; None when either turn has none."""
    return None if first is None or then is None else numpy.concatenate([first, then[len(first) :]])


def generate_episodes(
    engine: Generator,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    seed: int,
    tools: Mapping[str, Tool],
    tokenizer: Tokenizer,
    max_turns: int,
    max_result_tokens: int,
    longest_prompt: int,
) -> list[Sample]:
    """As ``engine.generate``, with up to ``max_turns`` turns a sample; a function of weights and arguments.

    Args:
        longest_prompt: Tokens that may stand before a turn (window less the longest turn); an episode whose next turn has no
            room ends as it is, with finish reason ``length``.
    """
    samples = engine.generate(prompts, group_size=group_size, seed=seed)
    open_ = dict.fromkeys(range(len(samples)))
    for turn in range(1, max_turns):
        continued: dict[int, tuple[tuple[int, ...], Prompt]] = {}
        for index in open_:
            sample = samples[index]
            call = tool_call(sample.response_text) if sample.finish_reason == "stop" else None
            if call is None:
                continue
            tokens = tokenizer.encode_answer(tool_result(call, tools))[:max_result_tokens]
            prefix = (*sample.prompt.token_ids, *sample.response_token_ids, *tokens)
            if len(prefix) > longest_prompt:
                samples[index] = replace(sample, finish_reason="length")
            else:
                continued[index] = tokens, replace(sample.prompt, token_ids=prefix)
        if not continued:
            break
        # a seed of its own for each turn: the engine derives those of samples from the position in the call
        turns = engine.generate([prompt for _, prompt in continued.values()], group_size=1, seed=seed + turn)
        for (index, (tokens, _)), then in zip(continued.items(), turns, strict=True):
            samples[index] = joined(samples[index], tokens, then)
        open_ = dict.fromkeys(continued)
    return samples
