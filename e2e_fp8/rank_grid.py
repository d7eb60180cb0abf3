"""Sizes of one Megatron job and where each of its ranks stands. Pure arithmetic, no torch.

Which rows and columns a rank holds is the layout's business; here are the data-parallel coordinates and the checks that name
configuration fields.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from e2e_fp8.errors import ConfigError
from e2e_fp8.layout.parallel import MegatronParallel


class ParallelSizes(Protocol):
    """``training.parallel`` of the configuration."""

    @property
    def tensor(self) -> int: ...
    @property
    def context(self) -> int: ...
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
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Parallel sizes of one job of ``world`` ranks.

    Raises:
        ConfigError: ``world`` is not a multiple of what the sizes need.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    world: int = 1

    def __post_init__(self) -> None:
        dense, routed = self.tensor * self.context * self.pipeline, self.expert_tensor * self.expert * self.pipeline
        for size, fields in ((dense, "tensor x context x pipeline"), (routed, "expert_tensor x expert x pipeline")):
            if self.world % size:
                sizes = ", ".join(f"training.parallel.{name} {getattr(self, name)}" for name in fields.split(" x "))
                ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
                raise ConfigError(
                    f"The job has {ranks}, which is not a multiple of {fields} = {size} ({sizes}): "
                    f"start {size} ranks or a multiple of it, or change these sizes."
                )

    @classmethod
    def of(cls, sizes: ParallelSizes, world: int) -> "RankGrid":
        """The grid of ``training.parallel`` on ``world`` ranks."""
        names = ("tensor", "context", "pipeline", "expert", "expert_tensor", "virtual_pipeline")
        return cls(**{name: getattr(sizes, name) for name in names}, world=world)

    @property
    def data(self) -> int:
        """Data-parallel size outside experts."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def layout(self) -> MegatronParallel:
        """The same sizes for the layout algebra."""
        return MegatronParallel(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual_pipeline if self.virtual_pipeline > 1 else None,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            context=self.context,
            data=self.data,
        )

    def place(self, rank: int) -> Place:
        """Coordinates of ``rank``."""
        found = self.layout.coordinates(rank)
        return Place(
            tensor=found.tensor,
            context=rank // self.tensor % self.context,
            data=rank // (self.tensor * self.context) % self.data,
            pipeline=found.pipeline,
            expert=found.expert,
            expert_tensor=found.expert_tensor,
        )


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
