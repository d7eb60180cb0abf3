"""Megatron modules whose operators the engine shares, on both grounds, chosen cause by cause (e2e_fp8.config.alignment).

A module follows the choices it is built with; with ``native`` for all of a module's causes the ground builds Megatron's own instead.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from e2e_fp8.config.alignment import MOE_CAUSES
from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics import row_invariant
from e2e_fp8.training.expert_exchange import ExpertExchange
from e2e_fp8.training.norm import rms_norm
from e2e_fp8.training.router_replay import ReplayHook, ValueWithGradientOf
from e2e_fp8.training.shared_functions import SharedCombine, SharedMatmul, SharedRmsNorm, SharedRouterWeights, SharedSwiglu


class SharedNorm(torch.nn.RMSNorm):
    """RMSNorm in the shared operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` in the dtype of ``x``."""
        assert self.eps is not None
        return SharedRmsNorm.apply(x, self.weight, self.eps)


def norm_builder(choice: str) -> Any:
    """What Megatron's spec calls to build a norm of the given choice."""
    return rms_norm if choice == "native" else partial(rms_norm, norm_class=SharedNorm)


class SharedMlp(MLP):
    """Megatron's MLP with the shared SwiGLU."""

    linear_fc1: Any
    linear_fc2: Any

    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any):
        """``[T, 1, H]`` -> ``([T, 1, H], None)``."""
        if per_token_scale is not None:
            raise ConfigError("SharedMlp is a dense MLP: probabilities of experts are applied by SharedMoELayer.")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(SharedSwiglu.apply(gate_up))


class SharedMoELayer(MoELayer):
    """Mixture of experts in the engine's order: route, each expert over its tokens in token order, weighted sum over the k choices.

    Megatron's dispatcher is not used: experts of other ranks get rows and give them back (:class:`ExpertExchange`), and a token sums its k
    rows where it is, in its own order. Each cause that is ``native`` computes as Megatron's layer does. Experts are linears one by one
    (CPU) or Transformer Engine's grouped ones, whose rows of each expert are padded with zeros.
    """

    router: Any
    experts: Any
    observe: Callable[[dict[str, torch.Tensor]], None] | None = None
    """Sees each forward of grouped experts on one rank: ``gate_up [A, 2I]``, ``activation [A, I]`` and ``down [A, H]`` by expert, then
    token, and ``ids [T, k]``."""

    def __init__(self, *args: Any, choices: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = {name for name in MOE_CAUSES if choices[name] != "native"}

    def forward(self, hidden_states: torch.Tensor, intermediate_tensors: Any = None, padding_mask: Any = None):
        """``[T, 1, H]`` -> ``([T, 1, H], None)``."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights_Tk, ids_Tk = self.choose(self.router_logits(x_TH))
        out_TH = self._experts(x_TH, weights_Tk, ids_Tk)
        return out_TH.view(hidden_states.shape), None

    def router_logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """float32 ``[T, E]``."""
        if "router_gemm" in self.shared:
            return SharedMatmul.apply(x_TH, self.router.weight)
        return self.router.gating(x_TH)

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(weights float32 [T, k], ids int64 [T, k])``, in the order in which the outputs are summed."""
        top_k, renormalize = self.config.moe_router_topk, not self.config.moe_router_pre_softmax
        ids_Tk = self._top_k(logits_TE, top_k)
        if "gate_normalization" in self.shared:
            weights_Tk = SharedRouterWeights.apply(logits_TE, ids_Tk, renormalize)
        elif renormalize:
            weights_Tk = logits_TE.gather(1, ids_Tk).softmax(-1, dtype=torch.float32)
        else:
            weights_Tk = logits_TE.softmax(-1, dtype=torch.float32).gather(1, ids_Tk)
        return self._replayed(weights_Tk), ids_Tk

    def _replayed(self, weights_Tk: torch.Tensor) -> torch.Tensor:
        """The engine's gate weights where routing is replayed with them, with the gradient of the router's own."""
        hook = self.router.router_replay
        if not isinstance(hook, ReplayHook) or hook.weights_Tk is None:
            return weights_Tk
        assert hook.replayed_T is not None
        value_Tk = torch.where(hook.replayed_T[:, None], hook.weights_Tk.to(weights_Tk.dtype), weights_Tk.detach())
        return ValueWithGradientOf.apply(weights_Tk, value_Tk)

    def _top_k(self, logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        """int64 ``[T, k]``; Megatron's routing replay, where it is on, has the last word as in its own router."""

        def chosen(scores: torch.Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
            ids = row_invariant.top_k(scores, topk) if "top_k" in self.shared else torch.topk(scores, topk, dim=1).indices
            return scores.gather(1, ids), ids

        replay = self.router.router_replay
        return chosen(logits_TE, top_k)[1] if replay is None else replay.get_replay_topk(logits_TE, top_k, None, None, chosen)[1]

    def _experts(self, x_TH: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor) -> torch.Tensor:
        tokens, top_k = ids_Tk.shape
        order_A = ids_Tk.reshape(-1).argsort(stable=True)
        counts_E = torch.bincount(ids_Tk.reshape(-1), minlength=self.ep_group.size() * self.num_local_experts)
        inputs_AH = x_TH[order_A // top_k]
        weights_A = None if "router_probabilities" in self.shared else weights_Tk.reshape(-1)[order_A]
        if self.ep_group.size() == 1:
            outputs_AH = self._local_experts(inputs_AH, weights_A, counts_E.tolist(), ids_Tk)
        else:
            exchange = ExpertExchange(self.ep_group, counts_E)
            weights_A = None if weights_A is None else exchange.there(weights_A)
            outputs_AH = exchange.back(self._local_experts(exchange.there(inputs_AH), weights_A, exchange.counts, ids_Tk))
        if "router_probabilities" not in self.shared:
            weights_Tk = torch.ones_like(weights_Tk)
        if "combine" in self.shared:
            rows_Tk = order_A.argsort().view(tokens, top_k)
            return SharedCombine.apply(outputs_AH, weights_Tk, rows_Tk)
        weighted_AH = (outputs_AH.float() * weights_Tk.reshape(-1)[order_A, None]).to(x_TH.dtype)
        rows = (order_A // top_k)[:, None].expand_as(weighted_AH)
        return torch.zeros_like(x_TH).scatter_add(0, rows, weighted_AH)

    def _local_experts(self, x_AH: torch.Tensor, weights_A: torch.Tensor | None, counts: list[int], ids_Tk: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert through this rank's experts, ``counts`` rows each; ``weights_A`` None where they are applied behind."""
        if not len(x_AH):
            # on one of several ranks; with its edges in the graph, as gradients are exchanged too
            return x_AH if weights_A is None else x_AH + weights_A[:, None].to(x_AH.dtype)
        if not isinstance(self.experts, SequentialMLP):
            return self._grouped_experts(x_AH, weights_A, counts, ids_Tk)
        weights = [None] * len(counts) if weights_A is None else weights_A.split(counts)
        entries = zip(self.experts.local_experts, x_AH.split(counts), weights, strict=True)
        return torch.cat([self._expert(*entry) for entry in entries])

    def _activation(self, gate_up: torch.Tensor, weights_A: torch.Tensor | None) -> torch.Tensor:
        if "swiglu" in self.shared:
            activation = SharedSwiglu.apply(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            activation = F.silu(gate) * up
        if weights_A is not None:
            activation = (activation * weights_A[:, None]).to(activation.dtype)
        return activation

    def _expert(self, expert: Any, x_AH: torch.Tensor, weights_A: torch.Tensor | None) -> torch.Tensor:
        gate_up, _ = expert.linear_fc1(x_AH)
        return expert.linear_fc2(self._activation(gate_up, weights_A))[0]

    def _grouped_experts(self, x_AH: torch.Tensor, weights_A: torch.Tensor | None, counts: list[int], ids_Tk: torch.Tensor) -> torch.Tensor:
        experts, padded_counts, fp8 = self.experts, counts, bool(self.config.fp8)
        if fp8:
            x_AH, padded_counts = experts.quantization_padding(x_AH, counts)
            if weights_A is not None:
                weights_A = experts.quantization_padding(weights_A[:, None], counts)[0][:, 0]
        gate_up, _ = experts.linear_fc1(x_AH, padded_counts)
        activation = self._activation(gate_up, weights_A)
        outputs, _ = experts.linear_fc2(activation, padded_counts)
        if self.observe is not None:
            seen = {"gate_up": gate_up, "activation": activation, "down": outputs}
            self.observe({n: (experts.quantization_unpadding(t, counts) if fp8 else t).detach() for n, t in seen.items()} | {"ids": ids_Tk})
        return experts.quantization_unpadding(outputs, counts) if fp8 else outputs


def mlp_builder(choices: Mapping[str, str]) -> Any:
    """Megatron's MLP class, or the shared one."""
    return MLP if choices["swiglu"] == "native" else SharedMlp


def moe_builder(choices: Mapping[str, str]) -> Any:
    """What the spec calls to build a mixture-of-experts layer."""
    if all(choices[name] == "native" for name in MOE_CAUSES):
        return MoELayer
    return partial(SharedMoELayer, choices=choices)
