"""Two ways to bring received tensors into a live vLLM model: copies in place, or vLLM's layerwise reload."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from e2e_fp8.rollout.rank_layout import RankSlot

RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type of each element size: tensors are moved as bytes, whatever they hold."""


class Loader(Protocol):
    """Takes a complete set of HF-named tensors in any number of pieces."""

    def start(self) -> None: ...
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take whole HF tensors, which the caller reuses afterwards."""
        ...

    def finish(self) -> None: ...
    def abandon(self) -> None:
        """Leave the model callable after an update that ended early; its values are then a mix."""
        ...


class InPlaceLoader:
    """Copies each rank's part into the live parameters: no allocation, addresses kept, CUDA graphs stay valid.

    Right where vLLM's processing after loading changes nothing, which the receipt checks: block FP8 on Hopper.
    """

    def __init__(self, model: torch.nn.Module, slots: list[RankSlot]) -> None:
        self._model = model
        self._slots = {slot.part.name: slot for slot in slots}

    def start(self) -> None:
        """Nothing to prepare."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._model.named_parameters())
        groups: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            slot = self._slots[name]
            target = slot.live(parameters)
            raw = RAW_DTYPES[tensor.element_size()]
            targets, sources = groups.setdefault(tensor.element_size(), ([], []))
            targets.append(target.view(raw))
            sources.append(slot.part.of(tensor).view(raw))
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]

    def finish(self) -> None:
        """Everything is in place."""

    def abandon(self) -> None:
        """Nothing to undo: the next update overwrites every byte."""


class LayerwiseLoader:
    """vLLM's own reload from checkpoint names, which repacks each layer once all of it has come."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config

    def start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # The reload keeps tensors until their layer is complete, longer than the caller keeps its buffer.
        self._model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())  # type: ignore[operator]

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)

    def abandon(self) -> None:
        """Put the engine's own tensors back into layers that wait for the rest of their weights.

        vLLM has no way out of a reload that ended early: a second start would take its empty placeholders for the model.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
