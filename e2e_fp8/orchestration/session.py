"""Everything a run holds: task, trainer, engine, folder. Built once, closed once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.export.policy_folder import checkpoint_writer
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.environment import prepare
from e2e_fp8.orchestration.episodes import generate_episodes
from e2e_fp8.orchestration.weight_sync import SyncReport, exported_tensors, publish_weights, sync_weights
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.server_engine import ServerEngine
from e2e_fp8.rollout.shared_engine import SharedVllmEngine, TrainerMemory
from e2e_fp8.tasks.dataset import Task, load_task
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.parallel import world_size
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
    critic: ValueEngine | None = None
    """Value model; None without objective.advantage gae, and before RL starts."""

    def make_reference(self, state: dict[str, Any]) -> None:
        """Freeze a second engine at ``state`` as the reference policy."""
        self.reference = MegatronEngine(self.cfg)
        self.reference.load_state_dict(state)

    def make_critic(self, state: dict[str, Any] | None) -> None:
        """Build the critic: from its saved ``state``, or new from objective.critic.hf_path or the trainer's weights as they are now."""
        self.critic = ValueEngine(self.cfg)
        if state is not None:
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

    def sync(self) -> SyncReport:
        """Deliver the trainer's weights into the engine."""
        rollout = self.start_rollout()
        if isinstance(rollout, ServerEngine):
            return publish_weights(self.trainer, rollout, self.cfg)
        return sync_weights(self.trainer, rollout, self.cfg, self.model_dir.parent / "sync")

    def close(self) -> None:
        """Stop the reward workers and the engine."""
        self.task.close()
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None


def open_session(cfg: Config, model_dir: Path) -> Session:
    """Prepare the environment, then build task and trainer; the engine starts on first use.

    Raises:
        ConfigError: the process is one of several ranks, or the configuration cannot run here.
    """
    ranks = world_size()
    if ranks > 1:
        raise ConfigError(
            f"The job has {ranks} ranks, but the loop drives one trainer process: handing samples from rank 0 to the others is not "
            "implemented. Start one process; a trainer of several ranks can be used as a library (e2e_fp8.training.engine)."
        )
    cfg = prepare(cfg)
    if cfg.run.threads:
        import torch

        torch.set_num_threads(cfg.run.threads)
    task = load_task_for(cfg)
    write_model_dir(cfg, task, model_dir)
    trainer = MegatronEngine(cfg)
    _seed_generators(cfg.run.seed)
    return Session(cfg=cfg, task=task, trainer=trainer, model_dir=model_dir)


def _seed_generators(seed: int) -> None:
    """Global generators of the process, seeded once all imports are done: some libraries seed them from the clock."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
