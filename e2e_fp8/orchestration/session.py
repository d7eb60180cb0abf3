"""Everything a run holds: task, trainer, engine, folder. Built once, closed once."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from e2e_fp8.config.beside import reference_config
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, EngineError
from e2e_fp8.export.policy_folder import checkpoint_writer
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.checkpoint import CheckpointStore, WriteShares
from e2e_fp8.orchestration.environment import prepare, seed_generators
from e2e_fp8.orchestration.episodes import generate_episodes
from e2e_fp8.orchestration.ranks.driver import DrivingCritic, DrivingEngine, lead
from e2e_fp8.orchestration.ranks.meeting import check_ranks
from e2e_fp8.orchestration.ranks.shares import check_same_ranks, grid_of, whole_masters
from e2e_fp8.orchestration.shadow_pass import ClipState
from e2e_fp8.orchestration.weight_sync import SyncReport, exported_tensors, publish_weights, sync_weights
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.server_engine import ServerEngine
from e2e_fp8.rollout.shared_engine import SharedVllmEngine, TrainerMemory
from e2e_fp8.tasks.dataset import Task, load_task
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.parallel import world_size
from e2e_fp8.training.tile_census import TileCensus, census_of
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import Prompt, Sample


def write_model_dir(cfg: Config, task: Task, model_dir: Path) -> None:
    """config.json (with the block-FP8 quantization_config when the engine runs FP8) and tokenizer, what vLLM starts from."""
    model_dir.mkdir(parents=True, exist_ok=True)
    quantization = None
    if cfg.numerics.rollout_precision == "fp8":
        quantization = QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)
    (model_dir / "config.json").write_text(json.dumps(hf_config_of(cfg, task, quantization), indent=2) + "\n")
    task.tokenizer.save(model_dir)


def hf_config_of(cfg: Config, task: Task, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of the policy, with the tokenizer's special tokens."""
    tokenizer = task.tokenizer
    return to_hf_config(cfg.model, quantization, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def load_task_for(cfg: Config) -> Task:
    """The task, with its tokenizer checked against the model's vocabulary."""
    task = load_task(cfg)
    if task.tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {cfg.model.vocab_size} but the tokenizer has {task.tokenizer.vocab_size} entries; "
            f"set model.vocab_size to {task.tokenizer.vocab_size} or more."
        )
    return task


@dataclass(kw_only=True)
class Session:
    """Trainer and engine of one process."""

    cfg: Config
    task: Task
    trainer: MegatronEngine
    model_dir: Path
    rollout: VllmEngine | ServerEngine | None = None
    reference: MegatronEngine | None = None
    """Frozen policy of the KL term; None when objective.kl_coef is 0."""
    clip_state: ClipState = field(default_factory=ClipState)
    """Of calibrated clipping, after the last finished update."""
    whole_pass_rate: float | None = None
    """Seconds a token of this process's last whole audit of old log-probs; None before it and after a difference: the next one is whole."""
    critic: ValueEngine | None = None
    """Value model; None without objective.advantage gae, and before RL starts."""

    def make_reference(self) -> None:
        """Freeze a second engine at the policy's present weights as the reference policy."""
        self._load_reference(self.trainer.state_dict(), "policy")

    def _load_reference(self, state: dict[str, Any], source: Literal["share", "policy"]) -> None:
        if isinstance(self.trainer, DrivingEngine):
            self.reference = DrivingEngine(reference_config(self.cfg), self.trainer.channel, "reference")
            self.reference.restore(state, source)
        else:
            self.reference = MegatronEngine(reference_config(self.cfg))
            self.reference.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the engines of this rank."""
        state: dict[str, Any] = {"trainer": self.trainer.state_dict()}
        if self.trainer.grid.world > 1:
            state["ranks"] = asdict(self.trainer.grid)
        if self.reference is not None:
            state["reference"] = self.reference.state_dict()
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
        return state

    @property
    def write_shares(self) -> WriteShares | None:
        """Has the trainer's other ranks write their part of a checkpoint; None when there are none."""
        return self.trainer.write_shares if isinstance(self.trainer, DrivingEngine) else None

    def restore(self, state: dict[str, Any], store: CheckpointStore, step: int) -> None:
        """Load the engines of all ranks from the checkpoint of ``step``, whose ``state`` this rank wrote.

        Raises:
            ConfigError: it was written by other ranks.
            CheckpointError: it does not fit the model, or the share of a rank is damaged.
        """
        check_same_ranks(state, self.trainer.grid)
        if isinstance(self.trainer, DrivingEngine):
            self.trainer.read_shares(store.root, step)
            self.trainer.restore(state["trainer"], "share")
        else:
            self.trainer.load_state_dict(state["trainer"])
        if state.get("reference") is not None:
            self._load_reference(state["reference"], "share")

    def load_weights(self, store: CheckpointStore) -> None:
        """The weights alone of the newest checkpoint, whatever ranks and ground wrote it; only in one process.

        Raises:
            CheckpointError: there is none, or every one is damaged or of another model.
        """
        state = store.load_latest()
        if grid_of(state).world == 1:
            self.trainer.load_state_dict(state["trainer"], weights_only=True)
            return
        self.trainer.load_hf_weights(whole_masters(store, int(state["global_step"]), state, self.cfg))
        self.trainer.policy_version = int(state["trainer"]["policy_version"])

    @contextmanager
    def census(self) -> Iterator[TileCensus]:
        """Counts the tiles of the optimizer steps inside, on all ranks; complete after the block."""
        trainer, plan = self.trainer, QuantizationPlan.from_config(self.cfg)
        if not isinstance(trainer, DrivingEngine):
            with census_of(trainer, plan) as census:
                yield census
            return
        trainer.start_census()
        with trainer.channel.guarded():
            census = census_of(trainer, plan)
        with census:
            yield census
        for counts in trainer.end_census():
            census.add_counts(counts)

    def make_critic(self, state: dict[str, Any] | None) -> None:
        """Build the critic: from its saved ``state``, or new from objective.critic.hf_path or the trainer's weights as they are now."""
        if isinstance(self.trainer, DrivingEngine):
            self.critic = DrivingCritic(self.cfg, self.trainer.channel)
        else:
            self.critic = ValueEngine(self.cfg)
        if isinstance(self.critic, DrivingCritic) and state is not None:
            self.critic.restore(state, "share")
        elif state is not None:
            self.critic.load_state_dict(state)
        elif self.cfg.objective.critic.hf_path is None:
            self.critic.start_from(self.trainer.named_masters())

    def start_rollout(self) -> VllmEngine | ServerEngine:
        """Start the engine on first use; it is slow to start and the warm start does not need it."""
        if self.rollout is None:
            tokenizer = self.task.tokenizer
            if self.cfg.rollout.placement == "server":
                writer = checkpoint_writer(self.model_dir)
                self.rollout = ServerEngine(self.cfg, self.model_dir, tokenizer.eos_token_id, tokenizer.decode, writer)
            elif self.cfg.sync.transport == "shared":
                memory = TrainerMemory(
                    tensors=lambda: exported_tensors(self.trainer, self.cfg), policy_version=lambda: self.trainer.policy_version
                )
                self.rollout = SharedVllmEngine(self.cfg, self.model_dir, tokenizer.eos_token_id, tokenizer.decode, memory)
            else:
                self.rollout = VllmEngine(self.cfg, self.model_dir, tokenizer.eos_token_id, tokenizer.decode)
        return self.rollout

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]:
        """Samples of the engine, in turns with tools where task.tools names some."""
        engine, cfg = self.start_rollout(), self.cfg
        if not self.task.tools:
            return engine.generate(prompts, group_size=group_size, seed=seed)
        return generate_episodes(
            engine,
            prompts,
            group_size=group_size,
            seed=seed,
            tools=self.task.tools,
            tokenizer=self.task.tokenizer,
            max_turns=cfg.task.tools.max_turns,
            max_result_tokens=cfg.task.tools.max_result_tokens,
            longest_prompt=cfg.rollout.max_model_len - cfg.rollout.max_response_tokens,
        )

    def arm(self) -> None:
        """Before a step's last optimizer step: announce the sync that follows it, where the transport can. The next engine call has to be
        :meth:`sync` or :meth:`disarm`."""
        if self.cfg.sync.arm and isinstance(self.rollout, ServerEngine):
            # what is wrong with the server, the sync itself will find
            with suppress(EngineError):
                sync = self.cfg.sync
                self.rollout.arm(self.trainer.policy_version + 1, receipt=sync.receipt, before=sync.receipt_before)

    def disarm(self) -> None:
        """Take back what :meth:`arm` announced: the engine serves its old weights again."""
        if isinstance(self.rollout, ServerEngine):
            self.rollout.disarm()

    def sync(self) -> SyncReport:
        """Deliver the trainer's weights into the engine; see ``SyncReport.settled``."""
        rollout = self.start_rollout()
        if isinstance(rollout, ServerEngine):
            return publish_weights(self.trainer, rollout, self.cfg)
        return sync_weights(self.trainer, rollout, self.cfg, self.model_dir.parent / "sync")

    def on_lost_rank(self, last_wish: Callable[[], None]) -> None:
        """``last_wish`` is called before a lost rank ends this process, where that waits in native code; see ``Lifeline``."""
        if isinstance(self.trainer, DrivingEngine):
            self.trainer.channel.lifeline.last_wish = last_wish

    @property
    def reaches_ranks(self) -> bool:
        """Whether the trainer's other ranks, if there are any, still take orders."""
        return not isinstance(self.trainer, DrivingEngine) or not self.trainer.channel.is_broken

    def part(self, error: BaseException) -> None:
        """End the trainer's other ranks because of ``error``, if they can no longer be let go with :meth:`close`."""
        if isinstance(self.trainer, DrivingEngine) and not self.reaches_ranks:
            self.trainer.channel.part(error)

    def close(self) -> None:
        """Stop the reward workers and the engine, and let the trainer's other ranks go."""
        self.task.close()
        if isinstance(self.trainer, DrivingEngine):
            self.trainer.close()
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None


def open_session(cfg: Config, model_dir: Path, *, drives_ranks: bool = False) -> Session:
    """Prepare the environment, then build task and trainer; the engine starts on first use.

    With ``drives_ranks`` this may be rank 0 of several; the trainer is then a DrivingEngine.

    Raises:
        ConfigError: the process is one of several ranks and must not be, or the configuration cannot run here.
        RankError: another rank does not come, or ends.
    """
    ranks = world_size()
    if ranks > 1 and not drives_ranks:
        raise ConfigError(f"The job has {ranks} ranks, but only `e2e-fp8 train` runs on several: start one process.")
    check_ranks(cfg, ranks)
    cfg = prepare(cfg)
    if cfg.run.threads:
        import torch

        torch.set_num_threads(cfg.run.threads)
    task = load_task_for(cfg)
    write_model_dir(cfg, task, model_dir)
    trainer = lead(cfg) if ranks > 1 else MegatronEngine(cfg)
    seed_generators(cfg.run.seed)
    return Session(cfg=cfg, task=task, trainer=trainer, model_dir=model_dir)
