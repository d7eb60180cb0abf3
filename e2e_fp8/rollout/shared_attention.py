"""Attention of vLLM's CPU platform in the operator that the trainer shares: prefill, decode, chunks and cached prefixes alike.

vLLM's scheduler, block tables and cache allocation stay; the implementation object of a layer becomes this class, which writes keys
and values into the same cache blocks (in a layout of its own) and reads each sequence back in token order. Shape legend: ``T`` tokens
of the step, ``N`` query heads, ``G`` key/value heads, ``D`` head width, ``S`` cached tokens of all sequences of the step.
"""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.row_invariant import causal_attention


class SharedCpuAttention(CPUAttentionBackendImpl):
    """A layer's attention; made from vLLM's own by :meth:`set`."""

    @classmethod
    def set(cls, impl: Any, *, shared: bool) -> None:
        """Make a layer's implementation this class, or vLLM's own again, in place.

        Raises:
            EngineError: it has a window, sinks, soft cap, slopes, a quantized cache or another attention type.
        """
        if not shared:
            if isinstance(impl, cls):
                impl.__class__ = CPUAttentionBackendImpl  # pyright: ignore[reportAttributeAccessIssue]
            return
        plain = (
            isinstance(impl, CPUAttentionBackendImpl)
            and impl.attn_type == AttentionType.DECODER
            and impl.sliding_window == -1
            and not impl.logits_soft_cap
            and impl.alibi_slopes is None
            and impl.sinks is None
            and impl.kv_sharing_target_layer_name is None
            and not impl.is_fp8_kv_cache
        )
        if not plain:
            raise EngineError(
                f"numerics.alignment asks for the shared attention, but {type(impl).__name__} has more than plain causal attention over an "
                "unquantized cache: set numerics.alignment_overrides.attention to native."
            )
        impl.__class__ = cls

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`CPUAttentionBackendImpl.forward`; ``query [T, N, D]``, ``key`` and ``value [T, G, D]``."""
        if attn_metadata is None:
            return output
        if output_scale is not None or output_block_scale is not None or not attn_metadata.causal:
            raise EngineError("The shared attention is causal and does not quantize its output.")
        tokens = attn_metadata.num_actual_tokens
        width = self.head_size
        bounds = attn_metadata.query_start_loc.long()
        counts, lengths = bounds[1:] - bounds[:-1], attn_metadata.seq_lens.long()[: len(bounds) - 1]
        cached_SG2D = _read(kv_cache, attn_metadata.block_table, lengths)
        first_key = (lengths.cumsum(0) - lengths).repeat_interleave(counts)
        # The queries of a sequence are its last tokens.
        positions = torch.arange(tokens) - (bounds[:-1] - lengths + counts).repeat_interleave(counts)
        out = causal_attention(query[:tokens], cached_SG2D[..., :width], cached_SG2D[..., width:], first_key, positions, self.scale)
        output.view(-1, self.num_heads, width)[:tokens] = out
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write ``key`` and ``value [T, G, D]`` side by side into their slots; vLLM calls this before :meth:`forward`."""
        slots, block_size = slot_mapping.long(), kv_cache.shape[2]
        kv_cache[slots // block_size, :, slots % block_size] = torch.cat([key[: len(slots)], value[: len(slots)]], dim=-1)


def _read(kv_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``[S, G, 2D]``: keys and values of every sequence, one after another, each in token order."""
    block_size = kv_cache.shape[2]
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    blocks = block_table[sequence, place // block_size].long()
    return kv_cache[blocks, :, place % block_size]
