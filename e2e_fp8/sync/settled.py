"""Tensors of an update by name, known again when they come again: of 37,000, naming them takes longer than copying them."""

from collections.abc import Iterable, Mapping

import torch

from e2e_fp8.sync.copies import named_once
from e2e_fp8.types import ExportedTensor


class NamedTensors:
    """A tuple that comes again, whose memory is where it was, gives the same mapping: about 0.1 us for each storage.

    Of tensors that share a storage the first is looked at: one that is given other memory (``set_``) has to come in another tuple.
    What comes otherwise than as a tuple is made for one update alone and is not remembered, since that would keep it alive.
    """

    def __init__(self) -> None:
        self._entries: tuple[ExportedTensor, ...] | None = None
        self._first: list[torch.Tensor] = []
        """Of each storage."""
        self._addresses: list[int] = []
        self._named: Mapping[str, torch.Tensor] = {}

    def of(self, tensors: Iterable[ExportedTensor]) -> Mapping[str, torch.Tensor]:
        """HF name to tensor, without gradients. Raises EngineError when a name comes twice."""
        if tensors is self._entries and [*map(torch.Tensor.data_ptr, self._first)] == self._addresses:
            return self._named
        self._entries, self._first, self._addresses, self._named = None, [], [], {}
        named = named_once(tensors)
        if isinstance(tensors, tuple):
            self._entries, self._named = tensors, named
            self._first = [*{entry.tensor.untyped_storage().data_ptr(): entry.tensor for entry in reversed(tensors)}.values()]
            self._addresses = [*map(torch.Tensor.data_ptr, self._first)]
        return named

    def keeps(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether the mapping may come again."""
        return self._entries is not None and named is self._named
