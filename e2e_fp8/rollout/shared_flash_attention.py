"""Attention of vLLM's FlashAttention backend in the operator that the trainer shares: prefill, decode, chunks and cached prefixes alike.

vLLM's scheduler, block tables, cache layout and cache writes stay; the implementation object of a layer becomes this class, which reads
the same blocks. Shape legend: ``T`` tokens of the step, ``N`` query heads, ``G`` key/value heads, ``D`` head width.
"""

from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.row_invariant import paged_attention


class SharedFlashAttention(FlashAttentionImpl):
    """A layer's attention; made from vLLM's own by :meth:`set`."""

    @classmethod
    def set(cls, impl: Any, *, shared: bool) -> None:
        """Make a layer's implementation this class, or vLLM's own again, in place.

        Raises:
            EngineError: it has a window, sinks, soft cap, slopes, a quantized cache, several ranks or another attention type.
        """
        if not shared:
            if isinstance(impl, cls):
                impl.__class__ = FlashAttentionImpl  # pyright: ignore[reportAttributeAccessIssue]
            return
        plain = (
            isinstance(impl, FlashAttentionImpl)
            and impl.attn_type == AttentionType.DECODER
            and impl.sliding_window == (-1, -1)
            and not impl.logits_soft_cap
            and impl.alibi_slopes is None
            and impl.sinks is None
            and impl.kv_sharing_target_layer_name is None
            and not is_quantized_kv_cache(impl.kv_cache_dtype)
            and impl.dcp_world_size == 1
        )
        if not plain:
            raise EngineError(
                f"numerics.alignment asks for the shared attention, but {type(impl).__name__} is not FlashAttention, or has more than "
                "plain causal attention over an unquantized cache of one rank: set numerics.alignment_overrides.attention to native."
            )
        impl.__class__ = cls

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`FlashAttentionImpl.forward`; ``query [T, N, D]``, the cache ``[blocks, G, block size, 2 D]``, keys first."""
        if attn_metadata is None:
            # vLLM measures memory before there is a cache
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None or attn_metadata.causal is not True:
            raise EngineError("The shared attention is causal and does not quantize its output.")
        # Rows that pad the batch of a CUDA graph belong to no request: nothing writes them, and whatever they hold stays in its row.
        tokens = attn_metadata.num_actual_tokens
        halves = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        # one key/value head leaves a stride that FlashAttention 3's loads refuse
        key_cache, value_cache = (canonicalize_singleton_dim_strides(half) for half in halves)
        paged_attention(
            query[:tokens],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            attn_metadata.max_query_len,
            out=output.view(-1, self.num_heads, self.head_size)[:tokens],
        )
        return output
