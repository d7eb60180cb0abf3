"""Causal attention on Hopper whose row keeps its bits in prefill, decode, chunks, cached prefixes and packed training: FlashAttention 3.

vLLM's build of it serves both sides, with one split of the keys. A row's sums then depend on how many keys a tile has, which the kernel
chooses by head width, causality, paging and the announced number of queries; at the head widths allowed here it is 128 for all causal calls
that announce enough of them. Loaded from vLLM's folder without importing vLLM. Imported on first use.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.errors import UserError

_LIBRARY = "_vllm_fa3_C"
HEAD_WIDTHS = "up to 64, or 97 to 128"
"""Head widths at which cached and packed keys are cut into the same tiles."""


def announced_queries(longest: int, width: int) -> int:
    """The longest run of queries as the kernel is told, so that it takes the same tile of keys for one query as for many.

    It drops causality for one query, and at a width of 64 takes a smaller tile of queries, with more keys, for up to 64 of them (times
    the query heads of a key/value head).
    """
    return max(longest, 2 if width > 64 else 129)


def fits_head_width(width: int) -> bool:
    """Whether the attention keeps a row's bits at this head width."""
    return width <= 64 or 96 < width <= 128


@functools.cache
def _forward() -> Any:
    """The operator, registered with torch by vLLM's library.

    Raises:
        UserError: vLLM is not installed, or without FlashAttention 3.
    """
    if not hasattr(getattr(torch.ops, _LIBRARY), "fwd"):
        found = importlib.util.find_spec("vllm")
        places = [] if found is None else [Path(place) / "vllm_flash_attn" for place in found.submodule_search_locations or ()]
        libraries = [library for place in places for library in place.glob(f"{_LIBRARY}*.so")]
        if not libraries:
            raise UserError(
                "The shared attention on a GPU is vLLM's FlashAttention 3, which is not installed: install vLLM beside the trainer, or set "
                "numerics.alignment_overrides.attention to native."
            )
        torch.ops.load_library(libraries[0])
    return getattr(torch.ops, _LIBRARY).fwd


def _attend(
    q_TND: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor | None],
    cached: tuple[torch.Tensor, torch.Tensor] | None,
    longest: tuple[int, int],
    softmax_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``starts`` are those of the queries and of packed keys, ``cached`` the lengths and the block table of cached ones."""
    if not fits_head_width(q_TND.shape[-1]):
        raise ValueError(f"The shared attention takes head widths {HEAD_WIDTHS}, not {q_TND.shape[-1]}.")
    lengths, block_table = (None, None) if cached is None else cached
    no_tensors = (None,) * 3
    attended, lse_NT, *_ = _forward()(
        q_TND, keys, values, None, None, None, out,  # new keys and values, absorbed queries
        *starts, None, None, lengths, announced_queries(longest[0], q_TND.shape[-1]), longest[1],  # starts of new keys, used queries
        block_table, None, None, *no_tensors, *no_tensors,  # cache index, left padding, rotary embedding, FP8 scales
        softmax_factor, True, -1, -1, 0.0, True,  # causal, window, soft cap, rotary order
        None, 1, None, 0, None,  # schedule, splits, packing of heads, free processors, sinks
        1, 0, None,  # context parallelism
    )  # fmt: skip
    return attended, lse_NT


def paged_attention(
    q_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_factor: float,
    max_query_len: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """As row_invariant.paged_attention."""
    longest = max_query_len, block_table.shape[1] * key_cache.shape[1]
    cached = seq_lens, block_table
    return _attend(q_TND, key_cache, value_cache, out, (query_start_loc, None), cached, longest, softmax_factor)[0]


def packed_attention(
    q_TND: torch.Tensor,
    k_UGD: torch.Tensor,
    v_UGD: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    softmax_factor: float,
    longest: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As row_invariant.packed_attention."""
    return _attend(q_TND, k_UGD, v_UGD, None, bounds, None, longest, softmax_factor)
