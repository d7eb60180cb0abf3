"""Temperature and log-probs of vLLM's second model runner in the operators that the trainer shares.

vLLM has two model runners; dense models get the second by default. The first one's sampler is what the trainer shares already:
``torch.log_softmax`` of logits divided by a tensor. The second one's divides approximately and sums a row's exponentials in a Triton
kernel of its own; its two functions are replaced, in the process of the engine alone.

Shape legend: ``M`` sampled rows, ``V`` vocabulary, ``R`` request slots.
"""

from typing import Any

import torch

from e2e_fp8.errors import ConfigError
from e2e_fp8.patching import Patch, apply_all, revert, verify_live
from e2e_fp8.rollout.vllm_patch import vllm_patch


def token_log_probs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``logits [M, V]``, ``token_ids [M, n]`` -> float32 ``[M, n]``."""
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, token_ids.to(torch.int64))


def divide_by_temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """``logits [M, V]`` in place, row m by ``temperature [R]`` of its request's slot; 0, which means greedy, leaves a row alone."""
    divisors_M = temperature[expanded_idx_mapping]
    logits.div_(torch.where(divisors_M == 0.0, 1.0, divisors_M).unsqueeze(1))


def _patch(name: str, target: str, source_sha256: str, replacement: Any, also_bound_in: tuple[str, ...] = ()) -> Patch:
    return vllm_patch(
        name=name,
        target=target,
        also_bound_in=also_bound_in,
        reason="The second model runner's sampler computes other bits than torch's operators, which the trainer and the first runner use.",
        upstream="not filed; vllm/v1/worker/gpu/sample",
        remove_when="the second runner's sampler takes torch.log_softmax of logits divided by the temperature",
        source_sha256=source_sha256,
        replacement=replacement,
    )


def sampler_patches() -> dict[str, Patch]:
    """Cause -> patch."""
    return {
        "log_softmax": _patch(
            "v2_token_log_probs",
            "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
            "c60febe899cfa3e441dcc1e8a8ee1de4f47d6c79567f4ff3ddac37c76ac3794e",
            token_log_probs,
        ),
        "temperature": _patch(
            "v2_temperature",
            "vllm.v1.worker.gpu.sample.gumbel:apply_temperature",
            "50fb34c9d66ec5adf7bdfcec73800bf395e82e8ae91b9ede4b04fca1680e3462",
            divide_by_temperature,
            also_bound_in=("vllm.v1.worker.gpu.sample.states",),
        ),
    }


def share_sampler(shared: set[str]) -> None:
    """Put in place what ``shared`` says and give back the rest. Safe to call more than once.

    Raises:
        ConfigError: this vLLM is not the one that the replacements were written against.
    """
    for cause, patch in sampler_patches().items():
        if cause in shared:
            apply_all([patch])
        else:
            revert(patch)


def is_live(cause: str) -> bool:
    """Whether the second runner's sampler has the shared operator of ``cause``."""
    try:
        verify_live(sampler_patches()[cause])
    except ConfigError:
        return False
    return True
