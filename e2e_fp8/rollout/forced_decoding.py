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
def forced_tokens(runner: Any, responses: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside the block vLLM's sampler of ``runner`` gives the next token of ``responses[seed]`` to the request with that seed.

    Logits, their processing and the log-probs stay vLLM's; only the choice is replaced.
    """
    sampler = runner.sampler
    inner = sampler.sample

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, log_probs = inner(logits, *args, **kwargs)
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        if len(requests) != len(sampled):
            raise EngineError(f"vLLM sampled {len(sampled)} tokens for {len(requests)} requests: forced decoding needs one for each.")
        chosen = [responses[r.sampling_params.seed][len(r.output_token_ids)] for r in requests]
        return torch.tensor(chosen, dtype=sampled.dtype, device=sampled.device), log_probs

    sampler.__dict__["sample"] = sample
    try:
        yield
    finally:
        del sampler.__dict__["sample"]


def forced_responses(
    engine: VllmEngine,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    watch: Callable[[torch.nn.Module], AbstractContextManager[Any]] | None = None,
) -> list[ForcedResponse]:
    """Decode all ``(prompt, response)`` together; ``watch(model)`` is entered around it. Prefixes cached before are forgotten.

    Raises:
        EngineError: vLLM decoded other tokens than those given.
    """
    settings = {"temperature": engine.cfg.rollout.temperature, "ignore_eos": True}
    requests = [
        (prompt, settings | {"seed": index, "max_tokens": len(response)}) for index, (prompt, response) in enumerate(sequences)
    ]  # fmt: skip
    responses = [list(response) for _, response in sequences]

    def around(model: torch.nn.Module) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(forced_tokens(engine.model_runner(), responses))
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
