"""Ranks 1, 2, ... of the trainer: take orders of rank 0 until it says stop."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.config.beside import reference_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import UserError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.checkpoint_files import write_share
from e2e_fp8.orchestration.environment import seed_generators
from e2e_fp8.orchestration.ranks.channel import Order, batches_from, refusal
from e2e_fp8.orchestration.ranks.driver import answers_forward, connect, trainer_gib
from e2e_fp8.orchestration.ranks.loss_recipe import loss_from_json
from e2e_fp8.orchestration.weight_sync import gathered, held_digests, publish_weights
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.megatron_model import MegatronModel
from e2e_fp8.training.microbatches import share_of
from e2e_fp8.training.parallel import world_size
from e2e_fp8.training.tile_census import TileCensus, census_of
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import PackedBatch, TokenStats

Tensors = list[torch.Tensor]


class Follower:
    """One rank's engines, and what each order means for them."""

    def __init__(self, cfg: Config) -> None:
        """Collective."""
        self.cfg = cfg
        self.grid = RankGrid.of(cfg.training.parallel, world_size())
        self.channel = connect(cfg, self.grid)
        self.engines: dict[str, MegatronModel[Any]] = {}
        self._share: dict[str, Any] = {}
        """Read from a checkpoint and not loaded yet, by engine."""
        self._census: TileCensus | None = None

    def follow(self) -> None:
        """Until the order to stop. Whatever else ends this rank is told to the others.

        Raises:
            RankError: rank 0 or another rank is gone.
        """
        try:
            self._follow()
        except BaseException as error:
            self.channel.part(error)
            raise
        self.channel.close()

    def _follow(self) -> None:
        while True:
            order, tensors = self.channel.hear()
            if order["do"] == "stop":
                return
            with self.channel.guarded():
                getattr(self, f"_do_{order['do']}")(order, tensors)

    def _policy(self, order: Order) -> MegatronEngine:
        """The engine of an order that only the policy and its reference understand."""
        engine = self.engines[order["engine"]]
        assert isinstance(engine, MegatronEngine)
        return engine

    @property
    def _critic(self) -> ValueEngine:
        critic = self.engines["critic"]
        assert isinstance(critic, ValueEngine)
        return critic

    def _do_build(self, order: Order, tensors: Tensors) -> None:
        role = order["engine"]
        if role == "critic":
            self.engines[role] = ValueEngine(self.cfg)
        else:
            self.engines[role] = MegatronEngine(reference_config(self.cfg) if role == "reference" else self.cfg)
        seed_generators(self.cfg.run.seed)

    def _do_start_from(self, order: Order, tensors: Tensors) -> None:
        self._critic.start_from(self.engines["policy"].named_masters())

    def _do_token_stats(self, order: Order, tensors: Tensors) -> None:
        self._answer_forward(order, tensors, lambda batches: _rows(self._policy(order).token_stats(batches)))

    def _do_high_precision_token_stats(self, order: Order, tensors: Tensors) -> None:
        self._answer_forward(order, tensors, lambda batches: _rows(self._policy(order).high_precision_token_stats(batches)))

    def _do_values(self, order: Order, tensors: Tensors) -> None:
        self._answer_forward(order, tensors, self._critic.values)

    def _answer_forward(self, order: Order, tensors: Tensors, own: Callable[[list[PackedBatch]], list[torch.Tensor]]) -> None:
        rows = own(share_of(batches_from(order["batches"], tensors), self.place.data, self.grid.data))
        if answers_forward(self.grid, self.channel.rank):
            self.channel.answer({}, rows)

    @property
    def place(self) -> Any:
        """Coordinates of this rank."""
        return self.grid.place(self.channel.rank)

    def _do_set_learning_rate(self, order: Order, tensors: Tensors) -> None:
        self.engines[order["engine"]].set_learning_rate(order["learning_rate"])

    def _do_train_step(self, order: Order, tensors: Tensors) -> None:
        batches = share_of(batches_from(order["batches"], tensors), self.place.data, self.grid.data)
        self.engines[order["engine"]].train_step(batches, loss_from_json(order["loss"]), order["denominator"])

    def _do_write_share(self, order: Order, tensors: Tensors) -> None:
        state = {name: engine.state_dict() for name, engine in self.engines.items()}
        self._answer(lambda: {"files": write_share(Path(order["folder"]), self.channel.rank, state)})

    def _do_read_share(self, order: Order, tensors: Tensors) -> None:
        def read() -> Order:
            self._share = CheckpointStore(Path(order["root"]), keep=1).load(order["step"], rank=self.channel.rank)
            return {}

        self._answer(read)

    def _answer(self, work: Callable[[], Order]) -> None:
        """The result of ``work``, or its sentence: work that other ranks do not take part in may fail on one of them alone."""
        try:
            found = work()
        except UserError as error:
            found = refusal(error)
        self.channel.answer(found)

    def _do_restore(self, order: Order, tensors: Tensors) -> None:
        name = order["engine"]
        state = self._share.pop(name) if order["source"] == "share" else self.engines["policy"].state_dict()
        self.engines[name].load_state_dict(state)

    def _do_gather(self, order: Order, tensors: Tensors) -> None:
        engine = self._policy(order)
        for _ in gathered(engine, self.cfg):
            pass
        if self.cfg.sync.receipt:
            self.channel.answer({"digests": held_digests(engine)})

    def _do_publish(self, order: Order, tensors: Tensors) -> None:
        publish_weights(self._policy(order), None, self.cfg)

    def _do_take_replay_counts(self, order: Order, tensors: Tensors) -> None:
        counts = self._policy(order).take_replay_counts()
        assert counts is not None
        self.channel.answer(asdict(counts))

    def _do_weigh(self, order: Order, tensors: Tensors) -> None:
        self.channel.answer({"gib": trainer_gib(self._policy(order).device)})

    def _do_start_census(self, order: Order, tensors: Tensors) -> None:
        self._census = census_of(self._policy(order), QuantizationPlan.from_config(self.cfg))
        self._census.__enter__()

    def _do_end_census(self, order: Order, tensors: Tensors) -> None:
        assert self._census is not None
        self._census.__exit__(None, None, None)
        self.channel.answer(self._census.counts())
        self._census = None


def _rows(stats: list[TokenStats]) -> list[torch.Tensor]:
    return [torch.stack([one.log_probs, one.entropy]) for one in stats]
