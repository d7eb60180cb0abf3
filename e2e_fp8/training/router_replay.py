"""Rollout routing replay on Megatron-Core's own hook: each router takes the engine's experts instead of its top-k.

``moe_enable_routing_replay`` gives every router a ``RouterReplay``, which its top-k asks. Megatron's replays all tokens or none and
is driven through a list of the whole process; :class:`ReplayHook` replays where a mask says so and belongs to one trainer, so that a
reference policy beside it keeps its own routing. Formula: R3, arXiv 2510.11370, ``g = I exp(s) / sum(I exp(s))`` with the engine's
choice ``I`` and the trainer's logits ``s``, through which the router keeps its gradient.

Shape legend: ``T`` packed tokens (of this rank's share in a router), ``L`` layers, ``k`` slots, ``E`` experts, ``H`` hidden width,
``A`` assignments (T k, ordered by expert, then token).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from e2e_fp8.errors import ConfigError
from e2e_fp8.types import PackedBatch, ReplayCounts


class ReplayHook(RouterReplay):
    """Megatron's replay object of one router, with a mask; ``become`` turns the one that a router was built with into this class."""

    replayed_T: torch.Tensor | None
    weights_Tk: torch.Tensor | None
    chosen_Tk: torch.Tensor | None
    """int64: the experts of the last routing."""
    changed: torch.Tensor | int
    assigned: torch.Tensor | int

    @classmethod
    def become(cls, hook: RouterReplay) -> "ReplayHook":
        """Change the class of ``hook`` in place and take it out of Megatron's list of the process."""
        RouterReplay.global_router_replay_instances[:] = [h for h in RouterReplay.global_router_replay_instances if h is not hook]
        hook.__class__ = cls
        assert isinstance(hook, cls)
        hook.changed = hook.assigned = 0
        hook.stop()
        return hook

    def start(self, ids_Tk: torch.Tensor, replayed_T: torch.Tensor, weights_Tk: torch.Tensor | None) -> None:
        """Replay int64 ``ids_Tk`` where bool ``replayed_T``, with FP32 ``weights_Tk`` unless None, until ``stop``."""
        self.set_target_indices(ids_Tk)
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self.replayed_T, self.weights_Tk = replayed_T, weights_Tk

    def stop(self) -> None:
        """Leave the choice to the router again."""
        self.clear_indices()
        self.clear_router_replay_action()
        self.replayed_T = self.weights_Tk = self.chosen_Tk = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores ``[T, k]`` at the replayed experts, and the experts; the router's own top-k where nothing is replayed."""
        if self.router_replay_action != RouterReplayAction.REPLAY_FORWARD:
            return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        assert self.target_topk_idx is not None
        assert self.replayed_T is not None
        if self.target_topk_idx.shape != (scores.size(0), topk):
            raise ValueError(
                f"Routing of shape {tuple(self.target_topk_idx.shape)} cannot be replayed for {scores.size(0)} tokens x {topk}."
            )
        _, own_Tk = default_compute_topk(scores, topk, num_groups, group_topk)
        replayed_T1 = self.replayed_T[:, None]
        ids_Tk = torch.where(replayed_T1, self.target_topk_idx, own_Tk)
        kept_Tk = (ids_Tk[:, :, None] == own_Tk[:, None, :]).any(dim=2)
        self.changed = self.changed + (~kept_Tk).sum()
        self.assigned = self.assigned + topk * self.replayed_T.sum()
        self.chosen_Tk = ids_Tk
        return scores.gather(1, ids_Tk), ids_Tk

    def take_counts(self) -> tuple[float, float]:
        """Replayed assignments that the router would not have made, and all replayed ones, since the last call."""
        counts = float(self.changed), float(self.assigned)
        self.changed = self.assigned = 0
        return counts


class ValueWithGradientOf(torch.autograd.Function):
    """The bits of ``value`` forward; backward the gradient goes to ``source`` unchanged."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.to(source.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class ReplayRouter(TopKRouter):
    """A router that multiplies with the engine's gate weights where they are replayed."""

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate weights and routing map, both ``[T, E]``; the gradient of a replayed weight is that of the trainer's own."""
        probs_TE, map_TE = super().routing(logits, padding_mask)
        hook = self.router_replay
        if not isinstance(hook, ReplayHook) or hook.weights_Tk is None:
            return probs_TE, map_TE
        assert hook.replayed_T is not None
        assert hook.chosen_Tk is not None
        engine_TE = torch.zeros_like(probs_TE).scatter(1, hook.chosen_Tk, hook.weights_Tk.to(probs_TE.dtype))
        value_TE = torch.where(hook.replayed_T[:, None], engine_TE, probs_TE.detach())
        return ValueWithGradientOf.apply(probs_TE, value_TE), map_TE


class SlotOrderDispatcher(MoEAlltoAllTokenDispatcher):
    """Adds a token's expert outputs in the order of the engine's slots; Megatron's adds them in the order of expert ids."""

    replay_hook: ReplayHook

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Output in the shape of the layer's input. ``permutated_local_input_tokens`` is ``[A, H]``, back on the token's rank."""
        hook = self.replay_hook
        if hook.weights_Tk is None:
            return super().combine_postprocess(permutated_local_input_tokens)
        assert hook.replayed_T is not None
        assert hook.chosen_Tk is not None
        # what is not replayed stays in Megatron's order
        slots_Tk = torch.where(hook.replayed_T[:, None], hook.chosen_Tk, hook.chosen_Tk.sort(dim=1).values)
        output = sum_in_slot_order(permutated_local_input_tokens, self.routing_map, slots_Tk)
        return output.view(self.hidden_shape)


def sum_in_slot_order(outputs_AH: torch.Tensor, map_TE: torch.Tensor, slots_Tk: torch.Tensor) -> torch.Tensor:
    """``[T, H]``: for each token its experts' outputs added one after another in FP32, slot 0 first, then rounded to their dtype.

    ``outputs_AH`` has a row for each True entry of the bool ``map_TE``, by expert, then token, as Megatron permutes.
    """
    experts = map_TE.size(1)
    row_ET = map_TE.T.reshape(-1).cumsum(0).view(experts, -1) - 1
    tokens_T = torch.arange(slots_Tk.size(0), device=slots_Tk.device)
    total_TH = torch.zeros(slots_Tk.size(0), outputs_AH.size(1), dtype=torch.float32, device=outputs_AH.device)
    for slot_T in slots_Tk.unbind(1):
        total_TH = total_TH + outputs_AH[row_ET[slot_T, tokens_T]]
    return total_TH.to(outputs_AH.dtype)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    index: int
    """Of the whole model, from 0."""
    hook: ReplayHook


class RouterReplays:
    """The routers of one trainer rank.

    Raises:
        ConfigError: Megatron built a router or dispatcher that cannot replay.
    """

    def __init__(self, chunks: Sequence[Any], *, sequence_parallel: bool, weights_and_order: bool) -> None:
        self.sequence_parallel = sequence_parallel
        self.layers = [
            self._attach(layer, weights_and_order) for chunk in chunks for layer in chunk.modules() if isinstance(layer, MoELayer)
        ]

    @staticmethod
    def _attach(layer: MoELayer, weights_and_order: bool) -> _Layer:
        router, dispatcher = layer.router, layer.token_dispatcher
        replaceable = type(router) is TopKRouter and type(dispatcher) is MoEAlltoAllTokenDispatcher
        if not isinstance(router, TopKRouter) or router.router_replay is None or (weights_and_order and not replaceable):
            raise ConfigError(
                f"training.router_replay needs Megatron's TopKRouter, and in mode R3_weights_order its all-to-all dispatcher, but this "
                f"model has {type(router).__name__} and {type(dispatcher).__name__}: set training.router_replay.mode to disabled or R3."
            )
        hook = ReplayHook.become(router.router_replay)
        if weights_and_order:
            assert isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
            router.__class__ = ReplayRouter
            dispatcher.__class__ = SlotOrderDispatcher
            dispatcher.replay_hook = hook  # pyright: ignore[reportAttributeAccessIssue]
        assert router.layer_number is not None
        return _Layer(index=router.layer_number - 1, hook=hook)

    @contextmanager
    def replaying(self, batch: PackedBatch) -> Iterator[None]:
        """Forward passes inside take the routing of ``batch``, padded as the model sees it; the router's own where it has none."""
        if batch.routed_experts is None:
            yield
            return
        if batch.replay_mask is None:
            raise ValueError("routed_experts without a replay_mask")
        ids_TLk, replayed_TL, weights_TLk = (self._share(t) for t in (batch.routed_experts, batch.replay_mask, batch.routed_weights))
        assert ids_TLk is not None
        assert replayed_TL is not None
        for layer in self.layers:
            weights_Tk = None if weights_TLk is None else weights_TLk[:, layer.index]
            layer.hook.start(ids_TLk[:, layer.index].to(torch.int64), replayed_TL[:, layer.index], weights_Tk)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.hook.stop()

    def _share(self, values_T: torch.Tensor | None) -> torch.Tensor | None:
        """The tokens that this rank routes: under sequence parallelism its part of them, in rank order."""
        if values_T is None or not self.sequence_parallel:
            return values_T
        size = parallel_state.get_tensor_model_parallel_world_size()
        return values_T.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]

    def take_counts(self) -> ReplayCounts:
        """What replay changed in this rank's layers since the last call."""
        counts = {layer.index: layer.hook.take_counts() for layer in self.layers}
        return ReplayCounts(
            changed={index: changed for index, (changed, _) in counts.items()},
            assigned={index: assigned for index, (_, assigned) in counts.items()},
        )
