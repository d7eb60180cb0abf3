"""One storage for trainer and engine: which of vLLM's parameters can be views of the trainer's memory.

A parameter of vLLM is made of HF tensors (:class:`~e2e_fp8.rollout.engine_layout.TensorSlot`). When the trainer holds these
one behind the other in vLLM's order, at the addresses that the parameter's strides ask for, the parameter is a view of the
trainer's storage and a weight sync moves nothing. Decided from addresses alone, so it holds for any trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.rollout.engine_layout import TensorSlot


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What is shared, and why the rest is not."""

    views: dict[str, torch.Tensor]
    """vLLM parameter name to a view of the trainer's storage, in the parameter's shape and dtype."""
    reasons: dict[str, str]
    """vLLM parameter name to the reason why it has its own memory."""

    def copied_slots(self, layout: Sequence[TensorSlot]) -> list[TensorSlot]:
        """The HF tensors that a sync still has to copy."""
        return [slot for slot in layout if slot.parameter not in self.views]


def plan_sharing(layout: Sequence[TensorSlot], delivered: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> Sharing:
    """Match the trainer's tensors (by HF name) with vLLM's parameters (by vLLM name), without touching either."""
    slots_of: dict[str, list[TensorSlot]] = {}
    for slot in layout:
        slots_of.setdefault(slot.parameter, []).append(slot)
    views, reasons = {}, {}
    for name, slots in slots_of.items():
        if name not in parameters:
            reasons[name] = "vLLM has no such parameter"
            continue
        outcome = _view_of_parts(slots, [delivered[s.name] for s in slots], parameters[name])
        if isinstance(outcome, str):
            reasons[name] = outcome
        else:
            views[name] = outcome
    return Sharing(views=views, reasons=reasons)


def _view_of_parts(slots: Sequence[TensorSlot], parts: Sequence[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | str:
    """A tensor over the parts in the parameter's shape, or the reason why there is none."""
    first = parts[0]
    if first.dtype != parameter.dtype or first.device.type != parameter.device.type:
        return f"the trainer has {first.dtype} on {first.device}, vLLM {parameter.dtype} on {parameter.device}"
    rows_per_expert = parameter.shape[-2] if slots[0].expert is not None else 0
    row_elements = parameter.stride(-2) if parameter.dim() > 1 else 1
    if sum(part.numel() for part in parts) != parameter.numel():
        return f"vLLM pads it to {tuple(parameter.shape)}"
    start = first.data_ptr() - _offset(slots[0], rows_per_expert, row_elements) * first.element_size()
    for slot, part in zip(slots, parts, strict=True):
        if not part.is_contiguous():
            return f"the rows of {slot.name} are padded in the trainer"
        if part.data_ptr() != start + _offset(slot, rows_per_expert, row_elements) * part.element_size():
            return f"{slot.name} does not follow its neighbours in the trainer's memory"
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    byte_offset = start - first.untyped_storage().data_ptr()
    raw.set_(first.untyped_storage(), byte_offset, (parameter.numel() * parameter.element_size(),), (1,))
    return raw.view(parameter.dtype).view(parameter.shape)


def _offset(slot: TensorSlot, rows_per_expert: int, row_elements: int) -> int:
    """Elements between the start of the parameter and the first of the slot."""
    return ((slot.expert or 0) * rows_per_expert + slot.row) * row_elements
