"""Two ways to bring received tensors into a live vLLM model: copies in place, or vLLM's layerwise reload."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from e2e_fp8.rollout.rank_layout import RankSlot
from e2e_fp8.sync.buckets import TensorSpec
from e2e_fp8.sync.copies import CopyPlan


class Loader(Protocol):
    """Takes a complete set of HF-named tensors in any number of pieces."""

    def look(self) -> None:
        """Do what can be done of :meth:`start` while the model still serves."""
        ...

    def start(self) -> None: ...
    def load(self, tensors: Mapping[str, torch.Tensor], *, reusable: bool) -> None:
        """Take whole HF tensors, which the caller reuses afterwards; ``reusable`` when this very mapping comes again.

        A rank may hold nothing of some of them: experts of other ranks, a vocabulary that ends before its rows.
        """
        ...

    def placed(self, spec: TensorSpec) -> torch.Tensor | None:
        """The model's own memory for a tensor if it lies there whole and without gaps, so that it may be received there."""
        ...

    def finish(self) -> None: ...
    def abandon(self) -> None:
        """Leave the model callable after an update that ended early; its values are then a mix."""
        ...

    def forget(self) -> None:
        """Drop everything that refers to a sender's memory, whose channel closes."""
        ...


class LiveParameters:
    """A model's parameters by name, found once, without missing those that vLLM puts in the place of others later."""

    def __init__(self, model: torch.nn.Module, wanted: Collection[str] | None = None) -> None:
        """``wanted``: names of those to look at; all by default."""
        self._owners: list[tuple[str, dict[str, Any], str]] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter is not None and id(parameter) not in seen and (wanted is None or full in wanted):
                    seen.add(id(parameter))
                    self._owners.append((full, module._parameters, name))

    def named(self) -> dict[str, torch.Tensor]:
        """As ``dict(model.named_parameters())`` now."""
        return {name: owner[key] for name, owner, key in self._owners}

    def addresses(self) -> tuple[tuple[int, int], ...]:
        """First byte and number of elements of each; equal tuples mean that views of them still hold."""
        return tuple((owner[key].data_ptr(), owner[key].numel()) for _, owner, key in self._owners)


class InPlaceLoader:
    """Copies each rank's part into the live parameters: no allocation, addresses kept, CUDA graphs stay valid.

    Right where vLLM's processing after loading changes nothing, which the receipt checks: block FP8 on Hopper.
    """

    def __init__(self, parameters: LiveParameters, slots: list[RankSlot]) -> None:
        self._parameters = parameters
        self._slots = {slot.part.name: slot for slot in slots}
        self._addresses: tuple = ()
        self._live: dict[str, torch.Tensor] = {}
        self._plans: dict[int, tuple[Mapping[str, torch.Tensor], CopyPlan]] = {}
        """By the mapping's id, which stays its own because the mapping is kept."""
        self._looked = False
        """Since the last update."""

    def start(self) -> None:
        if not self._looked:
            self.look()
        self._looked = False

    def look(self) -> None:
        """Look where the live parameters are; plans of the last update hold when they have not moved."""
        addresses = self._parameters.addresses()
        if addresses != self._addresses:
            named = self._parameters.named()
            self._live = {name: slot.live(named) for name, slot in self._slots.items()}
            self._plans, self._addresses = {}, addresses
        self._looked = True

    def views(self) -> Mapping[str, torch.Tensor]:
        """HF name to this rank's part as a view of the live parameters; the same mapping while nothing has moved."""
        self.look()
        self._looked = False
        return self._live

    def load(self, tensors: Mapping[str, torch.Tensor], *, reusable: bool) -> None:
        kept = self._plans.get(id(tensors))
        if kept is not None:
            kept[1].run()
            return
        held = ((self._live[name], self._slots[name], tensor) for name, tensor in tensors.items() if name in self._slots)
        plan = CopyPlan((live, slot.part.of(tensor)) for live, slot, tensor in held)
        if reusable:
            self._plans[id(tensors)] = tensors, plan
        plan.run()

    def placed(self, spec: TensorSpec) -> torch.Tensor | None:
        live = self._live.get(spec.name)
        return live if live is not None and tuple(live.shape) == spec.shape and live.is_contiguous() else None

    def finish(self) -> None:
        """Everything is in place."""

    def abandon(self) -> None:
        """Of the bytes nothing is to be undone: the next update overwrites them all."""
        self._looked = False

    def forget(self) -> None:
        self._plans = {}


class LayerwiseLoader:
    """vLLM's own reload from checkpoint names, which repacks each layer once all of it has come."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config

    def look(self) -> None:
        """Nothing: a layer that is going to be reloaded does not serve."""

    def start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def load(self, tensors: Mapping[str, torch.Tensor], *, reusable: bool) -> None:
        # The reload keeps tensors until their layer is complete, longer than the caller keeps its buffer.
        self._model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())  # type: ignore[operator]

    def placed(self, spec: TensorSpec) -> torch.Tensor | None:
        """None: vLLM's loaders want the tensor itself."""
        return None

    def forget(self) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)

    def abandon(self) -> None:
        from e2e_fp8.rollout.weight_transfer import abandon_layerwise_reload

        abandon_layerwise_reload(self._model)
