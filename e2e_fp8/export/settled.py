"""The export of a trainer whose memory stays where it is: views made once, handed out again after every step."""

from collections.abc import Iterable

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.export.hf_names import NamedWeight, to_hf
from e2e_fp8.types import ExportedTensor


class SettledExport:
    """Hugging Face views of one trainer's weights.

    The trainer's memory is looked at before every use: a tensor at another address, or another number of them, and all views are
    made anew. The same tuple therefore means the same places. It keeps the trainer's storages alive.
    """

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._views: tuple[ExportedTensor, ...] = ()

    def tensors(self, addresses: list[int], weights: Iterable[NamedWeight], model: ModelConfig) -> tuple[ExportedTensor, ...]:
        """A complete set.

        Args:
            addresses: where every code, scale or BF16 weight of the trainer lies now.
            weights: the trainer's weights; iterated only when ``addresses`` are others than the last time.

        Raises:
            ValueError: as :func:`e2e_fp8.export.hf_names.to_hf`.
        """
        if not self._views or addresses != self._addresses:
            self._views, self._addresses = tuple(to_hf(weights, model)), addresses
        return self._views
