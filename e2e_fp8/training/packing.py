"""Packed micro-batches as Megatron wants them.

Shape legend: ``T`` packed tokens, ``S`` sequences.
"""

import itertools
from dataclasses import fields, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from e2e_fp8.types import PackedBatch

_DUMMY_TOKENS = 128


def packed_layout(cu_seqlens: torch.Tensor) -> tuple[PackedSeqParams, torch.Tensor]:
    """Megatron's description of packed sequences, and int64 ``[T]`` positions that restart at 0 in each.

    ``cu_seqlens`` is int32 ``[S + 1]``, first 0, strictly increasing. The ``padded`` boundaries, which only rotary embedding
    reads, describe one segment: PackedRotary supplies one angle per packed token, so no loop over sequences is needed.

    Raises:
        ValueError: the boundaries are not of that form.
    """
    lengths = check_boundaries(cu_seqlens)
    one_segment = torch.tensor([0, sum(lengths)], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=one_segment,
        cu_seqlens_kv_padded=one_segment,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(cu_seqlens.device)
    return params, positions_T


def check_boundaries(cu_seqlens: torch.Tensor) -> list[int]:
    """Lengths of packed sequences. Raises ValueError for boundaries that are not as :func:`packed_layout` wants them."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if cu_seqlens.dtype != torch.int32 or not lengths or min(lengths) < 1 or bounds[0] != 0:
        raise ValueError("cu_seqlens must be int32, start at 0 and increase strictly.")
    return lengths


def pad_packed(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Append dummy sequences of token 0, outside the loss, so that T is a multiple of ``multiple``; causal, so nothing else changes.

    Each is short, so that its positions are ones that any model has.
    """
    tokens = batch.token_ids.numel()
    extra = -tokens % multiple
    if not extra:
        return batch
    lengths = [min(_DUMMY_TOKENS, extra - start) for start in range(0, extra, _DUMMY_TOKENS)]
    changes = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name == "cu_seqlens":
            ends = tokens + torch.tensor(lengths, dtype=value.dtype, device=value.device).cumsum(0, dtype=value.dtype)
            changes[field.name] = torch.cat([value, ends])
        elif field.name == "position_ids":
            changes[field.name] = torch.cat([value, *(torch.arange(n, dtype=value.dtype, device=value.device) for n in lengths)])
        elif value is not None:
            changes[field.name] = torch.cat([value, value.new_zeros(extra, *value.shape[1:])])
    return replace(batch, **changes)


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with all tensors on ``device``."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in values.items() if value is not None})
