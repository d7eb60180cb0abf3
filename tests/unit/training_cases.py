"""Small configurations and packed batches for the trainer's tests."""

import os

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

from typing import Any

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.types import PackedBatch, TokenStats

VOCAB = 64


def small_config(
    architecture: str = "qwen3_moe", precision: str = "fp8", *, numerics: dict[str, Any] | None = None, **model: Any
) -> Config:
    """Two layers of width 128 on the CPU."""
    fields = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "initializer_range": 0.05,
        **model,
    }
    return Config.model_validate(
        {
            "model": fields,
            "numerics": {"training_precision": precision, "rollout_precision": precision, **(numerics or {})},
            "run": {"backend": "cpu"},
            "training": {"weight_decay": 0.1},
        }
    )


def random_batch(lengths: list[int], generator: torch.Generator, vocab: int = VOCAB) -> PackedBatch:
    """Random tokens; every position but the last of a sequence is trained on its successor."""
    total = sum(lengths)
    tokens = torch.randint(0, vocab, (total,), generator=generator)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    ends = (cu_seqlens[1:] - 1).long()
    targets, mask = tokens.roll(-1), torch.ones(total)
    targets[ends], mask[ends] = 0, 0.0
    zeros = torch.zeros(total)
    return PackedBatch(
        token_ids=tokens,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=cu_seqlens,
        targets=targets,
        loss_mask=mask,
        advantages=zeros,
        rollout_log_probs=zeros,
        old_log_probs=zeros,
    )


def nll(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of negative log-likelihoods over the mask."""
    return -(stats.log_probs * batch.loss_mask).sum(), {"entropy": (stats.entropy * batch.loss_mask).sum().detach()}


def trained_tokens(batches: list[PackedBatch]) -> float:
    """Tokens inside the loss masks."""
    return float(sum(b.loss_mask.sum() for b in batches))


def fresh_generator() -> torch.Generator:
    """Fresh inputs every run; the seed is printed when a test fails."""
    fresh = torch.Generator()
    print("seed", fresh.seed())
    return fresh
