"""Megatron-Core side: optimizer, batch shape, parallel sizes, supervised warm start, router replay."""

from typing import Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class ParallelConfig(Section):
    """Megatron parallel sizes."""

    tensor: int = Field(default=1, ge=1, description="Tensor parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline parallel size.")
    virtual_pipeline: int = Field(
        default=1, ge=1, description="Chunks of layers of each pipeline rank (interleaved schedule); above 1 only with pipeline above 1."
    )
    expert: int = Field(default=1, ge=1, description="Expert parallel size: each rank of the group holds whole experts.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor parallel size inside experts, instead of ``tensor``.")
    context: int = Field(default=1, ge=1, description="Context parallel size: ranks that divide the packed tokens of each micro-batch.")


class WarmStartConfig(Section):
    """Supervised training on reference answers before reinforcement learning."""

    steps: int = Field(default=0, ge=0, description="Optimizer steps; 0 skips the warm start.")
    batch_size: int = Field(default=64, ge=1, description="Sequences per optimizer step.")
    learning_rate: float = Field(default=3e-3, gt=0, description="Peak learning rate of the warm start.")
    warmup_steps: int = Field(default=10, ge=0, description="Linear warm-up in steps.")


class RouterReplayConfig(Section):
    """Rollout routing replay (R3): the trainer sends each token to the experts that the engine chose. See docs/router_replay.md."""

    mode: Literal["disabled", "R3", "R3_weights_order"] = Field(
        default="disabled",
        description="R3: the engine's expert ids, with gate weights from the trainer's own router logits at those ids. R3_weights_order: "
        "the engine's gate weights and the order of its slots as well. The router keeps its gradient in both.",
    )
    uncovered: Literal["mask", "count"] = Field(
        default="mask",
        description="Response tokens whose own or earlier routing the engine did not return: out of the loss, or trained with the "
        "trainer's own routing and counted in router_replay/uncovered_tokens.",
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is replayed."""
        return self.mode != "disabled"

    @property
    def needs_gate_weights(self) -> bool:
        """Whether the engine has to return gate weights beside expert ids."""
        return self.mode == "R3_weights_order"


class TrainingConfig(Section):
    """Optimizer and batch shape of the reinforcement-learning phase."""

    learning_rate: float = Field(default=1e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Linear warm-up in optimizer steps.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay (matrices only, as Megatron does).")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam first-moment decay.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Adam second-moment decay.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam epsilon.")
    clip_grad: float = Field(default=1.0, gt=0, description="Global gradient-norm clip.")
    max_tokens_per_microbatch: int = Field(default=4096, ge=1, description="Packed tokens of one micro-batch, at most.")
    minibatches_per_step: int = Field(default=1, ge=1, description="Optimizer steps per rollout batch.")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Megatron parallel sizes.")
    old_log_probs: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="Where the log-probs before the update come from: a pass of the trainer over the whole batch, or the engine, as long "
        "as an audit finds them equal bit for bit. rollout needs numerics.alignment bitwise (docs/alignment.md).",
    )
    old_log_probs_audit: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="With old_log_probs rollout: share of each rank's sequences, at least one, that the trainer computes anew in every "
        "step; in the first of a process, and after a difference, all. If one differs, the whole batch is computed.",
    )
    warm_start: WarmStartConfig = Field(default=WarmStartConfig(), description="Supervised phase before RL.")
    router_replay: RouterReplayConfig = Field(default=RouterReplayConfig(), description="Rollout routing replay of a mixture of experts.")
