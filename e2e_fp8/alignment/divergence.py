"""Numbers of a mismatch: of its tokens, of expert choices, by layer and by position. Pure functions of recorded values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.alignment.compare import bits_differ
from e2e_fp8.correction.diagnostics import mismatch_metrics


def token_metrics(train: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> dict[str, float]:
    """Metrics of e2e_fp8.config.alignment_explain.METRICS, but ``changed_experts``, over all tokens of ``[R]`` log-probs a response.

    Raises:
        ValueError: the two sides have other lengths, or there is no token.
    """
    lengths = [len(row) for row in train]
    if lengths != [len(row) for row in rollout] or not sum(lengths):
        raise ValueError(f"log-probs of {sum(lengths)} and {sum(len(row) for row in rollout)} tokens cannot be compared")
    ours, theirs = torch.cat(list(train)), torch.cat(list(rollout))
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    known = mismatch_metrics(ours, theirs, torch.ones(len(ours)), boundaries)
    difference = (ours.double() - theirs.double()).abs()
    return {
        "mismatch_kl": known["mismatch_kl"],
        "abs_mean": known["train_rollout_logprob_abs_diff/mean"],
        "abs_max": known["train_rollout_logprob_abs_diff/max"],
        "tme": float(difference.exp().mean()),
        "tme_max": float(difference.max().exp()),
        "ratio_above_2": float((difference > math.log(2)).double().mean()),
    }


def changed_experts(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], covered: Sequence[torch.Tensor]) -> list[float]:
    """By layer, the share of ``theirs`` (ids int ``[n, L, k]``) that is not in ``ours`` (bool ``[n, L, E]``), where ``covered [n, L]``.

    Raises:
        ValueError: a layer has no covered token.
    """
    changed = assigned = torch.zeros(theirs[0].shape[1], dtype=torch.float64)
    for mine, ids, known in zip(ours, theirs, covered, strict=True):
        missing = ~mine.gather(2, ids.long()) & known[:, :, None]
        changed = changed + missing.sum((0, 2))
        assigned = assigned + known.sum(0) * ids.shape[2]
    if not bool((assigned > 0).all()):
        raise ValueError("a layer has no recorded choice of experts")
    return (changed / assigned).tolist()


def by_position(train: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """For each position in the response: tokens there, how many differ, mean and largest |difference of log-probs|."""
    found = []
    for position in range(max((len(row) for row in train), default=0)):
        pairs = [(a[position], b[position]) for a, b in zip(train, rollout, strict=True) if len(a) > position]
        gaps = torch.stack([(a.double() - b.double()).abs() for a, b in pairs])
        found.append(
            {
                "position": position,
                "tokens": len(gaps),
                "differ": int((gaps > 0).sum()),
                "abs_mean": float(gaps.mean()),
                "abs_max": float(gaps.max()),
            }
        )
    return found


def first_positions(train: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> list[int | None]:
    """For each response, the first token whose log-probs differ; None where none does."""
    differs = [(a.double() != b.double()).nonzero() for a, b in zip(train, rollout, strict=True)]
    return [int(found[0]) if len(found) else None for found in differs]


@dataclass(frozen=True, kw_only=True)
class ModuleDivergence:
    """One module of trainer and engine over some sequences."""

    module: str
    relative_error: float
    """Frobenius norm of the difference over that of the engine's values."""
    unequal: float
    """Share of elements whose bits differ."""
    first_row: int | None
    """First token position, over the sequences, that differs; None when none does."""


def by_module(
    train: Sequence[Mapping[str, torch.Tensor]], rollout: Sequence[Mapping[str, torch.Tensor]], order: Sequence[str]
) -> list[ModuleDivergence]:
    """Compare ``[T, C]`` rows of every module that both sides recorded, in ``order``; one mapping a sequence.

    Raises:
        ValueError: the sides recorded other modules or shapes, or none.
    """
    found = []
    for module in order:
        if not any(module in rows for rows in (*train, *rollout)):
            continue
        pairs = [(a[module], b[module]) for a, b in zip(train, rollout, strict=True)]
        if any(a.shape != b.shape for a, b in pairs):
            raise ValueError(f"{module} is {[tuple(a.shape) for a, _ in pairs]} in the trainer and {[tuple(b.shape) for _, b in pairs]}")
        found.append(_of_module(module, pairs))
    if not found:
        raise ValueError("no module was recorded")
    return found


def _of_module(module: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ModuleDivergence:
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    differing = [bits_differ(a, b) for a, b in pairs]
    rows = [int(d.any(1).nonzero()[0]) for d in differing if bool(d.any())]
    return ModuleDivergence(
        module=module,
        relative_error=math.sqrt(error / size) if size else (0.0 if not error else math.inf),
        unequal=sum(int(d.sum()) for d in differing) / sum(d.numel() for d in differing),
        first_row=min(rows) if rows else None,
    )
