"""Context parallelism: the ranks of a group take equal runs of a micro-batch's packed tokens through the model.

Attention alone looks at other tokens: there the keys and values of all ranks are gathered (Llama 3, arXiv 2407.21783, section 3.3.2).
Behind the head what was read of each token is gathered too, so that loss functions see whole sequences on every rank, and weights and
denominators of a loss do not depend on the size of the group. A rank's gradient is that of its own tokens; Megatron adds them up.

Shape legend: ``T`` packed tokens, ``t`` those of one rank, ``S`` sequences, ``s`` those with a token on this rank.
"""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from e2e_fp8.training.packing import check_boundaries
from e2e_fp8.types import PackedBatch


@dataclass(kw_only=True)
class SharedTokens(PackedSeqParams):
    """Megatron's description of one rank's tokens: queries are the rank's own, keys reach back to the start of their sequences."""

    context: "ContextParallel"
    keys: slice
    """The keys that the queries may see, in the packed tokens of all ranks."""

    def seen(self, key_tGD: torch.Tensor, value_tGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[keys, G, D]`` of all ranks; their gradients are added over the ranks. Collective."""
        width = key_tGD.size(-1)
        both = gather_from_sequence_parallel_region(torch.cat([key_tGD, value_tGD], dim=-1), group=self.context.group)
        key, value = both[self.keys].split([width, value_tGD.size(-1)], dim=-1)
        return key.contiguous(), value.contiguous()


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """One rank's place in the group that divides the tokens of a micro-batch."""

    rank: int
    size: int
    group: Any

    def rows(self, tokens: int) -> slice:
        """This rank's of ``tokens`` packed tokens, a multiple of the group's size."""
        share, rest = divmod(tokens, self.size)
        if rest:
            raise ValueError(f"{tokens} tokens are no multiple of {self.size} ranks")
        return slice(self.rank * share, (self.rank + 1) * share)

    def share(self, batch: PackedBatch) -> PackedBatch:
        """The rows of this rank; ``cu_seqlens`` stays that of all."""
        rows = self.rows(batch.token_ids.numel())
        values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "cu_seqlens"}
        return replace(batch, **{name: value[rows] for name, value in values.items() if value is not None})

    def layout(self, cu_seqlens: torch.Tensor) -> tuple[SharedTokens, torch.Tensor]:
        """As ``packing.packed_layout``, of this rank's tokens: Megatron's description, and int64 ``[t]`` positions; its errors."""
        bounds, device = [0, *itertools.accumulate(check_boundaries(cu_seqlens))], cu_seqlens.device
        rows = self.rows(bounds[-1])
        here = [(start, end) for start, end in itertools.pairwise(bounds) if start < rows.stop and end > rows.start]
        asked = [min(end, rows.stop) - max(start, rows.start) for start, end in here]
        seen = [min(end, rows.stop) - start for start, end in here]
        positions = [torch.arange(keys - queries, keys) for queries, keys in zip(asked, seen, strict=True)]
        one_segment = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        params = SharedTokens(
            context=self,
            keys=slice(here[0][0], rows.stop),
            qkv_format="thd",
            cu_seqlens_q=_bounds(asked, device),
            cu_seqlens_kv=_bounds(seen, device),
            cu_seqlens_q_padded=one_segment,
            cu_seqlens_kv_padded=one_segment,
            max_seqlen_q=max(asked),
            max_seqlen_kv=max(seen),
        )
        return params, torch.cat(positions).to(device)

    def whole(self, values_t: torch.Tensor) -> torch.Tensor:
        """Rows ``[T, ...]`` of all ranks, which all do the same with them: a rank's gradient is that of its own rows. Collective."""
        return gather_from_sequence_parallel_region(values_t, tensor_parallel_output_grad=False, group=self.group)


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


class OneRank:
    """What Megatron's rotary code asks of a context-parallel group, for angles that are already those of this rank's tokens."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0
