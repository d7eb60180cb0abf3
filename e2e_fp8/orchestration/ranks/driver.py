"""The trainer as rank 0 has it: one object that looks like an engine of one process and drives those of all ranks.

    rank 0: loop -> DrivingEngine -- order ------> ranks 1, 2, ...: Follower
                         |                               |
                    MegatronEngine <- collectives -> MegatronEngine

Rank 0 alone samples, rewards, corrects and logs, over all samples, so that nothing of it depends on how many ranks train. An order
carries all micro-batches; each data-parallel rank takes every n-th of them, log-probs come back to rank 0.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from e2e_fp8.config.root import Config
from e2e_fp8.observability.memory import GIB, resident_gib
from e2e_fp8.orchestration.ranks.channel import Order, RankChannel, batch_tensors
from e2e_fp8.orchestration.ranks.loss_recipe import PolicyLoss, SupervisedLoss, ValueLoss
from e2e_fp8.orchestration.ranks.meeting import hand_over
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.megatron_model import MegatronModel, select_ground
from e2e_fp8.training.microbatches import share_of
from e2e_fp8.training.parallel import start_torch_distributed, world_size
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import PackedBatch, ReplayCounts, StepReport, TokenStats

Role = Literal["policy", "reference", "critic"]


class DrivingModel[Readout](MegatronModel[Readout]):
    """What rank 0's policy, reference and critic share: whatever needs all ranks is told to the others before it starts here.

    Any method may raise RankError when a rank is gone.
    """

    channel: RankChannel
    role: Role

    def _tell(self, do: str, tensors: Sequence[torch.Tensor] = (), **more: Any) -> None:
        self.channel.tell({"do": do, "engine": self.role} | more, tensors)

    def _of_all[Found](
        self,
        do: str,
        batches: Sequence[PackedBatch],
        own: Callable[[Sequence[PackedBatch]], list[Found]],
        read: Callable[[torch.Tensor], Found],
    ) -> list[Found]:
        """``own`` of this rank's micro-batches and what the others answer for theirs, in order of ``batches``."""
        names, tensors = batch_tensors(batches)
        self._tell(do, tensors, batches=names)
        found: list[Found | None] = [None] * len(batches)
        data = self.grid.data
        # to the last answer: a rank whose answer is not taken hears no order
        with self.channel.guarded():
            found[::data] = own(share_of(batches, 0, data))
            for rank in range(1, self.grid.world):
                if answers_forward(self.grid, rank):
                    index = self.grid.place(rank).data
                    _, rows = self.channel.ask(rank)
                    found[index::data] = [read(row.to(self.device)) for row in rows]
        return [one for one in found if one is not None]

    def set_learning_rate(self, learning_rate: float) -> None:
        """As MegatronModel's."""
        self._tell("set_learning_rate", learning_rate=learning_rate)
        super().set_learning_rate(learning_rate)

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: Callable[[Readout, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]],
        denominator: float,
    ) -> StepReport:
        """As MegatronModel's, of all micro-batches of all data-parallel ranks.

        Raises:
            TypeError: the loss function cannot be named to the other ranks.
        """
        recipe: object = loss_fn
        if not isinstance(recipe, PolicyLoss | SupervisedLoss | ValueLoss):
            raise TypeError(f"{type(recipe).__name__} cannot be sent to other ranks; give a PolicyLoss, SupervisedLoss or ValueLoss")
        names, tensors = batch_tensors(batches)
        self._tell("train_step", tensors, batches=names, loss=recipe.to_json(), denominator=denominator)
        with self.channel.guarded():
            return super().train_step(share_of(batches, 0, self.grid.data), loss_fn, denominator)

    def restore(self, state: dict[str, Any], source: Literal["share", "policy"]) -> None:
        """Load ``state`` here, and on every other rank its own share read by ``read_shares``, or its own policy's state."""
        self._tell("restore", source=source)
        with self.channel.guarded():
            super().load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any], *, weights_only: bool = False) -> None:
        """Refused: the others have states of their own, see :meth:`restore`."""
        raise TypeError("of several ranks each loads its own state; call restore")


class DrivingCritic(DrivingModel[torch.Tensor], ValueEngine):
    """Rank 0's critic, on the ranks of ``channel``."""

    def __init__(self, cfg: Config, channel: RankChannel) -> None:
        """As ValueEngine."""
        self.channel, self.role = channel, "critic"
        self._tell("build")
        with channel.guarded():
            super().__init__(cfg)

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """As ValueEngine's, of all micro-batches of all data-parallel ranks, in order."""
        return self._of_all("values", batches, super().values, lambda row: row)

    def start_from(self, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As ValueEngine's; the others take those of their own policy."""
        self._tell("start_from")
        with self.channel.guarded():
            super().start_from(masters)


class DrivingEngine(DrivingModel[TokenStats], MegatronEngine):
    """Rank 0's policy, or its reference."""

    def __init__(self, cfg: Config, channel: RankChannel, role: Role = "policy") -> None:
        """As MegatronEngine."""
        self.channel, self.role = channel, role
        self._tell("build")
        with channel.guarded():
            super().__init__(cfg)

    def token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """As MegatronEngine's, of all micro-batches of all data-parallel ranks, in order."""
        return self._of_all("token_stats", batches, super().token_stats, _stats_from)

    def high_precision_token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """As MegatronEngine's, of all micro-batches of all data-parallel ranks, in order."""
        return self._of_all("high_precision_token_stats", batches, super().high_precision_token_stats, _stats_from)

    def read_shares(self, root: Path, step: int) -> None:
        """Have every other rank read its share of a checkpoint.

        Raises:
            CheckpointError: a share is missing or damaged.
        """
        self._tell("read_share", root=str(root.resolve()), step=step)
        self.channel.ask_all()

    def write_shares(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Have every other rank write its share into ``folder``; size and digest of each file by name.

        Raises:
            CheckpointError: a share could not be written.
        """
        self._tell("write_share", folder=str(folder.resolve()))
        return {name: entry for answer in self.channel.ask_all() for name, entry in answer["files"].items()}

    def start_gathering(self) -> None:
        """The others send their weights from now on: run ``weight_sync.gathered`` to its end, then ask :meth:`held_digests`."""
        self._tell("gather")

    def start_publishing(self) -> None:
        """The others send what they hold straight into the engine's ranks: run ``weight_sync.publish_weights`` to its end."""
        self._tell("publish")

    def held_digests(self) -> list[dict[str, int]]:
        """Of every other rank, in order, the digests of the rectangles it holds (``export.gather.held_pieces``)."""
        return [answer["digests"] for answer in self.channel.ask_all()]

    def take_replay_counts(self) -> ReplayCounts | None:
        """As MegatronEngine's, of all ranks; tensor ranks that route the same tokens count each of them, in both counts."""
        counts = super().take_replay_counts()
        if counts is None:
            return None
        self._tell("take_replay_counts")
        for answer in self.channel.ask_all():
            for kind, total in (("changed", counts.changed), ("assigned", counts.assigned)):
                for layer, count in answer[kind].items():
                    total[int(layer)] = total.get(int(layer), 0.0) + count
        return counts

    def memory_of_ranks(self) -> list[float]:
        """GiB in use by every rank, in order: see :func:`trainer_gib`."""
        self._tell("weigh")
        return [trainer_gib(self.device), *(answer["gib"] for answer in self.channel.ask_all())]

    def start_census(self) -> None:
        """The others count the tiles of the next update too. Collective: iterate ``named_masters`` next."""
        self._tell("start_census")

    def end_census(self) -> list[Order]:
        """Counts of the others."""
        self._tell("end_census")
        return self.channel.ask_all()

    def close(self) -> None:
        """Let the others go and leave the process group; nothing when they can no longer be told."""
        if not self.channel.is_broken:
            self.channel.tell({"do": "stop"})
            self.channel.close()
            dist.destroy_process_group()


def _stats_from(row: torch.Tensor) -> TokenStats:
    return TokenStats(log_probs=row[0], entropy=row[1])


def answers_forward(grid: RankGrid, rank: int) -> bool:
    """Of the ranks that run the same micro-batches, the first one answers for all; rank 0 asks itself."""
    place = grid.place(rank)
    return place.tensor == 0 and place.context == 0 and place.pipeline == 0 and place.data > 0


def trainer_gib(device: torch.device) -> float:
    """What this rank's tensors take on its GPU, or its process of the host where it has none."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else resident_gib()


def lead(cfg: Config) -> DrivingEngine:
    """On rank 0 of several: meet the others, hand ``cfg`` over, build the trainer on all.

    Raises:
        RankError: the others do not come, or one ends.
    """
    hand_over(cfg)
    return DrivingEngine(cfg, connect(cfg, RankGrid.of(cfg.training.parallel, world_size())))


def connect(cfg: Config, grid: RankGrid) -> RankChannel:
    """torch.distributed over all ranks, and the channel. Collective."""
    ground = select_ground(cfg)
    with ground.scope():
        start_torch_distributed(grid, ground)
        return RankChannel()
