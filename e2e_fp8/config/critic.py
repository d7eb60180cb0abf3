"""Value model of PPO: its optimizer, its precision, and generalised advantage estimation. Formulas: docs/formulas.md."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from e2e_fp8.config.base import Section

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config


class CriticConfig(Section):
    """Value model of ``advantage: gae``: a second Megatron model of the policy's sizes with one FP32 row instead of the output head.

    It runs with the trainer's parallel sizes, mini-batches and Adam settings.
    """

    hf_path: str | None = Field(
        default=None,
        description="Directory with safetensors of the policy's sizes to start from, with the head in score.weight if it has one; "
        "None starts from the policy's own weights at the start of RL. A head that is not given starts at zero.",
    )
    precision: Literal["fp8", "bf16"] | None = Field(
        default=None, description="Linear layers of the critic: block FP8 or BF16; None takes numerics.training_precision."
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="Learning rate of the critic, constant.")
    critic_warmup: int = Field(default=0, ge=0, description="First RL steps in which the critic alone is trained.")
    gae_gamma: float = Field(default=1.0, ge=0, le=1, description="Discount of rewards, per trained token.")
    gae_lambda: float = Field(
        default=1.0, ge=0, le=1, description="Weight of longer returns: 1 is reward-to-go minus value, 0 the one-step error."
    )
    value_clip: float | None = Field(
        default=0.5, gt=0, description="PPO's value clipping: distance from the values before the update; None for no clipping."
    )
    whiten_advantages: bool = Field(
        default=True, description="Give the advantages of all response tokens of a step mean 0 and standard deviation 1."
    )


def critic_config(cfg: "Config") -> "Config":
    """The run's configuration as the critic's trainer reads it: its own precision, learning rate, weights and routing, no output head."""
    critic = cfg.objective.critic
    changes = {
        "model": cfg.model.model_copy(update={"hf_path": critic.hf_path, "tie_word_embeddings": False}),
        "numerics": cfg.numerics.model_copy(update={"training_precision": critic.precision or cfg.numerics.training_precision}),
        "training": cfg.training.model_copy(
            update={"learning_rate": critic.learning_rate, "router_replay": type(cfg.training.router_replay)()}
        ),
    }
    return cfg.model_copy(update=changes)
