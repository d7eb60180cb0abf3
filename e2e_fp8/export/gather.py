"""Hugging Face tensors put together on one rank from the shares of all ranks, one tensor at a time, by point-to-point sends.

Codes and their scale tiles travel together and are copied byte for byte; at most one whole tensor is in memory for it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from e2e_fp8.errors import LayoutError
from e2e_fp8.export.hf_names import NamedWeight
from e2e_fp8.layout import HfTensor, Part, ShardedParameter
from e2e_fp8.layout.tiles import TILE, scale_shape
from e2e_fp8.megatron_names import whole_model_name
from e2e_fp8.types import ExportedTensor

_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
_Rectangle = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One rectangle of a Hugging Face tensor and the rank it is read from."""

    rank: int
    parameter: str
    """Name in the whole model of the parameter that holds it."""
    here: _Rectangle
    """Where in the parameter."""
    there: _Rectangle
    """Where in the Hugging Face tensor."""


def sources_of(tensors: Iterable[HfTensor], layouts: Iterable[Sequence[ShardedParameter]]) -> dict[str, list[Source]]:
    """For each tensor the rectangles that make it up, each from the lowest rank that holds it.

    Args:
        layouts: what each rank holds, by rank.

    Raises:
        LayoutError: the ranks do not hold every element exactly once, or an FP8 rectangle does not consist of whole tiles.
    """
    found: dict[str, dict[tuple[tuple[int, int], ...], Source]] = {}
    shapes = {tensor.name: tensor for tensor in tensors}
    for rank, layout in enumerate(layouts):
        for entry in layout:
            for part in entry.parts:
                spans = (part.rows,) if part.cols is None else (part.rows, part.cols)
                held = found.setdefault(part.hf_name, {})
                if spans not in held:
                    held[spans] = _source(rank, entry, part, shapes[part.hf_name])
    for name, tensor in shapes.items():
        rectangles = found.get(name, {})
        covered = sum(_area(tuple(stop - start for start, stop in spans)) for spans in rectangles)
        if covered != _area(tensor.shape):
            raise LayoutError(f"The trainer's ranks hold {covered} of the {_area(tensor.shape)} elements of {name}.")
    return {name: list(found[name].values()) for name in shapes}


def _area(lengths: tuple[int, ...]) -> int:
    total = 1
    for length in lengths:
        total *= length
    return total


def _source(rank: int, entry: ShardedParameter, part: Part, tensor: HfTensor) -> Source:
    height = part.rows[1] - part.rows[0]
    rows, columns = slice(part.row, part.row + height), slice(0, entry.matrix[1])
    here: _Rectangle = (rows,) if part.cols is None else (rows, columns)
    if entry.fp8:
        for own, other, own_size, other_size in zip(here, part.index, entry.matrix, tensor.shape, strict=True):
            ends = own.stop % TILE == 0 or (own.stop == own_size and other.stop == other_size)
            if own.start % TILE or other.start % TILE or not ends:
                raise LayoutError(
                    f"{part.hf_name}: elements {other.start} to {other.stop} of {other_size} lie at {own.start} to {own.stop} of "
                    f"{entry.name}, which cuts {TILE}-wide FP8 tiles: choose other training.parallel sizes."
                )
    return Source(rank, whole_model_name(entry.name, entry.layer, entry.expert), here, part.index)


def gather_hf(
    weights: Iterable[NamedWeight], tensors: Sequence[HfTensor], sources: Mapping[str, list[Source]], *, device: torch.device, root: int = 0
) -> Iterator[ExportedTensor]:
    """On ``root``: every tensor, an FP8 one followed by its scales. On other ranks: nothing, but they send while iterated.

    Every rank has to run the iterator to its end. ``device`` is where the tensors are put together.
    """
    rank, held = dist.get_rank(), {name: (weight, scale_inv) for name, weight, scale_inv in weights}
    for tensor in tensors:
        forms = [("", tensor.shape, _DTYPES[tensor.dtype])]
        if tensor.fp8:
            forms.append(("_scale_inv", scale_shape(*tensor.shape), torch.float32))
        for kind, (suffix, shape, dtype) in enumerate(forms):
            whole = torch.empty(shape, dtype=dtype, device=device) if rank == root else None
            for source in sources[tensor.name]:
                _move(held, source, kind == 1, whole, rank, root)
            if whole is not None:
                yield ExportedTensor(name=tensor.name + suffix, tensor=whole)


def held_pieces(
    weights: Iterable[NamedWeight], tensors: Sequence[HfTensor], layout: Sequence[ShardedParameter], rank: int
) -> Iterator[ExportedTensor]:
    """Every rectangle that ``rank`` holds, also those that others hold too, named by its place (``NAME[0:128, 0:256]``); its own memory.

    What of :func:`gather_hf` lies in the same place has to have the same bytes, see :func:`pieces_of`.
    """
    held, shapes = {name: (weight, scale_inv) for name, weight, scale_inv in weights}, {tensor.name: tensor for tensor in tensors}
    for entry in layout:
        for part in entry.parts:
            source = _source(rank, entry, part, shapes[part.hf_name])
            weight, scale_inv = held[source.parameter]
            yield ExportedTensor(name=piece_name(part.hf_name, source.there), tensor=weight[source.here])
            if scale_inv is not None:
                here, there = (tuple(_tiles(s) for s in area) for area in (source.here, source.there))
                yield ExportedTensor(name=piece_name(f"{part.hf_name}_scale_inv", there), tensor=scale_inv[here])


def pieces_of(whole: Mapping[str, torch.Tensor], names: Iterable[str]) -> Iterator[ExportedTensor]:
    """The rectangles of whole tensors that :func:`held_pieces` named, as views."""
    for name in names:
        tensor, _, place = name[:-1].partition("[")
        area = tuple(slice(*map(int, span.split(":"))) for span in place.split(", "))
        yield ExportedTensor(name=name, tensor=whole[tensor][area])


def piece_name(tensor: str, area: _Rectangle) -> str:
    """A rectangle by tensor and place."""
    return f"{tensor}[{', '.join(f'{span.start}:{span.stop}' for span in area)}]"


def _move(held: Mapping[str, tuple], source: Source, scales: bool, whole: torch.Tensor | None, rank: int, root: int) -> None:
    if rank not in (source.rank, root):
        return
    here, there = (tuple(_tiles(s) if scales else s for s in area) for area in (source.here, source.there))
    target = None if whole is None else _bytes(whole)[_byte_columns(there, whole)]
    if rank == source.rank:
        piece = _bytes(held[source.parameter][1 if scales else 0][here].contiguous())
        if target is None:
            dist.send(piece, root)
        else:
            target.copy_(piece)
    elif target is not None:
        piece = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
        dist.recv(piece, source.rank)
        target.copy_(piece)


def _tiles(elements: slice) -> slice:
    return slice(elements.start // TILE, -(-elements.stop // TILE))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as uint8, its last axis as many times longer as an element has bytes."""
    return tensor.view(torch.uint8)


def _byte_columns(area: _Rectangle, tensor: torch.Tensor) -> _Rectangle:
    size = tensor.element_size()
    return (*area[:-1], slice(area[-1].start * size, area[-1].stop * size))
