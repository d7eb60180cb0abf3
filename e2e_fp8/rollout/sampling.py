"""Seeds and limits of sampling, independent of vLLM."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from e2e_fp8.errors import DataError
from e2e_fp8.types import Prompt, Sample


def request_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """63-bit seed of one sample: distinct per (seed, prompt, sample) and the same on every run and machine."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_prompts(prompts: Sequence[Prompt], *, window: int, max_response_tokens: int, vocab_size: int) -> None:
    """Raise DataError naming the first prompt that is empty, out of vocabulary, or leaves no room for the response."""
    limit = window - max_response_tokens
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise DataError(f"Prompt {prompt.uid!r} has no tokens.")
        if length > limit:
            raise DataError(
                f"Prompt {prompt.uid!r} has {length} tokens, but at most {limit} fit: rollout.max_model_len is {window} and "
                f"rollout.max_response_tokens is {max_response_tokens}. Raise the window or drop the prompt."
            )
        if not all(0 <= token < vocab_size for token in prompt.token_ids):
            raise DataError(f"Prompt {prompt.uid!r} has token ids outside the model's vocabulary of {vocab_size}.")


def length_at_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Number of leading tokens whose text first contains a stop string, or None when none does."""
    if not stop or not any(text in decode(token_ids) for text in stop):
        return None
    for length in range(1, len(token_ids) + 1):
        decoded = decode(token_ids[:length])
        if any(text in decoded for text in stop):
            return length
    return len(token_ids)


def split_record(record: numpy.ndarray | None, layers: int) -> tuple[numpy.ndarray | None, numpy.ndarray | None]:
    """``(expert ids, gate weights)`` of a request: ``record`` is ``[n, L, k]`` ids alone, or uint32 ``[n, 2 L, k]``.

    Raises:
        ValueError: neither of the two.
    """
    if record is None or record.shape[1] == layers:
        return record, None
    if record.shape[1] != 2 * layers or record.dtype != numpy.uint32:
        raise ValueError(f"a routing record of shape {record.shape} and {record.dtype} for {layers} layers")
    return record[:, :layers].astype(numpy.uint16), numpy.ascontiguousarray(record[:, layers:]).view(numpy.float32)


def finished_sample(
    prompt: Prompt,
    *,
    group_id: int,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    finish_reason: str | None,
    routed_experts: Any,
    policy_version: int,
    stop: Sequence[str],
    eos_token_id: int,
    decode: Callable[[Sequence[int]], str],
    routed_weights: Any = None,
    cached_tokens: int | None = None,
    preemptions: int | None = None,
) -> Sample:
    """A sample as the engine returned it, cut at the token that completes a stop string; the text leaves the end token out."""
    cut = length_at_stop(token_ids, stop, decode)
    if cut is not None:
        token_ids, log_probs, finish_reason = token_ids[:cut], log_probs[:cut], "stop"
    # the last token of what is left was not forwarded, or what followed it is gone
    forwarded = len(prompt.token_ids) + len(token_ids) - 1
    routed_experts, routed_weights = (values if values is None else values[:forwarded] for values in (routed_experts, routed_weights))
    return Sample(
        prompt=prompt,
        group_id=group_id,
        response_token_ids=tuple(token_ids),
        response_text=decode(token_ids[:-1] if token_ids and token_ids[-1] == eos_token_id else token_ids),
        rollout_log_probs=tuple(log_probs),
        routed_experts=routed_experts,
        finish_reason=finish_reason,  # type: ignore[arg-type]
        policy_version=policy_version,
        routed_weights=routed_weights,
        cached_tokens=cached_tokens,
        preemptions=preemptions,
    )
