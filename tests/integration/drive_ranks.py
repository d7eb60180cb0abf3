"""What a rank of a driven trainer does in a test: rank 0 goes through the list ``drive`` of its case, the others follow.

["stats"]                log-probs of all micro-batches: log_probs.safetensors
["train", N]             N optimizer steps of the policy loss: appended to reports.json
["warm"]                 one supervised step
["weigh", RANK]          what memory_metrics says while that rank holds HEAVY_MIB more: memory.json
["save", STEP]           a checkpoint
["resume", RUN, STEP]    from the checkpoint of another job
["critic", N]            a critic from the policy's weights unless there is one, its values, N optimizer steps of it, its values again:
                         critic.safetensors, appended to critic.json
["reference"]            a frozen second engine, whose log-probs go to reference.safetensors
["whole", NAME]          gathered and checked tensors, and masters put together from the newest checkpoint
["weights", RUN]         the weights alone, in one process
["die", RANK]            that rank is killed inside its next optimizer step
["full_disk", RANK]      that rank can write no more than a few bytes a file
["die_before_commit", STEP]  rank 0 is killed when all shares of the checkpoint are written and its own is not
["tear", RANK]           one bit of that rank's weights flips
["bug", RANK]            that rank's next optimizer step raises a KeyError
["cross", A, B]          in their next optimizer step these two wait for each other, which the end of no other rank interrupts
"""

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, RankError
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.critic import update_critic
from e2e_fp8.orchestration.memory_probe import memory_metrics
from e2e_fp8.orchestration.ranks import follower
from e2e_fp8.orchestration.ranks.driver import DrivingEngine, lead
from e2e_fp8.orchestration.ranks.loss_recipe import PolicyLoss, SupervisedLoss
from e2e_fp8.orchestration.ranks.meeting import take_over
from e2e_fp8.orchestration.ranks.shares import whole_masters
from e2e_fp8.orchestration.session import Session
from e2e_fp8.orchestration.weight_sync import exported_tensors
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.parallel import world_size
from e2e_fp8.types import PackedBatch
from e2e_fp8.update.aggregation import loss_denominator

HEAVY_MIB = 600
_kept = b""


def drive(case: dict[str, Any], out: Path) -> None:
    if int(os.environ["RANK"]):
        arm(case)
        return follower.Follower(take_over()).follow()
    cfg = Config.model_validate(case["config"])
    engine = lead(cfg) if world_size() > 1 else MegatronEngine(cfg)
    session = Session(cfg=cfg, task=None, trainer=engine, model_dir=out)  # type: ignore[arg-type]
    engine.set_learning_rate(case["learning_rate"])
    last_wish = (out / "last_wish").touch
    session.on_lost_rank(last_wish)
    driver = Driver(session, policy_batches(case, cfg), out, case["learning_rate"])
    arm(case)
    try:
        for name, *words in case["drive"]:
            getattr(driver, name)(*words)
    except BaseException as error:
        session.part(error)
        if isinstance(error, RankError):
            last_wish()
        raise
    if isinstance(engine, DrivingEngine):
        engine.close()


def arm(case: dict[str, Any]) -> None:
    """What is to go wrong on this rank."""
    arms = {"die": arm_death, "full_disk": arm_full_disk, "tear": arm_tear, "weigh": arm_weight, "bug": arm_bug}
    rank = int(os.environ["RANK"])
    for name, *words in case["drive"]:
        if name in arms and words == [rank]:
            arms[name]()
        if name == "cross" and rank in words:
            arm_cross(sum(words) - rank)


def arm_death() -> None:
    def dying(self: MegatronEngine, *rest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    MegatronEngine._accumulate_gradients = dying


def arm_bug() -> None:
    def failing(self: MegatronEngine, *rest: Any) -> Any:
        return {}["nothing of this name"]

    MegatronEngine._accumulate_gradients = failing


def arm_cross(other: int) -> None:
    def waiting(self: MegatronEngine, *rest: Any) -> Any:
        dist.recv(torch.zeros(1), other)

    MegatronEngine._accumulate_gradients = waiting


def arm_full_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def arm_weight() -> None:
    global _kept
    _kept = bytes([1]) * (HEAVY_MIB << 20)


def arm_tear() -> None:
    gather = follower.Follower._do_gather

    def torn(self: follower.Follower, *order: Any) -> None:
        *_, (_, weight, _) = self.engines["policy"].named_local_weights()
        weight.view(torch.int16).view(-1)[0] ^= 1
        gather(self, *order)

    follower.Follower._do_gather = torn


def policy_batches(case: dict[str, Any], cfg: Config) -> list[PackedBatch]:
    """Random micro-batches with everything that a policy loss may read."""
    from rank_process import batches_of

    generator, found = torch.Generator().manual_seed(case["seed"] + 1), []
    for batch in batches_of(case, cfg):
        drawn = [torch.rand(batch.loss_mask.shape, generator=generator) for _ in range(4)]
        found.append(
            replace(
                batch,
                advantages=(drawn[0] - 0.5) * batch.loss_mask,
                rollout_log_probs=-4.0 - drawn[1] * batch.loss_mask,
                importance_weights=drawn[2] + 0.5,
                keep_mask=(drawn[3] > 0.1).float(),
            )
        )
    return found


def with_returns(batches: list[PackedBatch]) -> list[PackedBatch]:
    """Random returns; the values before the update are far off, so that some are clipped."""
    generator, found = torch.Generator().manual_seed(3), []
    for batch in batches:
        returns, values = (torch.randn(batch.loss_mask.shape, generator=generator) * batch.loss_mask for _ in range(2))
        found.append(replace(batch, returns=returns, values=values))
    return found


class Driver:
    def __init__(self, session: Session, batches: list[PackedBatch], out: Path, learning_rate: float) -> None:
        self.session, self.batches, self.out, self.learning_rate = session, batches, out, learning_rate
        self.engine, self.cfg = session.trainer, session.cfg
        self.store = CheckpointStore(out / "checkpoints", keep=9)
        self.reports: list[dict[str, float]] = []
        self.critic_reports: list[dict[str, float]] = []

    def stats(self) -> None:
        found = self.engine.token_stats(self.batches)
        kept = {f"log_probs/{i}": s.log_probs for i, s in enumerate(found)} | {f"entropy/{i}": s.entropy for i, s in enumerate(found)}
        save_file(kept, self.out / "log_probs.safetensors")
        self.batches = [replace(b, old_log_probs=s.log_probs * b.loss_mask) for b, s in zip(self.batches, found, strict=True)]

    def train(self, steps: int) -> None:
        loss = PolicyLoss(objective=self.cfg.objective, correction=self.cfg.correction, max_response_tokens=8)
        denominator = loss_denominator(self.batches, self.cfg.objective.loss_agg_mode)
        for _ in range(steps):
            with self.session.census() as census:
                report = self.engine.train_step(self.batches, loss, denominator)
            self.reports.append(report.metrics | {"grad_norm": report.grad_norm} | census.record())
        (self.out / "reports.json").write_text(json.dumps(self.reports))

    def warm(self) -> None:
        self.engine.train_step(self.batches, SupervisedLoss(), float(sum(b.loss_mask.sum() for b in self.batches)))

    def weigh(self, rank: int) -> None:
        assert isinstance(self.engine, DrivingEngine)
        found = {"ranks": self.engine.memory_of_ranks(), "record": memory_metrics(self.session)}
        (self.out / "memory.json").write_text(json.dumps(found))

    def save(self, step: int) -> None:
        try:
            self.store.save(step, self.session.state_dict() | {"global_step": step}, self.session.write_shares)
        except CheckpointError as error:
            (self.out / "not_saved").write_text(str(error))

    def resume(self, run: str, step: int) -> None:
        store = CheckpointStore(Path(run) / "checkpoints", keep=9)
        state = store.load(step)
        self.session.restore(state, store, step)
        if "critic" in state:
            self.session.make_critic(state["critic"])

    def critic(self, steps: int) -> None:
        if self.session.critic is None:
            self.session.make_critic(None)
        critic = self.session.critic
        assert critic is not None
        of_critic = self.cfg.objective.critic.model_copy(update={"learning_rate": self.learning_rate})
        cfg = self.cfg.model_copy(update={"objective": self.cfg.objective.model_copy(update={"critic": of_critic})})
        found, batches = {f"before/{i}": v.cpu() for i, v in enumerate(critic.values(self.batches))}, with_returns(self.batches)
        self.critic_reports += [update_critic(critic, [batches], cfg) for _ in range(steps)]
        found |= {f"after/{i}": v.cpu() for i, v in enumerate(critic.values(self.batches))}
        save_file(found, self.out / "critic.safetensors")
        (self.out / "critic.json").write_text(json.dumps(self.critic_reports))

    def reference(self) -> None:
        self.session.make_reference()
        assert self.session.reference is not None
        found = self.session.reference.token_stats(self.batches)
        save_file({f"log_probs/{i}": s.log_probs for i, s in enumerate(found)}, self.out / "reference.safetensors")

    def whole(self, name: str) -> None:
        step = self.store.latest()
        assert step is not None
        masters = whole_masters(self.store, step, self.store.load(step), self.cfg)
        gathered = {f"gathered/{t.name}": t.tensor.clone() for t in exported_tensors(self.engine, self.cfg)}
        save_file(gathered | {f"master/{n}": m for n, m in masters.items()}, self.out / f"{name}.safetensors")

    def weights(self, run: str) -> None:
        self.session.load_weights(CheckpointStore(Path(run) / "checkpoints", keep=9))

    def die_before_commit(self, step: int) -> None:
        def write_and_die(folder: Path) -> dict[str, Any]:
            assert isinstance(self.engine, DrivingEngine)
            self.engine.write_shares(folder)
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

        self.store.save(step, self.session.state_dict(), write_and_die)

    def die(self, rank: int) -> None:
        """Armed on that rank."""

    def full_disk(self, rank: int) -> None:
        """Armed on that rank."""

    def tear(self, rank: int) -> None:
        """Armed on that rank."""

    def bug(self, rank: int) -> None:
        """Armed on that rank."""

    def cross(self, *ranks: int) -> None:
        """Armed on those ranks."""
