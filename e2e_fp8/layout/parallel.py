"""Parallel sizes of both sides and what a rank's number means in them."""

import math
from dataclasses import dataclass

from e2e_fp8.errors import LayoutError


@dataclass(frozen=True, slots=True)
class MegatronRank:
    """Coordinates of one trainer rank, each from 0. Data-parallel coordinates are left out: they hold the same parameters."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, kw_only=True)
class MegatronParallel:
    """Megatron's parallel sizes, in its rank order ``tp-cp-ep-dp-pp``.

    Raises LayoutError when the sizes do not fit each other.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    """Model chunks of one pipeline rank; None without interleaving."""
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor parallel size of the experts; None: that of the rest, as in Megatron."""
    context: int = 1
    data: int | None = None
    """Data parallel size of the dense part; None: the smallest that makes room for the expert sizes."""
    first_stage_layers: int | None = None
    """``num_layers_in_first_pipeline_stage``."""
    last_stage_layers: int | None = None
    vocab_multiple: int = 1
    """``make_vocab_size_divisible_by``: the vocabulary is padded to a multiple of this times ``tensor``."""

    def __post_init__(self) -> None:
        sizes = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context", "data", "vocab_multiple")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"Training {name} parallel size is {value}: use a whole number of at least 1.")
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise LayoutError("virtual_pipeline needs pipeline above 1, as in Megatron: leave it unset.")
        if self.stage_size % (self.expert * self.expert_tensor_size):
            raise LayoutError(
                f"Training expert {self.expert} x expert_tensor {self.expert_tensor_size} does not divide the {self.stage_size} ranks of a "
                "pipeline stage (tensor x context x data): change data."
            )

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of the experts."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        dense = self.tensor * self.context
        return math.lcm(dense, self.expert * self.expert_tensor_size) if self.data is None else dense * self.data

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.stage_size * self.pipeline

    def coordinates(self, rank: int) -> MegatronRank:
        """Where ``rank`` stands. Raises LayoutError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"Training rank {rank} does not exist: these sizes make ranks 0 to {self.world_size - 1}.")
        pipeline, within = divmod(rank, self.stage_size)
        expert_tensor = within % self.expert_tensor_size
        expert = within // self.expert_tensor_size % self.expert
        return MegatronRank(within % self.tensor, pipeline, expert, expert_tensor)

    def stage_layers(self, pipeline: int, layers: int) -> list[range]:
        """Layers of the whole model in each model chunk of pipeline rank ``pipeline``, from 0.

        Raises LayoutError when Megatron could not divide the layers so.
        """
        counts = self._layers_of_stages(layers)
        chunks = self.virtual_pipeline or 1
        if any(count % chunks for count in counts):
            raise LayoutError(f"virtual_pipeline {chunks} does not divide the layers of every stage {counts}: choose another.")
        per_round = sum(counts) // chunks
        before = sum(counts[:pipeline]) // chunks
        starts = [chunk * per_round + before for chunk in range(chunks)]
        return [range(start, start + counts[pipeline] // chunks) for start in starts]

    def _layers_of_stages(self, layers: int) -> list[int]:
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pipeline == 1:
            if first is not None or last is not None:
                raise LayoutError("first_stage_layers and last_stage_layers need pipeline above 1: leave them unset.")
            return [layers]
        ends = (first is not None) + (last is not None)
        middle, left = self.pipeline - ends, layers - (first or 0) - (last or 0)
        if left < 0 or (left % middle if middle else left):
            raise LayoutError(
                f"{layers} layers do not spread evenly over {self.pipeline} pipeline stages"
                + (f" ({first} in the first, {last} in the last): " if ends else ": ")
                + "set first_stage_layers and last_stage_layers so that the stages between get equal numbers."
            )
        return ([] if first is None else [first]) + [left // middle if middle else 0] * middle + ([] if last is None else [last])


@dataclass(frozen=True, slots=True)
class EngineRank:
    """Coordinates of one engine rank."""

    tensor: int
    expert: int
    """Rank within the experts' group: all ranks of one engine, tensor fastest."""


@dataclass(frozen=True, kw_only=True)
class EngineParallel:
    """vLLM's parallel sizes; ``replicas`` engines of ``data x tensor`` ranks each.

    With ``expert`` the experts are dealt out whole over the engine's ranks in order (``enable_expert_parallel``, linear
    placement); without, each is split by rows over all of them.
    """

    tensor: int = 1
    data: int = 1
    expert: bool = False
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "replicas"):
            if getattr(self, name) < 1:
                raise LayoutError(f"Rollout {name} size is {getattr(self, name)}: use a whole number of at least 1.")

    @property
    def engine_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor * self.data

    @property
    def world_size(self) -> int:
        """Engine ranks in all."""
        return self.engine_size * self.replicas

    @property
    def splits_shared_experts(self) -> bool:
        """False when vLLM replicates the shared experts: under expert parallelism over several data-parallel groups."""
        return not (self.expert and self.tensor > 1 and self.data > 1)

    def coordinates(self, rank: int) -> EngineRank:
        """Where ``rank`` stands. Raises LayoutError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"Rollout rank {rank} does not exist: these sizes make ranks 0 to {self.world_size - 1}.")
        return EngineRank(rank % self.tensor, rank % self.engine_size)
