"""Operators that trainer and engine share under ``numerics.alignment``: a row has the same bits in any batch.

Plain functions of tensors without gradients; the trainer wraps them (e2e_fp8.training.shared_functions), the engine calls them as they
are. On the CPU they are compiled loops (row_kernels), on CUDA Triton kernels and FlashAttention 3 (row_kernels_cuda, row_attention_cuda)
on the current stream, which CUDA graphs can capture; the two devices sum in different orders, so bits hold on one of them.
Legend: M rows, K and N widths, T packed tokens, S sequences, N query heads, G key/value heads, D head width, E experts, k experts per
token, A expert assignments.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3


def _kernels() -> Any:
    from e2e_fp8.numerics import row_kernels

    return row_kernels


def _on_device() -> Any:
    from e2e_fp8.numerics import row_kernels_cuda

    return row_kernels_cuda


def _array(x: torch.Tensor):
    """float32 numpy array of a CPU tensor."""
    return x.detach().float().contiguous().numpy()


def rms_norm(x: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x * weight / sqrt(mean(x^2) + epsilon)`` over the last axis, rounded once to the dtype of ``x``."""
    if x.is_cuda:
        return _on_device().rms_norm(x, weight_K, epsilon)
    rows = _array(x.reshape(-1, x.shape[-1]))
    out, inverse = torch.empty(rows.shape), torch.empty(rows.shape[0])
    _kernels().rms_norm(rows, _array(weight_K), float(epsilon), out.numpy(), inverse.numpy())
    return out.view(x.shape).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(sum), sum)`` of the rounded ``sum = x + residual``, both contiguous."""
    if x.is_cuda:
        return _on_device().add_rms_norm(x, residual, weight_K, epsilon)
    total = x + residual
    return rms_norm(total, weight_K, epsilon), total


def matmul_fp32(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """``x [..., K] @ weight.T`` -> float32 ``[..., N]``; products of BF16 values are exact, sums run over K in order.

    On CUDA the order within 16 neighbours along K is that of the tensor core.
    """
    if x.is_cuda:
        return _on_device().matmul_fp32(x, weight_NK)
    rows = _array(x.reshape(-1, x.shape[-1]))
    out = torch.empty(rows.shape[0], weight_NK.shape[0])
    _kernels().matmul(rows, _array(weight_NK.t()), out.numpy())
    return out.view(*x.shape[:-1], weight_NK.shape[0])


def causal_attention(
    q_TND: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    first_key_T: torch.Tensor,
    positions_T: torch.Tensor,
    softmax_factor: float,
) -> torch.Tensor:
    """``[T, N, D]`` in the dtype of ``q_TND``: query row t attends to key rows ``first_key_T[t]`` to ``first_key_T[t] + positions_T[t]``.

    ``first_key_T`` and ``positions_T`` are int64; ``softmax_factor`` multiplies the query-key products. CPU only.
    """
    out = torch.empty(q_TND.shape)
    _kernels().attention(
        _array(q_TND), _array(k_SGD), _array(v_SGD), first_key_T.numpy(), positions_T.numpy(), float(softmax_factor), out.numpy()
    )
    return out.to(q_TND.dtype)


def paged_attention(
    q_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_factor: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention ``[T, N, D]`` of the last tokens of each sequence over cached keys, CUDA only; :func:`packed_attention` row by row.

    Args:
        key_cache: ``[blocks, block size, G, D]`` of any strides but the last, as ``value_cache``.
        block_table: int32 ``[S, at least the blocks of the longest sequence]``.
        query_start_loc: int32 ``[S + 1]``: sequence s asks with rows ``query_start_loc[s]`` to ``query_start_loc[s + 1]``; none is allowed.
        seq_lens: int32 ``[S]``: keys of each sequence, the queries' own included.
        softmax_factor: multiplies the query-key products.
        max_query_len: at least the queries of any sequence.
        out: where to write.

    Raises:
        ValueError: a head width at which packed keys would be summed in another order.
        UserError: FlashAttention 3 is not installed.
    """
    from e2e_fp8.numerics import row_attention_cuda

    return row_attention_cuda.paged_attention(
        q_TND, key_cache, value_cache, block_table, query_start_loc, seq_lens, softmax_factor, max_query_len, out
    )


def packed_attention(
    q_TND: torch.Tensor,
    k_UGD: torch.Tensor,
    v_UGD: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    softmax_factor: float,
    longest: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``([T, N, D], float32 [N, T])``: causal attention of each packed sequence's last tokens, and the logarithms of its sums; CUDA only.

    ``bounds`` are those of the sequences' queries and keys, int32 ``[S + 1]`` on the device; ``longest`` the most of each in a sequence.
    Raises as :func:`paged_attention`.
    """
    from e2e_fp8.numerics import row_attention_cuda

    return row_attention_cuda.packed_attention(q_TND, k_UGD, v_UGD, bounds, softmax_factor, longest)


@functools.cache
def _silu_table() -> torch.Tensor:
    """bfloat16 ``[65536]``: silu of the value with each bit pattern, computed in float64 and rounded once."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return F.silu(values.double()).to(torch.bfloat16)


def silu(x: torch.Tensor) -> torch.Tensor:
    """silu of bfloat16 values; each depends on its own bits alone, not on its place in a vector register. CPU only."""
    index = x.contiguous().view(torch.int16).int() + 2**15
    return _silu_table()[index]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of bfloat16 ``[..., 2I]`` (gate first) -> ``[..., I]``; both steps rounded."""
    if gate_up.is_cuda:
        return _on_device().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@functools.lru_cache(maxsize=8)
def rotary_table(base: float, width: int, max_positions: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosines and sines ``[max_positions, width / 2]`` of ``position * base^(-2 i / width)``, from float64 angles of the CPU.

    Kept for each device; the first call for a CUDA device must not be inside a graph capture.
    """
    inverse = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.arange(max_positions, dtype=torch.float64, device="cpu")[:, None] * inverse
    return angles.cos().float().to(device or "cpu"), angles.sin().float().to(device or "cpu")


def rotate(x_TND: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of the last axis by each token's angles (NeoX layout); float32 inside, rounded once to the dtype of ``x``."""
    if x_TND.is_cuda:
        return _on_device().rotate(x_TND, cos_Td, sin_Td)
    first, second = x_TND.float().chunk(2, dim=-1)
    cos, sin = cos_Td[:, None], sin_Td[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TND.dtype)


def top_k(logits_ME: torch.Tensor, k: int) -> torch.Tensor:
    """int64 ``[M, k]``: the experts with the largest logits, largest first, the lower number first in a tie."""
    if logits_ME.is_cuda:
        return _on_device().top_k(logits_ME, k)
    ids = torch.empty(logits_ME.shape[0], k, dtype=torch.int64)
    _kernels().top_k(_array(logits_ME), ids.numpy())
    return ids


def router_weights(logits_ME: torch.Tensor, ids_Mk: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    """float32 ``[M, k]``: softmax of the chosen experts, over all experts or, with ``renormalize``, over the chosen ones."""
    if logits_ME.is_cuda:
        return _on_device().router_weights(logits_ME, ids_Mk, renormalize=renormalize)
    weights = torch.empty(ids_Mk.shape)
    _kernels().router_weights(_array(logits_ME), ids_Mk.long().contiguous().numpy(), renormalize, weights.numpy())
    return weights


def combine(outputs: torch.Tensor, weights_Mk: torch.Tensor, rows_Mk: torch.Tensor | None = None) -> torch.Tensor:
    """``[M, H]``: outputs times weights, summed over k in order in float32 and rounded once to the dtype of the outputs.

    ``outputs`` is ``[M, k, H]``, or ``[A, H]`` with the row of each choice in integers ``rows_Mk``.
    """
    if outputs.is_cuda:
        return _on_device().combine(outputs, weights_Mk, rows_Mk)
    outputs_MkH = outputs if rows_Mk is None else outputs[rows_Mk.long()]
    total = outputs_MkH[:, 0].float() * weights_Mk[:, 0:1]
    for slot in range(1, outputs_MkH.shape[1]):
        total = total + outputs_MkH[:, slot].float() * weights_Mk[:, slot : slot + 1]
    return total.to(outputs.dtype)


def quantize_activations(
    x_MK: torch.Tensor, *, power_2_scale: bool = False, amax_epsilon: float = 0.0, column_major: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes float8_e4m3fn [M, K], scale_inv float32 [M, ceil(K/128)])`` of BF16 or FP32 in 1x128 tiles: :func:`quantize_blockwise`'s.

    With ``column_major`` (CUDA only), ``scale_inv`` is a view with contiguous columns at multiples of 16 bytes, as DeepGEMM wants it.
    """
    if x_MK.is_cuda:
        return _on_device().quantize_activations(x_MK, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon, column_major=column_major)
    block = quantize_blockwise(x_MK, E4M3, "1x128", power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    return block.codes, block.scale_inv
