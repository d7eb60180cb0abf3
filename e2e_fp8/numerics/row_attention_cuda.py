"""Causal attention on CUDA whose row keeps its bits in prefill, decode, chunks, cached prefixes and packed training. Imported on first use.

One compiled kernel for all of these: keys come from a block table, and the trainer's packed keys are one block that starts where the
sequence does. A query row meets the keys of its sequence from 0 on, in blocks of a fixed number of keys; within a tile of rows each row of
the matrix products, maxima and sums is its own. Blocks beyond a row's position leave it as it is: they add exact zeros.
Legend: T tokens, S sequences, N query heads, G key/value heads, D head width.
"""

import ctypes
from typing import Any

import torch

from e2e_fp8.numerics.row_kernels_cuda import rows_aligned, tl, triton

_ROWS, _KEYS = 64, 64
"""Rows (queries times the query heads of a key/value head) and keys of a tile; changing them changes bits on both sides alike."""
_OPTIONS: dict[str, Any] = {"BM": _ROWS, "BN": _KEYS, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
_ONE_BLOCK = 2**30
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["table_step", "block_size", "lse_step", "out_token", "out_head"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lengths_ptr", "lse_ptr"],
)
def _attention(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, starts_ptr, lengths_ptr,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head,
    table_step, block_size, lse_step, factor,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``BM // GROUP`` queries of one sequence under the GROUP query heads of one key/value head."""
    queries: tl.constexpr = BM // GROUP
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * queries
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    if first >= count:
        return
    lane = tl.arange(0, BM)
    query = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = (lane < queries * GROUP) & (query < count)
    # rows without a query look at key 0, so that they hold no NaN
    position = tl.where(valid, length - count + query, 0)
    d = tl.arange(0, BD)
    token = (start + query).to(tl.int64)
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BD), dtype=tl.float32)
    for low in range(0, length - count + tl.minimum(first + queries, count), BN):
        key = low + tl.arange(0, BN)
        there = key < length
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_step + key // block_size, mask=there, other=0).to(tl.int64)
        slot = (key % block_size).to(tl.int64)
        k_row = block * k_block + slot * k_slot + kv_head * k_head
        k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, k) * factor
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(largest - now)
        total = total * shrink + tl.sum(weights, axis=1)
        v_row = block * v_block + slot * v_slot + kv_head * v_head
        v = tl.load(v_ptr + v_row[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        largest = now
    # + 0: a masked block turns -0 into 0, and the number of masked blocks is the batch's
    out = tl.math.div_rn(acc, tl.broadcast_to(total[:, None], (BM, BD))) + 0.0
    if D % 8 == 0:
        out_token, out_head = tl.multiple_of(out_token.to(tl.int64), 8), tl.multiple_of(out_head.to(tl.int64), 8)
    target = out_ptr + (token * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])
    tl.store(lse_ptr + head.to(tl.int64) * lse_step + token, (largest + tl.log2(total)) * _LN_2, mask=valid)


def paged_attention(
    q_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_factor: float,
    max_query_len: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """As row_invariant.paged_attention."""
    out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device) if out is None else out
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    keys = (key_cache, value_cache, key_cache.stride(), value_cache.stride(), key_cache.shape[1])
    _launch(q_TND, keys, block_table, query_start_loc, seq_lens, softmax_factor, max_query_len, out)
    return out


def packed_attention(
    q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cu_seqlens: torch.Tensor, softmax_factor: float, max_query_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As row_invariant.packed_attention."""
    k_TGD, v_TGD = rows_aligned(k_TGD), rows_aligned(v_TGD)
    out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    # a sequence is one endless block: block number = its first token, slot = the token within it
    strides = [(t.stride(0), *t.stride()) for t in (k_TGD, v_TGD)]
    keys = (k_TGD, v_TGD, *strides, _ONE_BLOCK)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return out, _launch(q_TND, keys, cu_seqlens[:-1, None], cu_seqlens, lengths, softmax_factor, max_query_len, out)


def _launch(
    q_TND: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, tuple[int, ...], tuple[int, ...], int],
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_factor: float,
    max_query_len: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """float32 ``[N, T]``: logarithms of the sums, also where nobody wants them: without them another kernel would be compiled.

    ``keys``: keys, values, their strides of block, slot, head and column, and the slots of a block.
    """
    k, v, k_strides, v_strides, block_size = keys
    heads, width = q_TND.shape[1:]
    kv_heads = k.shape[-2]
    group, sequences = heads // kv_heads, seq_lens.shape[0]
    out_fits = out.stride(2) == 1 and out.stride(0) % 8 == 0 and out.stride(1) % 8 == 0 and out.data_ptr() % 16 == 0
    if group > _ROWS or heads % kv_heads or k_strides[3] != 1 or v_strides[3] != 1 or not (out_fits or out.is_contiguous()):
        raise ValueError(
            f"The shared attention takes up to {_ROWS} query heads for each key/value head and contiguous heads, not {heads} and "
            f"{kv_heads} heads with strides {k_strides}, {v_strides} and {out.stride()}."
        )
    lse_NT = torch.empty(heads, q_TND.shape[0], dtype=torch.float32, device=q_TND.device)
    if not sequences or not max_query_len or not q_TND.numel():
        return lse_NT
    q_TND = rows_aligned(q_TND)
    # one number on both sides, whichever way the square root was taken
    factor = ctypes.c_float(softmax_factor).value * _LOG2_E
    grid = (triton.cdiv(max_query_len, _ROWS // group), kv_heads, sequences)
    _attention[grid](
        q_TND, k, v, out, lse_NT, block_table, query_start_loc, seq_lens, *q_TND.stride()[:2], *k_strides[:3], *v_strides[:3],
        *out.stride()[:2], block_table.stride(0), block_size, lse_NT.stride(0), factor,
        GROUP=group, D=width, BD=max(16, triton.next_power_of_2(width)), **_OPTIONS,
    )  # fmt: skip
    return lse_NT
