"""Routing of samples made ready for replay: which token of which layer the engine's record covers, and what is not covered.

vLLM returns a row for each token that it forwarded, which the last sampled token of a response is not. What it did not record is
zeros, or missing: a row is only taken when its experts exist and are distinct. Legend: ``n`` tokens of a sample (prompt and response),
``L`` layers, ``k`` slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.environment import CAPTURE_GATE_WEIGHTS
from e2e_fp8.types import ReplayCounts, Sample


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What may be replayed of one sample."""

    ids: torch.Tensor
    """int32 ``[n, L, k]``; 0 where not covered."""
    covered: torch.Tensor
    """bool ``[n, L]``."""
    weights: torch.Tensor | None
    """float32 ``[n, L, k]``, or None when they are not replayed."""

    @property
    def replayed(self) -> torch.Tensor:
        """bool ``[n]``: all layers of this token and of every earlier one are covered, so its log-prob rests on replayed routing alone."""
        return self.covered.all(dim=1).to(torch.int8).cummin(dim=0).values.bool()


def routing_of(sample: Sample, cfg: Config) -> Routing:
    """Routing of one sample under ``training.router_replay``.

    Raises:
        EngineError: the engine's record has another number of layers or slots than the model, or lacks the gate weights that the mode
            needs.
    """
    length, model = len(sample.prompt.token_ids) + len(sample.response_token_ids), cfg.model
    shape = (length, model.num_hidden_layers, model.num_experts_per_tok)
    with_weights = cfg.training.router_replay.needs_gate_weights
    ids, covered = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[:2], dtype=torch.bool)
    weights = torch.zeros(shape, dtype=torch.float32) if with_weights else None
    if sample.routed_experts is None:
        return Routing(ids=ids, covered=covered, weights=weights)
    record = torch.from_numpy(sample.routed_experts.astype("int32"))
    if record.shape[1:] != shape[1:] or len(record) > length:
        raise EngineError(
            f"The rollout engine recorded routing of shape {tuple(record.shape)} for prompt {sample.prompt.uid!r} of {length} tokens, but "
            f"the model has {shape[1]} layers and {shape[2]} experts a token: start the engine from the run's model folder."
        )
    valid = ((record >= 0) & (record < model.num_experts)).all(dim=2) & (record.sort(dim=2).values.diff(dim=2) > 0).all(dim=2)
    if weights is not None:
        given = _gate_weights(sample, record)
        valid &= (torch.isfinite(given) & (given >= 0)).all(dim=2)
        weights[: len(record)] = torch.where(valid[:, :, None], given, 0.0)
    ids[: len(record)] = torch.where(valid[:, :, None], record, 0)
    covered[: len(record)] = valid
    return Routing(ids=ids, covered=covered, weights=weights)


def _gate_weights(sample: Sample, record: torch.Tensor) -> torch.Tensor:
    if sample.routed_weights is None:
        raise EngineError(
            "training.router_replay.mode is R3_weights_order, but the rollout engine returned no gate weights: start the server with "
            f"{CAPTURE_GATE_WEIGHTS}=1 and this project's plugin, or use mode R3."
        )
    weights = torch.from_numpy(sample.routed_weights)
    if weights.shape != record.shape or weights.dtype != torch.float32:
        raise EngineError(
            f"The rollout engine returned gate weights {tuple(weights.shape)} of {weights.dtype} for experts {tuple(record.shape)} of "
            f"prompt {sample.prompt.uid!r}: use the plugin of this version in the server."
        )
    return weights


def coverage_metrics(samples: Sequence[Sample], routings: Sequence[Routing], *, masked: bool) -> dict[str, float]:
    """``router_replay/*`` of the samples of one step. ``masked``: uncovered response tokens are out of the loss."""
    trained = uncovered = prompt = tool = last = partial = missing = 0
    for sample, routing in zip(samples, routings, strict=True):
        start = len(sample.prompt.token_ids) - 1
        own = routing.covered.all(dim=1)
        mask = torch.tensor(sample.response_mask or (True,) * len(sample.response_token_ids))
        trained += int(mask.sum())
        uncovered += int((mask & ~routing.replayed[start:-1]).sum())
        # position t routes token t and predicts token t + 1
        prompt += int((~own[:start]).sum())
        tool += int((~mask & ~own[start:-1]).sum())
        last += int(not own[-1])
        missing += sample.routed_experts is None
        partial += sample.routed_experts is not None and not bool(own[:-1].all())
    record = {
        "coverage": 1.0 - uncovered / max(trained, 1),
        "uncovered_tokens": float(uncovered),
        "uncovered_prompt_tokens": float(prompt),
        "uncovered_tool_tokens": float(tool),
        "last_tokens": float(last),
        "masked_tokens": float(uncovered if masked else 0),
        "partial_samples": float(partial),
        "missing_samples": float(missing),
    }
    for name, values in (
        ("prefix_cache_tokens", [s.cached_tokens for s in samples]),
        ("preempted_samples", [s.preemptions and min(s.preemptions, 1) for s in samples]),
    ):
        told = [value for value in values if value is not None]
        if told:
            record[name] = float(sum(told))
    return {f"router_replay/{name}": value for name, value in record.items()}


def changed_metrics(counts: ReplayCounts | None) -> dict[str, float]:
    """Share of replayed choices that the trainer's router would not have made, of all layers and by layer."""
    if counts is None or not sum(counts.assigned.values()):
        return {}
    share = {f"/layer_{layer}": counts.changed[layer] / n for layer, n in sorted(counts.assigned.items()) if n}
    share[""] = sum(counts.changed.values()) / sum(counts.assigned.values())
    return {f"router_replay/changed_ids{name}": value for name, value in share.items()}
