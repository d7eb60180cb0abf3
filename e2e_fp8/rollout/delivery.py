"""What one weight update of the in-process engine brings: checked once, and taken as it was while nothing has moved."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.engine_layout import TensorSlot, check_delivery
from e2e_fp8.sync.settled import NamedTensors
from e2e_fp8.types import ExportedTensor


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A complete set of weights, split by the way in which each enters vLLM."""

    placed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """HF names of what is copied into live parameters as it lies."""
    reloaded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """HF names of what vLLM's own loaders take, because it keeps these layers in another form."""
    num_bytes: int = 0
    settled: bool = False
    """Whether it is the very delivery of the last time, so that what was prepared from its addresses still holds."""


class Deliveries:
    """Checks deliveries against the model, those that come again (see :class:`NamedTensors`) by their addresses alone."""

    def __init__(self, layout: Sequence[TensorSlot], in_place: Callable[[TensorSlot], bool]) -> None:
        """``in_place`` says of a slot whether vLLM keeps it as the checkpoint does."""
        self._layout = list(layout)
        self._placed = {slot.name for slot in layout if in_place(slot)}
        self._named = NamedTensors()
        self._last: tuple[Mapping[str, torch.Tensor], Delivery] | None = None

    def of(self, tensors: Iterable[ExportedTensor]) -> Delivery:
        """Raises EngineError, before anything is written, when the tensors are not exactly the model's."""
        named = self._named.of(tensors)
        if self._last is not None and named is self._last[0]:
            return replace(self._last[1], settled=True)
        self._last = None
        delivery = self.checked(named)
        if self._named.keeps(named):
            self._last = named, delivery
        return delivery

    def checked(self, named: Mapping[str, torch.Tensor]) -> Delivery:
        """The delivery of these tensors; errors as of :meth:`of`."""
        check_delivery(self._layout, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()})
        return self.split(named)

    def split(self, named: Mapping[str, torch.Tensor]) -> Delivery:
        """Checked tensors by the way in which each enters."""
        return Delivery(
            placed={name: tensor for name, tensor in named.items() if name in self._placed},
            reloaded={name: tensor for name, tensor in named.items() if name not in self._placed},
            num_bytes=sum(tensor.nbytes for tensor in named.values()),
        )


class SharedDeliveries(Deliveries):
    """Deliveries of which most are the engine's own memory already: only the others are written."""

    def __init__(
        self, layout: Sequence[TensorSlot], in_place: Callable[[TensorSlot], bool], shared: Mapping[str, int], copied: Collection[str]
    ) -> None:
        """``shared``: HF name to the address at which the engine reads it; ``copied``: HF names of all others."""
        super().__init__(layout, in_place)
        self._shared, self._copied = shared, frozenset(copied)

    def checked(self, named: Mapping[str, torch.Tensor]) -> Delivery:
        """Raises EngineError when a shared tensor has moved since the engine started, or tensors are missing or unknown."""
        moved = [name for name, tensor in named.items() if self._shared.get(name, tensor.data_ptr()) != tensor.data_ptr()]
        if moved:
            raise EngineError(f"{len(moved)} shared tensors have moved in the trainer's memory, first {moved[:3]}; restart the engine.")
        own = {name: tensor for name, tensor in named.items() if name not in self._shared}
        seen = len(named) - len(own)
        if own.keys() != self._copied or seen != len(self._shared):
            raise EngineError(
                f"Weight update refused, nothing was written: {seen} of {len(self._shared)} shared tensors and {len(own)} of "
                f"{len(self._copied)} copied ones were given, and they have to be all, each once."
            )
        return self.split(own)
