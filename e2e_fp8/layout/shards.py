"""Rectangles of Hugging Face tensors inside a parameter, and the few ways in which both sides cut and join them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.families import HfTensor, Kind, dtype_name
from e2e_fp8.layout.tiles import scale_shape, te_scale_shape

Range = tuple[int, int]
"""``(start, stop)``, stop excluded."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rectangle of one HF tensor. It fills the rows ``row ..`` of the parameter, all of its columns."""

    hf_name: str
    rows: Range
    cols: Range | None
    """Columns in the HF tensor; None for a vector."""
    row: int
    """First row in the parameter (of its expert)."""
    expert: int | None = None
    """Index into the leading axis of a parameter that stacks experts."""

    @property
    def index(self) -> tuple[slice, ...]:
        """What to index the HF tensor with."""
        rows = (slice(*self.rows),)
        return rows if self.cols is None else (*rows, slice(*self.cols))


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """What one rank holds of one parameter: the concatenation by rows of ``parts``, in order."""

    name: str
    """``named_parameters()`` of the model, or of the model chunk under virtual pipelining; layers count from 0 in each chunk."""
    shape: tuple[int, ...]
    """Local shape: ``[rows]``, ``[rows, columns]`` or ``[experts, rows, columns]``."""
    parts: tuple[Part, ...]
    fp8: bool
    kind: Kind
    chunk: int = 0
    """Virtual pipeline stage."""
    layer: int | None = None
    """Layer of the whole model, from 0."""
    expert: int | None = None
    """Expert of the whole model, for a parameter that holds one expert."""

    @property
    def dtype(self) -> str:
        """``float8_e4m3fn``, ``float32`` or ``bfloat16``."""
        return dtype_name(self.kind, self.fp8)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the parameter or of one of its experts; a vector has one column."""
        return (self.shape[0], 1) if len(self.shape) == 1 else (self.shape[-2], self.shape[-1])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the block scales, as vLLM stores them."""
        return (*self.shape[:-2], *scale_shape(*self.matrix))

    @property
    def te_scale_shape(self) -> tuple[int, ...]:
        """Shape in which Transformer Engine stores the same scales: columns padded to a multiple of 4, to be cut off."""
        return (*self.shape[:-2], *te_scale_shape(*self.matrix))

    @property
    def padding_rows(self) -> int:
        """Rows at the end that no HF tensor fills (a padded vocabulary)."""
        if self.expert is None and len(self.shape) == 3:
            return 0
        return self.matrix[0] - sum(part.rows[1] - part.rows[0] for part in self.parts)

    def placed(self, prefix: str, hf_prefix: str, *, layer: int | None, chunk: int = 0) -> "ShardedParameter":
        """The same parameter of a block under its full names."""
        parts = tuple(Part(hf_prefix + p.hf_name, p.rows, p.cols, p.row, p.expert) for p in self.parts)
        return replace(self, name=prefix + self.name, parts=parts, layer=layer, chunk=chunk)


Piece = tuple[HfTensor, Range]
"""Rows of an HF tensor, with all of its columns."""


def share(size: int, index: int, count: int, what: str) -> Range:
    """The ``index``-th of ``count`` equal ranges of ``size``. Raises LayoutError when they are not equal."""
    if size % count:
        raise LayoutError(f"{what}: {size} does not divide by {count}, so it cannot be split over {count} ranks.")
    width = size // count
    return index * width, (index + 1) * width


def joined(name: str, pieces: Iterable[Piece], *, rows: int | None = None) -> ShardedParameter:
    """Row ranges stacked in order; ``rows`` pads the end.

    Raises LayoutError when FP8 and BF16 tensors would share the parameter.
    """
    parts, row, first = [], 0, None
    for tensor, (start, stop) in pieces:
        first = first or tensor
        if tensor.fp8 != first.fp8:
            raise LayoutError(f"{first.name} and {tensor.name} are fused into {name}, but only one is FP8: give both the same precision.")
        if stop > start:
            parts.append(Part(tensor.name, (start, stop), (0, tensor.shape[1]) if len(tensor.shape) > 1 else None, row))
            row += stop - start
    if first is None:
        raise ValueError(f"{name} has no tensors")
    return ShardedParameter(name, (row if rows is None else rows, *first.shape[1:]), tuple(parts), first.fp8, first.kind)


def whole(name: str, *tensors: HfTensor) -> ShardedParameter:
    """Unsplit tensors, stacked by rows."""
    return joined(name, [(tensor, (0, tensor.shape[0])) for tensor in tensors])


def split_rows(name: str, tensors: Sequence[HfTensor], index: int, count: int) -> ShardedParameter:
    """The ``index``-th share of the rows of each tensor, stacked (column-parallel)."""
    return joined(name, [(tensor, share(tensor.shape[0], index, count, tensor.name)) for tensor in tensors])


def split_columns(name: str, tensor: HfTensor, index: int, count: int) -> ShardedParameter:
    """The ``index``-th share of the columns (row-parallel)."""
    cols = share(tensor.shape[1], index, count, tensor.name)
    part = Part(tensor.name, (0, tensor.shape[0]), cols, 0)
    return ShardedParameter(name, (tensor.shape[0], cols[1] - cols[0]), (part,), tensor.fp8, tensor.kind)


def split_vocabulary(name: str, tensor: HfTensor, index: int, count: int, padded: int) -> ShardedParameter:
    """The ``index``-th share of ``padded`` rows, of which only the tensor's own are filled."""
    start, stop = share(padded, index, count, f"{tensor.name}, padded,")
    size = tensor.shape[0]
    return joined(name, [(tensor, (min(start, size), min(stop, size)))], rows=stop - start)


def window(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """Rows ``start .. stop`` of the stacked pieces."""
    found, row = [], 0
    for tensor, (first, last) in pieces:
        low, high = max(start, row), min(stop, row + last - first)
        if low < high:
            found.append((tensor, (first + low - row, first + high - row)))
        row += last - first
    return found


def stacked(name: str, experts: Sequence[ShardedParameter]) -> ShardedParameter:
    """Equal parameters of several experts under a new leading axis."""
    parts = tuple(replace(part, expert=index) for index, one in enumerate(experts) for part in one.parts)
    first = experts[0]
    if any(one.fp8 != first.fp8 for one in experts):
        raise LayoutError(f"{name} stacks FP8 and BF16 experts: give all experts of a layer the same precision.")
    return ShardedParameter(name, (len(experts), *first.shape), parts, first.fp8, first.kind)
