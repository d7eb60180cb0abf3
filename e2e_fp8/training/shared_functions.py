"""Gradients of the operators that trainer and engine share (e2e_fp8.numerics.row_invariant).

Forward is the shared operator, bit for bit. Backward is the derivative of the formula in FP32, rounded once to the dtype of the
argument, or, for attention, torch's own backward: of scaled_dot_product_attention at the same inputs on the CPU, of flash attention with
the shared result and its logarithms on CUDA. Legend: as row_invariant.
"""

from typing import Any

import torch

from e2e_fp8.numerics import row_invariant


class SharedRmsNorm(torch.autograd.Function):
    """``row_invariant.rms_norm``; ``x [..., K]``, weight ``[K]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return row_invariant.rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        x32, grad = x.float(), grads[0].float()
        inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + ctx.epsilon)
        normed, scaled_grad = x32 * inverse, grad * weight.float()
        grad_x = inverse * (scaled_grad - normed * (scaled_grad * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class SharedSwiglu(torch.autograd.Function):
    """``row_invariant.silu_and_mul``; ``gate_up [..., 2I]``, gate first."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return row_invariant.silu_and_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, dim=-1)
        grad, sigmoid = grads[0].float(), gate.sigmoid()
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([grad_gate, grad * gate * sigmoid], dim=-1).to(gate_up.dtype)


class SharedRotary(torch.autograd.Function):
    """``row_invariant.rotate``; the gradient turns back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x_TND: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_Td, sin_Td)
        return row_invariant.rotate(x_TND, cos_Td, sin_Td)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_Td, sin_Td = ctx.saved_tensors
        return row_invariant.rotate(grads[0], cos_Td, -sin_Td), None, None


class SharedAttention(torch.autograd.Function):
    """``row_invariant.causal_attention`` over packed sequences; ``reference`` is the differentiable operator that gives the gradient."""

    @staticmethod
    def forward(ctx: Any, q_TND, k_UGD, v_UGD, lengths: tuple[tuple[int, int], ...], softmax_factor: float, reference: Any) -> torch.Tensor:
        ctx.save_for_backward(q_TND, k_UGD, v_UGD)
        ctx.lengths, ctx.softmax_factor, ctx.reference = lengths, softmax_factor, reference
        queries, keys = torch.tensor(lengths).unbind(1)
        first_query_T, first_key_T, before_T = (
            values.repeat_interleave(queries) for values in (queries.cumsum(0) - queries, keys.cumsum(0) - keys, keys - queries)
        )
        positions_T = torch.arange(q_TND.shape[0]) - first_query_T + before_T
        return row_invariant.causal_attention(q_TND, k_UGD, v_UGD, first_key_T, positions_T, softmax_factor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.reference(*leaves, ctx.lengths, ctx.softmax_factor)
        return (*torch.autograd.grad(out, leaves, grads[0]), None, None, None)


class SharedVarlenAttention(torch.autograd.Function):
    """``row_invariant.packed_attention``; torch's flash attention, which knows no groups of heads, gives the gradient."""

    @staticmethod
    def forward(ctx: Any, q_TND, k_UGD, v_UGD, spans: Any, softmax_factor: float) -> torch.Tensor:
        """``spans`` is an ``attention.Spans``."""
        bounds, longest = (spans.cu_queries, spans.cu_keys), (spans.max_queries, spans.max_keys)
        out_TND, lse_NT = row_invariant.packed_attention(q_TND, k_UGD, v_UGD, bounds, softmax_factor, longest)
        ctx.save_for_backward(q_TND, k_UGD, v_UGD, out_TND, lse_NT, *bounds)
        ctx.longest, ctx.softmax_factor = longest, softmax_factor
        return out_TND

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_TND, k_UGD, v_UGD, out_TND, lse_NT, *bounds = ctx.saved_tensors
        (heads, width), (keys, groups) = q_TND.shape[1:], k_UGD.shape[:2]
        k_UND, v_UND = (t.repeat_interleave(heads // groups, dim=1) for t in (k_UGD, v_UGD))
        # of dropout, which is off
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q_TND.device), torch.empty(0, device=q_TND.device)
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q_TND, k_UND, v_UND, out_TND, lse_NT, *bounds, *ctx.longest,
            0.0, True, state, unused, scale=ctx.softmax_factor, window_size_left=-1, window_size_right=0,
        )  # fmt: skip
        grad_k, grad_v = (t.view(keys, groups, -1, width).sum(2, dtype=torch.float32).to(k_UGD.dtype) for t in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None


class SharedCombine(torch.autograd.Function):
    """``row_invariant.combine`` of the rows ``rows_Mk``, which name every row of ``outputs_AH`` once."""

    @staticmethod
    def forward(ctx: Any, outputs_AH: torch.Tensor, weights_Mk: torch.Tensor, rows_Mk: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(outputs_AH, weights_Mk, rows_Mk)
        return row_invariant.combine(outputs_AH, weights_Mk, rows_Mk)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        outputs_AH, weights_Mk, rows_Mk = ctx.saved_tensors
        grad_MH = grads[0].float()
        grad_outputs, grad_weights = torch.empty_like(outputs_AH), torch.empty_like(weights_Mk)
        for slot in range(weights_Mk.shape[1]):
            rows_M = rows_Mk[:, slot]
            grad_outputs[rows_M] = (grad_MH * weights_Mk[:, slot, None]).to(outputs_AH.dtype)
            grad_weights[:, slot] = (grad_MH * outputs_AH[rows_M].float()).sum(-1)
        return grad_outputs, grad_weights, None


class SharedMatmul(torch.autograd.Function):
    """``row_invariant.matmul_fp32`` of BF16 operands; FP32 products of the FP32 gradient backwards, as Megatron's router has them."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return row_invariant.matmul_fp32(x_MK, weight_NK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_MK, weight_NK = ctx.saved_tensors
        grad_MN = grads[0].float()
        grad_x, grad_weight = grad_MN @ weight_NK.float(), grad_MN.t() @ x_MK.float()
        return grad_x.to(x_MK.dtype), grad_weight.to(weight_NK.dtype)


class SharedRouterWeights(torch.autograd.Function):
    """``row_invariant.router_weights``: the chosen experts are constants, the weights have the gradient of their softmax."""

    @staticmethod
    def forward(ctx: Any, logits_ME: torch.Tensor, ids_Mk: torch.Tensor, renormalize: bool) -> torch.Tensor:
        weights_Mk = row_invariant.router_weights(logits_ME, ids_Mk, renormalize=renormalize)
        ctx.save_for_backward(logits_ME, weights_Mk, ids_Mk)
        ctx.renormalize = renormalize
        return weights_Mk

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_ME, weights_Mk, ids_Mk = ctx.saved_tensors
        weighted_Mk = grads[0] * weights_Mk
        total_M1 = weighted_Mk.sum(-1, keepdim=True)
        if ctx.renormalize:
            grad = torch.zeros_like(logits_ME).scatter(1, ids_Mk, weighted_Mk - weights_Mk * total_M1)
        else:
            grad = (-logits_ME.softmax(-1) * total_M1).scatter_add(1, ids_Mk, weighted_Mk)
        return grad, None, None
