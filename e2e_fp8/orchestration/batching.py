"""Sequences to packed micro-batches and back.

Packing is next-fit in sample order, so that the order of sequences over the list of micro-batches is the order of the samples and
the same samples always give the same micro-batches. For several data-parallel ranks there are as many micro-batches for each, of
sizes as equal as whole sequences in that order allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from e2e_fp8.errors import DataError
from e2e_fp8.orchestration.replay import Routing
from e2e_fp8.types import PackedBatch, Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One sequence: tokens, how many of them are prompt, and per-response-token values."""

    uid: str
    tokens: tuple[int, ...]
    prompt_length: int
    advantage: float
    rollout_log_probs: tuple[float, ...]
    response_mask: tuple[bool, ...] | None = None
    """Which response tokens are trained; None: all."""
    routing: Routing | None = None
    """Of all tokens; None: nothing is replayed."""

    def __post_init__(self) -> None:
        # either would shift every later entry of the packed arrays
        if not self.prompt_length:
            raise DataError(f"prompt {self.uid} has no tokens, so nothing predicts its first response token; remove it from the data set.")
        if len(self.rollout_log_probs) != len(self.tokens) - self.prompt_length:
            raise ValueError(
                f"prompt {self.uid}: {len(self.rollout_log_probs)} log-probs for {len(self.tokens) - self.prompt_length} response tokens"
            )
        if self.response_mask is not None and len(self.response_mask) != len(self.rollout_log_probs):
            raise ValueError(f"prompt {self.uid}: {len(self.response_mask)} mask entries for {len(self.rollout_log_probs)} response tokens")
        if self.routing is not None and len(self.routing.covered) != len(self.tokens):
            raise ValueError(f"prompt {self.uid}: routing of {len(self.routing.covered)} tokens for {len(self.tokens)}")


def _bins(rows: Sequence[_Row], max_tokens: int) -> list[list[_Row]]:
    """Rows in order, cut into bins of at most ``max_tokens`` tokens."""
    bins: list[list[_Row]] = []
    used = max_tokens + 1
    for row in rows:
        if len(row.tokens) > max_tokens:
            raise DataError(
                f"prompt {row.uid} with its response has {len(row.tokens)} tokens, more than training.max_tokens_per_microbatch "
                f"{max_tokens}; raise that field or shorten rollout.max_response_tokens."
            )
        if used + len(row.tokens) > max_tokens:
            bins.append([])
            used = 0
        bins[-1].append(row)
        used += len(row.tokens)
    return bins


def _bins_for(rows: Sequence[_Row], max_tokens: int, shares: int) -> list[list[_Row]]:
    """:func:`_bins`, for ``shares`` ranks above 1 with the smallest limit that still needs no more bins than a multiple of them."""
    bins = _bins(rows, max_tokens)
    if shares == 1 or not bins:
        return bins
    wanted = -(-len(bins) // shares) * shares
    low, high = max(len(row.tokens) for row in rows), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_bins(rows, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return _bins(rows, low)


def _pack(rows: Sequence[_Row], device: torch.device | str) -> PackedBatch:
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    mask: list[float] = []
    advantages: list[float] = []
    rollout: list[float] = []
    boundaries = [0]
    for row in rows:
        length, response = len(row.tokens), len(row.tokens) - row.prompt_length
        tokens += row.tokens
        targets += [*row.tokens[1:], 0]
        positions += range(length)
        # position t predicts token t + 1, so the response is predicted from the last prompt position on
        silent = row.prompt_length - 1
        trained = row.response_mask or (True,) * response
        mask += [0.0] * silent + [float(t) for t in trained] + [0.0]
        advantages += [0.0] * silent + [row.advantage if t else 0.0 for t in trained] + [0.0]
        rollout += [0.0] * silent + [p if t else 0.0 for p, t in zip(row.rollout_log_probs, trained, strict=True)] + [0.0]
        boundaries.append(len(tokens))
    mask_T = torch.tensor(mask, dtype=torch.float32, device=device)
    return PackedBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        position_ids=torch.tensor(positions, dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        loss_mask=mask_T,
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        rollout_log_probs=torch.tensor(rollout, dtype=torch.float32, device=device),
        old_log_probs=torch.zeros_like(mask_T),
        **_packed_routing(rows, device),
    )


def _packed_routing(rows: Sequence[_Row], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Replay fields of a PackedBatch; none when the rows have no routing."""
    routings = [row.routing for row in rows if row.routing is not None]
    if not routings:
        return {}
    weights = [r.weights for r in routings if r.weights is not None]
    packed = {"routed_experts": torch.cat([r.ids for r in routings]), "replay_mask": torch.cat([r.covered for r in routings])}
    packed |= {"routed_weights": torch.cat(weights)} if weights else {}
    return {name: values.to(device) for name, values in packed.items()}


def pack_samples(
    samples: Sequence[Sample],
    advantages_N: torch.Tensor,
    *,
    max_tokens: int,
    device: torch.device | str,
    shares: int = 1,
    routings: Sequence[Routing] | None = None,
    mask_uncovered: bool = True,
) -> list[PackedBatch]:
    """Micro-batches of whole sequences, in sample order, for ``shares`` data-parallel ranks.

    ``routings`` has the routing to replay of each sample. With ``mask_uncovered`` a response token whose log-prob does not rest on
    replayed routing alone is out of the loss mask, and with it out of every sum and metric over it.

    Raises:
        DataError: one sequence is longer than ``max_tokens``, or a prompt has no tokens; names the prompt.
        ValueError: a sample has not one log-prob for each response token.
    """
    rows = [
        _Row(
            uid=s.prompt.uid,
            tokens=(*s.prompt.token_ids, *s.response_token_ids),
            prompt_length=len(s.prompt.token_ids),
            advantage=float(a),
            rollout_log_probs=s.rollout_log_probs,
            response_mask=s.response_mask if routing is None or not mask_uncovered else _replayed_mask(s, routing),
            routing=routing,
        )
        for s, a, routing in zip(samples, advantages_N, routings or [None] * len(samples), strict=True)
    ]
    return [_pack(rows_of_bin, device) for rows_of_bin in _bins_for(rows, max_tokens, shares)]


def _replayed_mask(sample: Sample, routing: Routing) -> tuple[bool, ...]:
    """Response tokens that are trained and replayed; the token at position t + 1 is predicted from position t."""
    replayed = routing.replayed[len(sample.prompt.token_ids) - 1 : -1].tolist()
    return tuple(a and b for a, b in zip(sample.response_mask or (True,) * len(replayed), replayed, strict=True))


def pack_supervised(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    *,
    eos_token_id: int,
    max_tokens: int,
    device: torch.device | str,
    shares: int = 1,
) -> list[PackedBatch]:
    """Micro-batches of prompt, answer tokens and end-of-sequence; the answer and the end are trained.

    Raises:
        DataError: one sequence is longer than ``max_tokens``; names its prompt.
    """
    rows = [
        _Row(
            uid=p.uid,
            tokens=(*p.token_ids, *answer, eos_token_id),
            prompt_length=len(p.token_ids),
            advantage=0.0,
            rollout_log_probs=(0.0,) * (len(answer) + 1),
        )
        for p, answer in zip(prompts, answers, strict=True)
    ]
    return [_pack(rows_of_bin, device) for rows_of_bin in _bins_for(rows, max_tokens, shares)]


def with_old_log_probs(batch: PackedBatch, log_probs_T: torch.Tensor) -> PackedBatch:
    """The batch with the trainer's own log-probs before the update, 0 outside the loss mask."""
    trained = batch.loss_mask > 0
    return replace(batch, old_log_probs=torch.where(trained, log_probs_T.detach().float(), torch.zeros_like(batch.loss_mask)))


def with_advantages(batches: Sequence[PackedBatch], advantages_N: torch.Tensor) -> list[PackedBatch]:
    """The batches with one advantage for each sequence, in sample order, at its trained tokens; 0 outside the loss mask.

    Raises:
        ValueError: not one advantage for each sequence.
    """
    counts = [len(b.cu_seqlens) - 1 for b in batches]
    if sum(counts) != len(advantages_N):
        raise ValueError(f"{len(advantages_N)} advantages for {sum(counts)} sequences")
    result = []
    for batch, values in zip(batches, advantages_N.split(counts), strict=True):
        spread = torch.repeat_interleave(values.to(batch.loss_mask), batch.cu_seqlens.diff().to(torch.int64))
        result.append(replace(batch, advantages=spread * batch.loss_mask))
    return result


def regrouped(batches: Sequence[PackedBatch], like: Sequence[Sequence[PackedBatch]]) -> list[list[PackedBatch]]:
    """``batches`` cut into lists as long as those of ``like``."""
    remaining = iter(batches)
    return [[next(remaining) for _ in part] for part in like]


def response_values(batches: Sequence[PackedBatch], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per-token arrays ``[T]`` of each micro-batch, cut back to one array ``[R]`` for each sequence, in sample order.

    Raises:
        ValueError: an array has not one value for each packed token.
    """
    rows = []
    for batch, values_T in zip(batches, values, strict=True):
        if values_T.shape != batch.loss_mask.shape:
            raise ValueError(f"values {tuple(values_T.shape)} and loss mask {tuple(batch.loss_mask.shape)} differ")
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            rows.append(values_T[start:end][batch.loss_mask[start:end] > 0])
    return rows


def minibatch_slices(group_ids: Sequence[int], count: int) -> list[slice]:
    """``count`` consecutive runs of samples with as equal a number of groups as possible; a group is never split.

    Raises:
        ValueError: a group's samples are not consecutive, or there are fewer groups than ``count``.
    """
    starts = [i for i, group in enumerate(group_ids) if i == 0 or group != group_ids[i - 1]]
    if len(starts) != len(set(group_ids)):
        raise ValueError("the samples of a group are not consecutive")
    if not 1 <= count <= len(starts):
        raise ValueError(f"cannot cut {len(starts)} groups into {count} mini-batches")
    bounds = [*starts, len(group_ids)]
    cuts = [bounds[len(starts) * i // count] for i in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(cuts)]
