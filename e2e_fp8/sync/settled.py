"""Tensors of an update by name, known again when they come again: of 37,000, naming them takes longer than copying them."""

from collections.abc import Iterable, Mapping

import torch

from e2e_fp8.sync.copies import named_once
from e2e_fp8.types import ExportedTensor


class NamedTensors:
    """A tuple that comes again, of which no tensor has moved, gives the same mapping: about 0.05 us a tensor.

    What comes otherwise than as a tuple is made for one update alone and is not remembered, since that would keep it alive.
    """

    def __init__(self) -> None:
        self._entries: tuple[ExportedTensor, ...] | None = None
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._named: Mapping[str, torch.Tensor] = {}

    def of(self, tensors: Iterable[ExportedTensor]) -> Mapping[str, torch.Tensor]:
        """HF name to tensor, without gradients. Raises EngineError when a name comes twice."""
        if tensors is self._entries and [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses:
            return self._named
        self._entries, self._tensors, self._addresses, self._named = None, [], [], {}
        named = named_once(tensors)
        if isinstance(tensors, tuple):
            self._entries, self._named = tensors, named
            self._tensors = [entry.tensor for entry in tensors]
            self._addresses = [*map(torch.Tensor.data_ptr, self._tensors)]
        return named

    def keeps(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether the mapping may come again."""
        return self._entries is not None and named is self._named
