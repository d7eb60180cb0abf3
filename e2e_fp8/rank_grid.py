"""Where each rank of a Megatron job stands, and which rectangle of each Hugging Face tensor it holds. Pure arithmetic, no torch.

Megatron numbers ranks with the tensor index fastest, then data, then pipeline. Experts divide the same ranks anew: expert
tensor, expert, expert data, pipeline. Data index 0 (for experts: expert data index 0) is called the owner of a shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from e2e_fp8.errors import ConfigError

ROW_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose rows (out features) are divided over tensor ranks."""
COLUMN_SPLIT = ("o_proj", "down_proj")
"""Modules whose columns (in features) are divided over tensor ranks."""


class ParallelSizes(Protocol):
    """``training.parallel`` of the configuration."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def expert_tensor(self) -> int: ...
    @property
    def virtual_pipeline(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of one rank."""

    tensor: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Parallel sizes of one job of ``world`` ranks.

    Raises:
        ConfigError: ``world`` is not a multiple of what the sizes need.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    world: int = 1

    def __post_init__(self) -> None:
        dense, routed = self.tensor * self.pipeline, self.expert_tensor * self.expert * self.pipeline
        for size, fields in ((dense, "tensor x pipeline"), (routed, "expert_tensor x expert x pipeline")):
            if self.world % size:
                sizes = ", ".join(f"training.parallel.{name} {getattr(self, name)}" for name in fields.split(" x "))
                raise ConfigError(
                    f"The job has {self.world} ranks, which is not a multiple of {fields} = {size} ({sizes}): "
                    f"start {size} ranks or a multiple of it, or change these sizes."
                )

    @classmethod
    def of(cls, sizes: ParallelSizes, world: int) -> "RankGrid":
        """The grid of ``training.parallel`` on ``world`` ranks."""
        names = ("tensor", "pipeline", "expert", "expert_tensor", "virtual_pipeline")
        return cls(**{name: getattr(sizes, name) for name in names}, world=world)

    @property
    def data(self) -> int:
        """Data-parallel size outside experts."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of each expert."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    def place(self, rank: int) -> Place:
        """Coordinates of ``rank``."""
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        outer, expert_tensor = divmod(rank, self.expert_tensor)
        outer, expert = divmod(outer, self.expert)
        return Place(
            tensor=tensor,
            data=data,
            pipeline=pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
            expert_data=outer % self.expert_data,
        )

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Pipeline index that holds ``layer`` (from 0): chunks of layers go round the stages ``virtual_pipeline`` times."""
        return layer // (num_layers // (self.pipeline * self.virtual_pipeline)) % self.pipeline

    def owners(self, hf_name: str, num_layers: int, num_experts: int) -> list[int]:
        """Ranks that together hold the tensor ``hf_name`` (or its ``_scale_inv``) exactly once, in the order of its slices."""
        stage = self._stage(hf_name, num_layers)
        expert = expert_index(hf_name)
        if expert is not None:
            group = expert // (num_experts // self.expert)
            first = (stage * self.expert_data * self.expert + group) * self.expert_tensor
            return [first + index for index in range(self.expert_tensor)]
        first = stage * self.data * self.tensor
        return [first + index for index in range(self.tensor if split_axis(hf_name) is not None else 1)]

    def _stage(self, hf_name: str, num_layers: int) -> int:
        words = hf_name.split(".")
        if words[1] == "layers":
            return self.stage_of_layer(int(words[2]), num_layers)
        return 0 if words[1] == "embed_tokens" else self.pipeline - 1

    def rectangle(self, hf_name: str, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """Slices of the tensor ``hf_name`` of ``shape`` that ``rank`` holds, if it holds any of it."""
        axis, place = split_axis(hf_name), self.place(rank)
        whole = [slice(0, size) for size in shape]
        if axis is not None:
            routed = expert_index(hf_name) is not None
            index, count = (place.expert_tensor, self.expert_tensor) if routed else (place.tensor, self.tensor)
            width = shape[axis] // count
            whole[axis] = slice(index * width, (index + 1) * width)
        return tuple(whole)


def _module(hf_name: str) -> str:
    return hf_name.rpartition(".")[0].rpartition(".")[2]


def split_axis(hf_name: str) -> int | None:
    """0 or 1, the axis of a Hugging Face weight (or ``weight_scale_inv``) that tensor ranks divide; None if each holds all of it."""
    module = _module(hf_name)
    if module in ROW_SPLIT:
        return 0
    return 1 if module in COLUMN_SPLIT else None


def expert_index(hf_name: str) -> int | None:
    """Number of the expert that a Hugging Face tensor belongs to, or None."""
    _, found, rest = hf_name.partition(".experts.")
    return int(rest.partition(".")[0]) if found else None


def divided_sizes(sizes: ParallelSizes, model: "ModelSizes") -> Iterator[tuple[str, int, str, int]]:
    """``(model field, its value, parallel field, divisor)`` for every division that has to come out even."""
    yield "num_attention_heads", model.num_attention_heads, "tensor", sizes.tensor
    yield "num_key_value_heads", model.num_key_value_heads, "tensor", sizes.tensor
    yield "vocab_size", model.vocab_size, "tensor", sizes.tensor
    if model.is_moe:
        yield "moe_intermediate_size", model.moe_intermediate_size, "expert_tensor", sizes.expert_tensor
        yield "num_experts", model.num_experts, "expert", sizes.expert
    else:
        yield "intermediate_size", model.intermediate_size, "tensor", sizes.tensor
    chunks = sizes.pipeline * sizes.virtual_pipeline
    yield "num_hidden_layers", model.num_hidden_layers, "pipeline x training.parallel.virtual_pipeline", chunks


class ModelSizes(Protocol):
    """Sizes of the ``model`` section that parallelism divides."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def is_moe(self) -> bool: ...
