"""Loss functions that can be named to another process: what they are made of, instead of a closure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.protocols import LossFn, ValueLossFn
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.loss_fn import make_loss_fn, supervised_loss_fn
from e2e_fp8.update.value import make_value_loss_fn


@dataclass(frozen=True)
class SupervisedLoss:
    """The warm start's."""

    @cached_property
    def _loss_fn(self) -> LossFn:
        return supervised_loss_fn()

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As :data:`e2e_fp8.protocols.LossFn`."""
        return self._loss_fn(stats, batch)

    def to_json(self) -> dict[str, Any]:
        """For :func:`loss_from_json`."""
        return {"kind": "supervised"}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The configured objective, see :func:`e2e_fp8.update.loss_fn.make_loss_fn`."""

    objective: ObjectiveConfig
    correction: CorrectionConfig
    max_response_tokens: int

    @cached_property
    def _loss_fn(self) -> LossFn:
        return make_loss_fn(self.objective, self.correction, max_response_tokens=self.max_response_tokens)

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As :data:`e2e_fp8.protocols.LossFn`."""
        return self._loss_fn(stats, batch)

    def to_json(self) -> dict[str, Any]:
        """For :func:`loss_from_json`."""
        return {
            "kind": "policy",
            "objective": self.objective.model_dump(mode="json"),
            "correction": self.correction.model_dump(mode="json"),
            "max_response_tokens": self.max_response_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The critic's, see :func:`e2e_fp8.update.value.make_value_loss_fn`."""

    critic: CriticConfig

    @cached_property
    def _loss_fn(self) -> ValueLossFn:
        return make_value_loss_fn(self.critic)

    def __call__(self, values_T: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As :data:`e2e_fp8.protocols.ValueLossFn`."""
        return self._loss_fn(values_T, batch)

    def to_json(self) -> dict[str, Any]:
        """For :func:`loss_from_json`."""
        return {"kind": "value", "critic": self.critic.model_dump(mode="json")}


def loss_from_json(record: dict[str, Any]) -> SupervisedLoss | PolicyLoss | ValueLoss:
    """Inverse of ``to_json``."""
    if record["kind"] == "supervised":
        return SupervisedLoss()
    if record["kind"] == "value":
        return ValueLoss(critic=CriticConfig.model_validate(record["critic"]))
    return PolicyLoss(
        objective=ObjectiveConfig.model_validate(record["objective"]),
        correction=CorrectionConfig.model_validate(record["correction"]),
        max_response_tokens=record["max_response_tokens"],
    )
