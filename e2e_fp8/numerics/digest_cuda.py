"""Lane sums of digests on CUDA: Triton kernels over a table of all tensors at once. Imported on first use.

The table has one row for each piece of memory (a tensor, or the ragged last bytes of one); a second table says which piece each
block of the grid works on. Pieces are grouped by what their loads may assume, one launch a group: whole blocks in vector loads
of 16 bytes without a mask (nearly all bytes of a model), the rest of those, aligned words, narrow rows (many rows a block), and
bytes. Blocks add their sums atomically.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from e2e_fp8.errors import UserError
from e2e_fp8.numerics.digest import A_KEY, A_MUL, B_KEY, B_MUL, WORD_BYTES, Rows

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise UserError("Digests of CUDA tensors need Triton, which is not installed: install it, or set sync.receipt to false.") from error

_A_KEY, _A_MUL0, _A_MUL1 = (tl.constexpr(c) for c in (A_KEY, *A_MUL))
_B_KEY, _B_MUL0, _B_MUL1 = (tl.constexpr(c) for c in (B_KEY, *B_MUL))
_FIELDS = tl.constexpr(7)
_ROW_UNITS, _ROWS = 2, 3
"""The table is int64: address, distance of rows, length of a row (both in words, or in bytes for the byte kernel), rows, first
word's position in its tensor, slot of the sums, first block."""

_WIDE, _NARROW, _BYTES = (1, 8192), (128, 64), 1024
"""Words a block works on: (rows, words of a row), or words."""
_WARPS = 8


@triton.jit
def _add_lanes(word, index, mask, MASKED: tl.constexpr, sums_ptr, slot):
    """Add the mixed words (where ``mask`` is set) to the two sums of ``slot``; ``word`` and ``index`` are uint32 blocks."""
    a = word ^ (index * _A_KEY)
    a = (a ^ (a >> 16)) * _A_MUL0
    a = (a ^ (a >> 15)) * _A_MUL1
    a = a ^ (a >> 16)
    b = word + index * _B_KEY
    b = (b ^ (b >> 16)) * _B_MUL0
    b = (b ^ (b >> 13)) * _B_MUL1
    b = b ^ (b >> 16)
    if MASKED:
        a = tl.where(mask, a, 0)
        b = tl.where(mask, b, 0)
    tl.atomic_add(sums_ptr + 2 * slot, tl.sum(a.to(tl.int32, bitcast=True)), sem="relaxed")
    tl.atomic_add(sums_ptr + 2 * slot + 1, tl.sum(b.to(tl.int32, bitcast=True)), sem="relaxed")


@triton.jit
def _sum_words(table_ptr, piece_ptr, sums_ptr, R: tl.constexpr, C: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr):
    """One block of R rows by C words; with VECTOR, addresses, strides and row lengths are multiples of 16 bytes; without MASKED,
    rows and their words are multiples of R and C."""
    pid = tl.program_id(0)
    entry = table_ptr + tl.load(piece_ptr + pid) * _FIELDS
    address = tl.load(entry)
    row_stride = tl.load(entry + 1)
    row_words = tl.load(entry + 2)
    rows = tl.load(entry + 3)
    first_word = tl.load(entry + 4)
    slot = tl.load(entry + 5)
    block = pid - tl.load(entry + 6)
    if VECTOR:
        row_stride = tl.multiple_of(row_stride, 4)
        row_words = tl.multiple_of(row_words, 4)
    across = (row_words + C - 1) // C
    row = (block // across) * R
    column = (block % across) * C
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    base = address.to(tl.pointer_type(tl.uint32))
    if VECTOR:
        base = tl.multiple_of(base, 16)
    mask = (row + r < rows) & (column + c < row_words)
    pointers = base + (row * row_stride + column) + r * row_stride + c
    word = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    start = (first_word + row * row_words + column).to(tl.uint32)
    index = start + r.to(tl.uint32) * row_words.to(tl.uint32) + c.to(tl.uint32)
    _add_lanes(word, index, mask, MASKED, sums_ptr, slot)


@triton.jit
def _sum_bytes(table_ptr, piece_ptr, sums_ptr, BLOCK: tl.constexpr):
    """One block of words put together from bytes: rows of any length at any address."""
    pid = tl.program_id(0)
    entry = table_ptr + tl.load(piece_ptr + pid) * _FIELDS
    address = tl.load(entry)
    row_stride = tl.load(entry + 1)
    row_bytes = tl.load(entry + 2)
    num_bytes = row_bytes * tl.load(entry + 3)
    first_word = tl.load(entry + 4)
    slot = tl.load(entry + 5)
    block = pid - tl.load(entry + 6)
    local = block * BLOCK + tl.arange(0, BLOCK)
    base = address.to(tl.pointer_type(tl.uint8))
    word = tl.zeros([BLOCK], dtype=tl.uint32)
    for byte in tl.static_range(4):
        position = local * 4 + byte
        row = position // row_bytes
        value = tl.load(base + row * row_stride + (position - row * row_bytes), mask=position < num_bytes, other=0)
        word = word | (value.to(tl.uint32) << (8 * byte))
    _add_lanes(word, (first_word + local).to(tl.uint32), local * 4 < num_bytes, True, sums_ptr, slot)


def prepared_sums(described: Sequence[Rows], device: torch.device) -> Callable[[], Callable[[], np.ndarray]]:
    """Each call starts, on the current stream, what the call of its result waits for: uint32 ``[len(described), 2]``, the sums of both
    lanes of each. The memory must be alive meanwhile; start again only after that wait."""
    on_gpu = device.type == "cuda"
    sums = torch.zeros(len(described), 2, dtype=torch.int32, device=device)
    found = torch.empty(len(described), 2, dtype=torch.int32, pin_memory=on_gpu)
    # The guard makes the tensors' device the one that Triton launches on.
    guard = torch.cuda.device(device) if on_gpu else torch.no_grad()
    with guard:
        launches = [prepared(kind, pieces, sums) for kind, pieces in _grouped(described).items()]
        if on_gpu:
            # Tables and zeros come from this stream; a later one that starts the kernels does not wait for it.
            torch.cuda.current_stream().synchronize()

    def start() -> Callable[[], np.ndarray]:
        with guard:
            sums.zero_()
            for launch in launches:
                launch()
            found.copy_(sums, non_blocking=True)
            over = torch.cuda.current_stream().record_event() if on_gpu else None

        def lane_sums() -> np.ndarray:
            if over is not None:
                over.synchronize()
            return found.numpy().view(np.uint32)

        return lane_sums

    return start


def _grouped(described: Sequence[Rows]) -> dict[str, list[tuple[int, ...]]]:
    """Rows of the table, without the last column, by what their loads may assume."""
    groups: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in ("full", "vector", "words", "narrow", "bytes")}
    for slot, tensor in enumerate(described):
        address, alignment, words = tensor.address, tensor.alignment, tensor.row_bytes // WORD_BYTES
        if tensor.num_bytes == 0:
            continue
        if alignment == 1:
            groups["bytes"].append((address, tensor.row_stride, tensor.row_bytes, tensor.rows, 0, slot))
        elif tensor.rows == 1:
            _split(groups, address, tensor.row_bytes, "vector" if alignment == 16 else "words", slot)
        else:
            kind = "narrow" if words <= _WIDE[1] // 8 else "vector" if alignment == 16 else "words"
            if kind == "vector" and words % _WIDE[1] == 0:
                kind = "full"
            groups[kind].append((address, tensor.row_stride // WORD_BYTES, words, tensor.rows, 0, slot))
    return {kind: pieces for kind, pieces in groups.items() if pieces}


def _split(groups: dict[str, list[tuple[int, ...]]], address: int, num_bytes: int, kind: str, slot: int) -> None:
    """One aligned run of bytes as whole blocks, the rest that loads of its kind can take, and the last bytes."""
    block_bytes, load_bytes = WORD_BYTES * _WIDE[1], 16 if kind == "vector" else WORD_BYTES
    done = num_bytes - num_bytes % block_bytes if kind == "vector" else 0
    for part, end in (("full", done), (kind, num_bytes - num_bytes % load_bytes)):
        start = 0 if part == "full" else done
        if end > start:
            words = (end - start) // WORD_BYTES
            groups[part].append((address + start, words, words, 1, start // WORD_BYTES, slot))
    start = num_bytes - num_bytes % load_bytes
    if num_bytes > start:
        groups["bytes"].append((address + start, num_bytes - start, num_bytes - start, 1, start // WORD_BYTES, slot))


def prepared(kind: str, pieces: Sequence[tuple[int, ...]], sums: torch.Tensor) -> Callable[[], None]:
    """The launch of one kernel over all ``pieces`` of one kind, its tables on the device; each call adds to int32 ``sums``."""
    table = np.array(pieces, dtype=np.int64)
    rows, units = table[:, _ROWS], table[:, _ROW_UNITS]
    tile_rows, tile_words = _NARROW if kind == "narrow" else _WIDE
    in_tiles = -(-rows // tile_rows) * -(-units // tile_words)
    blocks = -(-rows * units // (WORD_BYTES * _BYTES)) if kind == "bytes" else in_tiles
    total = int(blocks.sum())
    entries = torch.from_numpy(np.column_stack([table, np.cumsum(blocks) - blocks])).to(sums.device)
    counts = torch.from_numpy(blocks).to(sums.device)
    piece_of_block = torch.repeat_interleave(torch.arange(len(pieces), device=sums.device), counts, output_size=total)
    kernel = _sum_bytes if kind == "bytes" else _sum_words
    options: dict[str, Any] = {"num_warps": _WARPS}
    if kind == "bytes":
        options["BLOCK"] = _BYTES
    else:
        options |= {"R": tile_rows, "C": tile_words, "VECTOR": kind in ("full", "vector"), "MASKED": kind != "full"}
    return lambda: kernel[(total,)](entries, piece_of_block, sums, **options)
