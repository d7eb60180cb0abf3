"""Causal attention over packed sequences, put into Megatron's layers through the spec on both grounds.

Shape legend: ``T`` packed tokens, ``U`` packed keys (those of the same tokens, unless a rank has a part of them), ``S`` sequences, ``N``
query heads, ``G`` key/value heads, ``D`` head width, ``B`` sequences of one length, ``Q`` that length, ``K`` their keys.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.typed_torch import apply_module

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.row_invariant import rotary_table
from e2e_fp8.training.context_parallel import OneRank, SharedTokens
from e2e_fp8.training.shared_functions import SharedAttention, SharedRotary, SharedVarlenAttention


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Queries and keys of each packed sequence; the queries are its last tokens. Both are of the same tokens except on a rank that has a
    part of a sequence."""

    cu_queries: torch.Tensor
    """int32 ``[S + 1]``, on the device."""
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, params: PackedSeqParams) -> Self:
        """The boundaries of ``params``."""
        return cls(
            cu_queries=params.cu_seqlens_q,
            cu_keys=params.cu_seqlens_kv,
            max_queries=int(params.max_seqlen_q),
            max_keys=int(params.max_seqlen_kv),
        )

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        return tuple(zip(self.cu_queries.diff().tolist(), self.cu_keys.diff().tolist(), strict=True))

    def positions(self, tokens: int) -> torch.Tensor:
        """int64 ``[T]``: position of each query in its sequence."""
        before_S = self.cu_keys[1:] - self.cu_queries[1:]
        first_T = before_S.repeat_interleave(self.cu_queries.diff(), output_size=tokens)
        return torch.arange(tokens, device=self.cu_queries.device) + first_T


def sdpa_packed(q_TND: torch.Tensor, k_UGD: torch.Tensor, v_UGD: torch.Tensor, lengths: tuple[tuple[int, int], ...], softmax_factor: float):
    """Causal attention within each sequence by torch's scaled_dot_product_attention; sequences of equal lengths share one call.

    Args:
        lengths: queries and keys of each packed sequence, summing to T and U; the queries are its last tokens.
        softmax_factor: multiplies the query-key products, usually ``1 / sqrt(D)``.

    Returns:
        ``[T, N, D]`` in the dtype of ``q_TND``.
    """
    if len(set(lengths)) == 1:
        return _sdpa_equal(q_TND, k_UGD, v_UGD, len(lengths), lengths[0], softmax_factor)
    rows_by_length: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    first_query = first_key = 0
    for queries, keys in lengths:
        rows = (first_query + torch.arange(queries), first_key + torch.arange(keys))
        rows_by_length.setdefault((queries, keys), []).append(rows)
        first_query, first_key = first_query + queries, first_key + keys
    out_TND = torch.empty_like(q_TND)
    for length, rows in rows_by_length.items():
        queries, keys = (torch.cat(part) for part in zip(*rows, strict=True))
        part = _sdpa_equal(q_TND[queries], k_UGD[keys], v_UGD[keys], len(rows), length, softmax_factor)
        out_TND = out_TND.index_copy(0, queries, part)
    return out_TND


def _sdpa_equal(q_TND: torch.Tensor, k_UGD: torch.Tensor, v_UGD: torch.Tensor, count: int, length: tuple[int, int], softmax_factor: float):
    queries, keys = length
    q_BNQD = q_TND.view(count, queries, *q_TND.shape[1:]).transpose(1, 2)
    k_BGKD, v_BGKD = (t.view(count, keys, *t.shape[1:]).transpose(1, 2) for t in (k_UGD, v_UGD))
    whole = queries == keys
    out_BNQD = F.scaled_dot_product_attention(
        q_BNQD, k_BGKD, v_BGKD, is_causal=whole, scale=softmax_factor, enable_gqa=q_BNQD.size(1) != k_BGKD.size(1),
        # is_causal would align the first query with the first key
        attn_mask=None if whole else torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries),
    )  # fmt: skip
    return out_BNQD.transpose(1, 2).reshape(q_TND.shape)


def varlen_packed(q_TND: torch.Tensor, k_UGD: torch.Tensor, v_UGD: torch.Tensor, spans: Spans, softmax_factor: float):
    """The same by torch's variable-length flash attention (CUDA, BF16)."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q_TND.size(1) // k_UGD.size(1)
    if repeat > 1:
        k_UGD, v_UGD = (t.repeat_interleave(repeat, dim=1) for t in (k_UGD, v_UGD))
    bounds = spans.cu_queries, spans.cu_keys, spans.max_queries, spans.max_keys
    return varlen_attn(q_TND, k_UGD, v_UGD, *bounds, scale=softmax_factor, window_size=(-1, 0))


class PackedRotary(torch.nn.Module):
    """Rotary angles gathered to one per packed token, from Megatron's RotaryEmbedding.

    Megatron's ``thd`` path takes angles either per position of the longest sequence, looping over sequences, or per packed token.
    """

    def __init__(self, rotary: torch.nn.Module, *, applied_by_attention: bool = False) -> None:
        super().__init__()
        self.rotary = rotary
        self.applied_by_attention = applied_by_attention
        """Whether PackedAttention rotates queries and keys itself: Megatron is then given no angles."""
        self.positions_T: torch.Tensor | None = None
        """int64 ``[T]`` positions of the batch about to run, set by the engine."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Megatron's answer: the longest packed sequence."""
        return self.rotary.get_rotary_seq_len(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def forward(self, max_seq_len: int, **kwargs: Any) -> torch.Tensor | None:
        """Angles ``[T, 1, 1, D]`` in float32, or None."""
        if self.applied_by_attention:
            return None
        assert self.positions_T is not None
        return self.rotary(max_seq_len, **kwargs)[self.positions_T]


class EngineOrderSelfAttention(SelfAttention):
    """Megatron's self-attention with the rows of ``linear_qkv`` in the rollout engine's order: all q, then all k, then all v.

    Megatron interleaves them by query group. In the engine's order the trainer's FP8 tiles are the tiles of vLLM's ``qkv_proj``, so
    both can be one storage, and a head width below 128 cuts no tile as long as the q, k and v rows are multiples of 128.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pg_collection = copy.copy(self.pg_collection)
        self.pg_collection.cp = OneRank()  # pyright: ignore[reportAttributeAccessIssue]

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``hidden_states [T, 1, H]`` -> query ``[T, 1, N, D]``, key and value ``[T, 1, G, D]``, heads of this rank.

        Raises:
            ConfigError: an output gate, the fused rotary path, or fewer key/value heads than tensor-parallel ranks.
        """
        width = self.hidden_size_per_attention_head
        rows = [count * width for count in (self.num_attention_heads_per_partition, *[self.num_query_groups_per_partition] * 2)]
        if output_gate or not split_qkv or self.num_query_groups_per_partition * self.world_size != self.config.num_query_groups:
            raise ConfigError("The trainer's attention has no output gate, no fused rotary path and at least one key/value head a rank.")
        mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = mixed.split(rows, dim=-1)
        query, key, value = (t.unflatten(-1, (-1, width)) for t in (query, key, value))
        if self.q_layernorm is not None:
            query = apply_module(self.q_layernorm)(query)
        if self.k_layernorm is not None:
            key = apply_module(self.k_layernorm)(key)
        return query, key, value


@dataclass(frozen=True, kw_only=True)
class AttentionOperators:
    """Which operators PackedAttention shares with the engine."""

    shared_attention: bool = False
    shared_rotary: bool = False
    rotary_base: float = 0.0
    max_positions: int = 0

    @classmethod
    def of(cls, cfg: Config, choices: Mapping[str, str]) -> Self:
        """The choices of a ground."""
        return cls(
            shared_attention=choices["attention"] != "native",
            shared_rotary=choices["rotary"] != "native",
            rotary_base=cfg.model.rope_theta,
            max_positions=cfg.model.max_position_embeddings,
        )

    def rotate(self, query: torch.Tensor, key: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """``query [T, N, D]`` and ``key [T, G, D]`` turned by the angles of each token's position in its sequence."""
        positions_T = spans.positions(query.size(0))
        table = rotary_table(self.rotary_base, query.size(-1), self.max_positions, query.device if query.is_cuda else None)
        cos_Td, sin_Td = (values[positions_T] for values in table)
        return SharedRotary.apply(query, cos_Td, sin_Td), SharedRotary.apply(key, cos_Td, sin_Td)


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer; takes packed (``thd``) sequences only.

    Raises:
        ConfigError: the layer asks for attention dropout or a window, which this module does not do.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        operators: AttentionOperators | None = None,
        **unused: Any,
    ):
        super().__init__(config=config)
        if config.attention_dropout or config.window_size is not None:
            raise ConfigError("PackedAttention supports neither attention dropout nor a sliding window: set both off.")
        self.operators = operators or AttentionOperators()
        # Where the parity chain reads what attention sees.
        self.query_rotary, self.key_rotary = torch.nn.Identity(), torch.nn.Identity()
        self.softmax_factor = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """``query [T, N, D]``, ``key`` and ``value [T, G, D]`` of this rank's tokens -> ``[T, N * D]``."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed_seq_params in thd format.")
        spans = Spans.of(packed_seq_params)
        if self.operators.shared_rotary:
            query, key = self.operators.rotate(query, key, spans)
        query, key = self.query_rotary(query), self.key_rotary(key)
        if isinstance(packed_seq_params, SharedTokens):
            key, value = packed_seq_params.seen(key, value)
        if query.is_cuda:
            attend = SharedVarlenAttention.apply if self.operators.shared_attention else varlen_packed
            out = attend(query, key, value, spans, self.softmax_factor)
        elif self.operators.shared_attention:
            out = SharedAttention.apply(query, key, value, spans.lengths, self.softmax_factor, sdpa_packed)
        else:
            out = sdpa_packed(query, key, value, spans.lengths, self.softmax_factor)
        return out.reshape(out.size(0), -1)  # pyright: ignore[reportAttributeAccessIssue]
