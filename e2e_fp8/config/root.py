"""The whole configuration of a run, and its cross-field rules."""

from typing import Self

from pydantic import Field, model_validator

from e2e_fp8.config.base import Section
from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.health import HealthConfig
from e2e_fp8.config.model import ModelConfig
from e2e_fp8.config.numerics import NumericsConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.config.rollout import RolloutConfig
from e2e_fp8.config.run import RunConfig, SyncConfig
from e2e_fp8.config.task import TaskConfig
from e2e_fp8.config.training import TrainingConfig
from e2e_fp8.config.validation import check_cross_fields


class Config(Section):
    """One run: ``e2e-fp8 train FILE.yaml --set section.field=value``."""

    model: ModelConfig = Field(default=ModelConfig(), description="Architecture.")
    numerics: NumericsConfig = Field(default=NumericsConfig(), description="FP8 recipe of both sides.")
    training: TrainingConfig = Field(default=TrainingConfig(), description="Megatron-Core side.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="vLLM side.")
    correction: CorrectionConfig = Field(default=CorrectionConfig(), description="Rollout correction.")
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="Policy objective.")
    task: TaskConfig = Field(default=TaskConfig(), description="Prompts and rewards.")
    sync: SyncConfig = Field(default=SyncConfig(), description="Weight delivery and receipt.")
    health: HealthConfig = Field(default=HealthConfig(), description="Alarms over the run's metrics.")
    run: RunConfig = Field(default=RunConfig(), description="Length, evaluation, checkpoints, outputs.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Cross-field rules; a broken one raises ConfigError."""
        check_cross_fields(self)
        return self
