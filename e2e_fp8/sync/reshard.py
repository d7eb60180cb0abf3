"""Run a layout plan: pieces out of a trainer rank's tensors, pieces into an engine rank's parameters. Bytes move, nothing is cast.

A piece is a rectangle of weights and, under FP8, the rectangle of block scales that goes with it. They are moved
as integers of their size, so that no NaN is rewritten on the way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.plan import Copy, Plan

_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type in which tensors of each element size are moved."""


@dataclass(frozen=True)
class Piece:
    """One end of a copy: the bytes that leave, or their place."""

    copy: Copy
    data: torch.Tensor
    """Weights: ``[rows, cols]``, or ``[rows]`` for a vector; the dtype of ``copy``."""
    scale_inv: torch.Tensor | None
    """Block scales ``[tile rows, tile cols]``, float32, for FP8; None otherwise."""


def piece_names(copy: Copy) -> Iterator[str]:
    """What a receipt calls the weights of ``copy`` and, under FP8, its scales: ``parameter[expert][rows,columns]``."""
    expert = "" if copy.expert is None else f"[{copy.expert}]"
    forms = [(copy.target, copy.target_row, copy.target_col, copy.rows, copy.cols)]
    if copy.fp8:
        forms.append((scale_name(copy.target), *copy.tiles[2:]))
    for name, row, col, rows, cols in forms:
        yield f"{name}{expert}[{row}:{row + rows},{col}:{col + cols}]"


def outgoing(
    copies: Iterable[Copy], tensors: Sequence[Mapping[str, torch.Tensor]], scales: Sequence[Mapping[str, torch.Tensor]]
) -> Iterator[Piece]:
    """Pieces of ``copies`` as views of this rank's tensors; all copies must be from this rank.

    ``tensors`` has a mapping for each of the rank's model chunks (one without virtual pipelining) from Megatron's names, with E4M3
    codes for FP8 parameters; ``scales`` has their block scales under the same names, with or without the columns that Transformer
    Engine pads.

    Raises:
        LayoutError: a tensor or its scales are missing, or have another shape or dtype than the plan says.
    """
    for copy in copies:
        data = _rectangle(
            _named(tensors[copy.chunk], copy.source, "trainer's weights"), copy.source_row, copy.source_col, copy.rows, copy.cols
        )
        _check_dtype(copy, data, copy.source, "trainer")
        scale_inv = None
        if copy.fp8:
            row, col, _, _, rows, cols = copy.tiles
            scale_inv = _rectangle(_named(scales[copy.chunk], copy.source, "trainer's block scales"), row, col, rows, cols)
            if scale_inv.dtype != torch.float32:
                raise LayoutError(f"The trainer's block scales of {copy.source} are {scale_inv.dtype}, but float32 ones pass unchanged.")
        yield Piece(copy, data, scale_inv)


def places(copies: Iterable[Copy], parameters: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Where ``copies`` go, as views of an engine's live parameters (vLLM's names).

    Raises:
        LayoutError: a parameter or its scales are missing, or of another shape or dtype than the plan says.
    """
    for copy in copies:
        target = _of_expert(_named(parameters, copy.target, "engine's parameters"), copy.expert)
        data = _rectangle(target, copy.target_row, copy.target_col, copy.rows, copy.cols)
        _check_dtype(copy, data, copy.target, "engine")
        grid = None
        if copy.fp8:
            _, _, row, col, rows, cols = copy.tiles
            name = scale_name(copy.target)
            grid = _rectangle(_of_expert(_named(parameters, name, "engine's parameters"), copy.expert), row, col, rows, cols)
            if grid.dtype != torch.float32:
                raise LayoutError(f"The engine holds {name} as {grid.dtype}, but float32 block scales pass unchanged.")
        yield Piece(copy, data, grid)


def deliver(pieces: Iterable[Piece], parameters: Mapping[str, torch.Tensor]) -> int:
    """Write pieces into an engine's live parameters (vLLM's names) and return the bytes written.

    Raises:
        LayoutError: a parameter is missing or of another shape or dtype; what came before is written already.
    """
    written = 0
    for piece in pieces:
        (place,) = places([piece.copy], parameters)
        written += _write(place.data, piece.data)
        if piece.scale_inv is not None and place.scale_inv is not None:
            written += _write(place.scale_inv, piece.scale_inv)
    return written


def check_parameters(plan: Plan, target_rank: int, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutError unless every parameter of an engine rank, and its scales, has the shape that the plan fills."""
    for name, shard in plan.targets(target_rank).items():
        forms = [(name, shard.shape)] + ([(scale_name(name), shard.scale_shape)] if shard.fp8 else [])
        for form, shape in forms:
            found = tuple(_named(parameters, form, "engine's parameters").shape)
            if found != shape:
                raise LayoutError(
                    f"The engine holds {form} as {list(found)}, but the layout plan fills {list(shape)}: it was repacked after loading, "
                    "or the engine has other parallel sizes."
                )


def fill_padding(plan: Plan, target_rank: int, parameters: Mapping[str, torch.Tensor]) -> None:
    """Zero the rows of an engine rank that no tensor fills. Raises LayoutError when a parameter is missing."""
    for fill in plan.fills(target_rank):
        _named(parameters, fill.target, "engine's parameters").detach()[fill.row : fill.row + fill.rows].zero_()


def _named(tensors: Mapping[str, torch.Tensor], name: str, side: str) -> torch.Tensor:
    if name not in tensors:
        raise LayoutError(f"{name} is named by the layout plan but missing from the {side}: the model or the version is another one.")
    return tensors[name].detach()


def _of_expert(tensor: torch.Tensor, expert: int | None) -> torch.Tensor:
    return tensor if expert is None else tensor[expert]


def _rectangle(tensor: torch.Tensor, row: int, col: int, rows: int, cols: int) -> torch.Tensor:
    """A view; a vector is a matrix of one column. Raises LayoutError when the tensor is too small."""
    height, width = (*tensor.shape, 1)[:2]
    if tensor.dim() > 2 or row + rows > height or col + cols > width:
        raise LayoutError(
            f"A tensor has shape {tuple(tensor.shape)}, but the layout plan needs rows to {row + rows} and columns to {col + cols}."
        )
    return tensor[row : row + rows] if tensor.dim() == 1 else tensor[row : row + rows, col : col + cols]


def _check_dtype(copy: Copy, tensor: torch.Tensor, name: str, side: str) -> None:
    if tensor.dtype != _DTYPES[copy.dtype]:
        raise LayoutError(f"The {side} holds {name} as {tensor.dtype}, but its bytes pass as {copy.dtype}: nothing is converted silently.")


def _write(target: torch.Tensor, source: torch.Tensor) -> int:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise LayoutError(f"A piece is {source.dtype} {tuple(source.shape)}, but its place is {target.dtype} {tuple(target.shape)}.")
    carrier = CARRIERS[source.element_size()]
    target.view(carrier).copy_(source.view(carrier))
    return source.numel() * source.element_size()
