"""Operators that trainer and engine share under ``numerics.alignment``: a row has the same bits in any batch, on the CPU.

Plain functions of tensors without gradients; the trainer wraps them (e2e_fp8.training.shared_functions), the engine calls them as they
are. Legend: M rows, K and N widths, T packed tokens, N query heads, G key/value heads, D head width, E experts, k experts per token.
"""

import functools

import torch
import torch.nn.functional as F


def _kernels():
    from e2e_fp8.numerics import row_kernels

    return row_kernels


def _array(x: torch.Tensor):
    """float32 numpy array of a CPU tensor."""
    return x.detach().float().contiguous().numpy()


def rms_norm(x: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x * weight / sqrt(mean(x^2) + epsilon)`` over the last axis, rounded once to the dtype of ``x``."""
    rows = _array(x.reshape(-1, x.shape[-1]))
    out, inverse = torch.empty(rows.shape), torch.empty(rows.shape[0])
    _kernels().rms_norm(rows, _array(weight_K), float(epsilon), out.numpy(), inverse.numpy())
    return out.view(x.shape).to(x.dtype)


def matmul_fp32(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """``x [..., K] @ weight.T`` -> float32 ``[..., N]``; products of BF16 values are exact, sums run over K in order."""
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

    ``first_key_T`` and ``positions_T`` are int64; ``softmax_factor`` multiplies the query-key products.
    """
    out = torch.empty(q_TND.shape)
    _kernels().attention(
        _array(q_TND), _array(k_SGD), _array(v_SGD), first_key_T.numpy(), positions_T.numpy(), float(softmax_factor), out.numpy()
    )
    return out.to(q_TND.dtype)


@functools.cache
def _silu_table() -> torch.Tensor:
    """bfloat16 ``[65536]``: silu of the value with each bit pattern, computed in float64 and rounded once."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return F.silu(values.double()).to(torch.bfloat16)


def silu(x: torch.Tensor) -> torch.Tensor:
    """silu of bfloat16 values; each depends on its own bits alone, not on its place in a vector register."""
    index = x.contiguous().view(torch.int16).int() + 2**15
    return _silu_table()[index]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of bfloat16 ``[..., 2I]`` (gate first) -> ``[..., I]``; both steps rounded."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@functools.lru_cache(maxsize=8)
def rotary_table(base: float, width: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosines and sines ``[max_positions, width / 2]`` of ``position * base^(-2 i / width)``, from float64 angles."""
    inverse = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x_TND: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of the last axis by each token's angles (NeoX layout); float32 inside, rounded once to the dtype of ``x``."""
    first, second = x_TND.float().chunk(2, dim=-1)
    cos, sin = cos_Td[:, None], sin_Td[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TND.dtype)


def top_k(logits_ME: torch.Tensor, k: int) -> torch.Tensor:
    """int64 ``[M, k]``: the experts with the largest logits, largest first, the lower number first in a tie."""
    ids = torch.empty(logits_ME.shape[0], k, dtype=torch.int64)
    _kernels().top_k(_array(logits_ME), ids.numpy())
    return ids


def router_weights(logits_ME: torch.Tensor, ids_Mk: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    """float32 ``[M, k]``: softmax of the chosen experts, over all experts or, with ``renormalize``, over the chosen ones."""
    weights = torch.empty(ids_Mk.shape)
    _kernels().router_weights(_array(logits_ME), ids_Mk.long().contiguous().numpy(), renormalize, weights.numpy())
    return weights


def combine(outputs_MkH: torch.Tensor, weights_Mk: torch.Tensor) -> torch.Tensor:
    """``[M, H]``: outputs times weights, summed over k in order in float32 and rounded once; differentiable."""
    total = outputs_MkH[:, 0].float() * weights_Mk[:, 0:1]
    for slot in range(1, outputs_MkH.shape[1]):
        total = total + outputs_MkH[:, slot].float() * weights_Mk[:, slot : slot + 1]
    return total.to(outputs_MkH.dtype)
