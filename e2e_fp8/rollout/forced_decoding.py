"""Decode given tokens: the engine's log-probs of a response that was sampled before, one token at a time as when it was sampled.

vLLM's ``prompt_logprobs`` would score the response in one prefill, which is another computation than the rollout's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.sampling import split_record


@dataclass(frozen=True, kw_only=True)
class ForcedResponse:
    """What the engine says of one given response."""

    log_probs: torch.Tensor
    """float32 ``[R]``, at the sampling temperature."""
    routed_experts: Any | None
    """numpy ``[P + R - 1, L, k]``; None for a dense model or without capture."""


@contextmanager
def forced_tokens(runner: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[None]:
    """Inside the block vLLM's sampler of ``runner`` gives the next response token of ``sequences[seed]``, a ``(prompt, response)``, to the
    request with that seed.

    Logits, their processing and the log-probs stay vLLM's; only the choice is replaced. Both of vLLM's model runners are known; neither
    may schedule a step ahead of the tokens.
    """
    sampler = runner.sampler
    inner = sampler.sample
    places = _places_of_second_runner if hasattr(sampler, "sampling_states") else _places_of_first_runner

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, log_probs = inner(logits, *args, **kwargs)
        found = places(runner, sequences, args)
        if len(found) != len(sampled):
            raise EngineError(f"vLLM sampled {len(sampled)} tokens for {len(found)} requests: forced decoding needs one for each.")
        chosen = [sequences[seed][1][place] for seed, place in found]
        return torch.tensor(chosen, dtype=sampled.dtype, device=sampled.device), log_probs

    sampler.__dict__["sample"] = sample
    try:
        yield
    finally:
        del sampler.__dict__["sample"]


def _places_of_first_runner(runner: Any, sequences: Any, args: Any) -> list[tuple[int, int]]:
    """``(seed, place of the next token in the response)`` of each request of this step."""
    requests = [runner.requests[name] for name in runner.input_batch.req_ids]
    return [(request.sampling_params.seed, len(request.output_token_ids)) for request in requests]


def _places_of_second_runner(runner: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], args: Any) -> list[tuple[int, int]]:
    """The same where the sampler gets ``(expanded_idx_mapping, idx_mapping_np, positions, ...)`` after the logits."""
    _, slots, positions, *_ = args
    seeds = runner.sampler.sampling_states.seeds.np[slots].tolist()
    # the token of a prompt that is not whole yet is discarded, whichever it is
    return [(seed, max(0, last + 1 - len(sequences[seed][0]))) for seed, last in zip(seeds, positions.tolist(), strict=True)]


def forced_responses(
    engine: VllmEngine,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    watch: Callable[[torch.nn.Module], AbstractContextManager[Any]] | None = None,
    top_p: float = 1.0,
) -> list[ForcedResponse]:
    """Decode all ``(prompt, response)`` together; ``watch(model)`` is entered around it. Prefixes cached before are forgotten.

    Below 1, ``top_p`` truncates the distribution whose log-probs are reported: a token outside of it has minus infinity.

    Raises:
        EngineError: vLLM decoded other tokens than those given.
    """
    settings = {"temperature": engine.cfg.rollout.temperature, "top_p": top_p, "ignore_eos": True}
    requests = [
        (prompt, settings | {"seed": index, "max_tokens": len(response)}) for index, (prompt, response) in enumerate(sequences)
    ]  # fmt: skip
    responses = [list(response) for _, response in sequences]

    def around(model: torch.nn.Module) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(forced_tokens(engine.model_runner(), sequences))
        if watch is not None:
            stack.enter_context(watch(model))
        return stack

    engine.reset_prefix_cache()
    outputs, _ = engine.probe(requests, around)
    found = []
    for output, tokens in zip(outputs, responses, strict=True):
        if list(output.token_ids) != tokens:
            raise EngineError("vLLM decoded other tokens than those it was given, so its log-probs are not those of the response.")
        log_probs = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)])
        ids, _ = split_record(output.routed_experts, engine.hf_config["num_hidden_layers"])
        found.append(ForcedResponse(log_probs=log_probs, routed_experts=ids))
    return found
