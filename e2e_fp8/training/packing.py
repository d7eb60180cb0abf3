"""Packed micro-batches as Megatron wants them.

Shape legend: ``T`` packed tokens, ``S`` sequences.
"""

from dataclasses import fields, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from e2e_fp8.types import PackedBatch


def packed_seq_params(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """Megatron's description of packed sequences; ``cu_seqlens`` int32 ``[S + 1]``, first 0, strictly increasing.

    Raises:
        ValueError: the boundaries are not of that form.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    if cu_seqlens.dtype != torch.int32 or not lengths or min(lengths) < 1 or int(cu_seqlens[0]) != 0:
        raise ValueError("cu_seqlens must be int32, start at 0 and increase strictly.")
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def pad_packed(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Append one dummy sequence of token 0, outside the loss, so that T is a multiple of ``multiple``; causal, so nothing else changes."""
    tokens = batch.token_ids.numel()
    extra = -tokens % multiple
    if not extra:
        return batch
    changes = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name == "cu_seqlens":
            changes[field.name] = torch.cat([value, value.new_full((1,), tokens + extra)])
        elif field.name == "position_ids":
            changes[field.name] = torch.cat([value, torch.arange(extra, dtype=value.dtype, device=value.device)])
        elif value is not None:
            changes[field.name] = torch.cat([value, value.new_zeros(extra)])
    return replace(batch, **changes)


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with all tensors on ``device``."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in values.items() if value is not None})
