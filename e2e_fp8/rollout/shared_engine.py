"""The rollout engine over the trainer's own memory: the ``shared`` transport."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.delivery import SharedDeliveries
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.shared import Sharing
from e2e_fp8.types import ExportedTensor, Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """The weights as the trainer holds them."""

    tensors: Callable[[], Iterable[ExportedTensor]]
    """A complete set under HF names, views of the trainer's storage."""
    policy_version: Callable[[], int]
    """The trainer's version now: its memory changes with every optimizer step, before the engine is told."""


class SharedVllmEngine(VllmEngine):
    """A VllmEngine whose parameters are views of the trainer's storage wherever vLLM keeps them as the checkpoint does.

    What vLLM keeps in another form has its own memory and is copied at every update: on the CPU the BF16 linears that it repacks,
    on both grounds a vocabulary that it pads. :attr:`sharing` lists them with reasons. :meth:`update_weights` copies these alone.
    """

    def __init__(
        self, cfg: Config, model_dir: Path, eos_token_id: int, decode: Callable[[Sequence[int]], str], memory: TrainerMemory
    ) -> None:
        """As VllmEngine; raises EngineError when vLLM gave an FP8 parameter memory of its own on a GPU."""
        self.memory = memory
        self.sharing = Sharing(views={}, reasons={})
        super().__init__(cfg, model_dir, eos_token_id, decode)
        views = self.sharing.views
        shared = {slot.name: slot.view(views).data_ptr() for slot in self.layout if slot.parameter in views}
        copied = {slot.name for slot in self.sharing.copied_slots(self.layout)}
        self.deliveries = SharedDeliveries(self.layout, self.is_in_place, shared, copied)

    def _loader_args(self) -> dict[str, Any]:
        from e2e_fp8.rollout.shared_loader import LOAD_FORMAT

        return {"load_format": LOAD_FORMAT}

    def _start(self, model_dir: Path) -> Any:
        from e2e_fp8.rollout.shared_loader import REQUESTS, SharingRequest

        request = SharingRequest(self.layout, {t.name: t.tensor.detach() for t in self.memory.tensors()})
        REQUESTS.append(request)
        try:
            llm = super()._start(model_dir)
        finally:
            REQUESTS.clear()
        if request.outcome is None:
            raise EngineError("vLLM did not use the shared loader, so its weights are not the trainer's. Use sync.transport=local.")
        self.sharing = self._confirmed(request.outcome, dict(llm.apply_model(lambda model: dict(model.named_parameters()))[0]))
        return llm

    def _confirmed(self, planned: Sharing, live: dict[str, torch.Tensor]) -> Sharing:
        """What is still shared after vLLM has processed its weights."""
        views, reasons = {}, dict(planned.reasons)
        for name, view in planned.views.items():
            if name in live and live[name].data_ptr() == view.data_ptr():
                views[name] = view
            else:
                reasons[name] = "vLLM repacked it"
        fp8 = {slot.parameter for slot in self.layout if slot.fp8 and slot.dtype == torch.float8_e4m3fn}
        unshared = [f"{name} ({reason})" for name, reason in reasons.items() if name in fp8]
        if unshared:
            raise EngineError(
                f"sync.transport is shared, but {len(unshared)} FP8 parameters cannot be the trainer's memory: {', '.join(unshared[:4])}. "
                "Use sync.transport=local."
            )
        return Sharing(views=views, reasons=reasons)

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]:
        """As VllmEngine.generate; raises EngineError when the trainer has stepped since the last update."""
        if self.policy_version is not None and self.memory.policy_version() != self.policy_version:
            raise EngineError(
                f"The trainer is at policy version {self.memory.policy_version()}, the engine was told of {self.policy_version}, and they "
                "share their weights: call update_weights first."
            )
        return super().generate(prompts, group_size=group_size, seed=seed)
