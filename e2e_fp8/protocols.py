"""The seams between stages. Orchestration talks to these; each ground implements them once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch

from e2e_fp8.types import ExportedTensor, PackedBatch, Prompt, ReplayCounts, Sample, StepReport, TokenStats

LossFn = Callable[[TokenStats, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(stats, micro-batch) -> (scalar loss *sum* over the micro-batch, metric sums). The engine divides by the global denominator."""
ValueLossFn = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""The same of a critic; its values are float32 ``[T]``."""


class TrainEngine(Protocol):
    """Megatron-Core training on either ground."""

    policy_version: int
    """Number of optimizer steps applied since the weights were made; bumped by ``optim_step``."""

    def token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """Forward only, no gradient."""
        ...

    def high_precision_token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """The same with BF16 linears on bf16(FP32 master), no second copy of the model kept."""
        ...

    def train_step(self, batches: Sequence[PackedBatch], loss_fn: LossFn, denominator: float) -> StepReport:
        """Forward, backward over all micro-batches, loss sums divided by ``denominator``, one optimizer step, parameter sync."""
        ...

    def take_replay_counts(self) -> ReplayCounts | None:
        """What router replay changed since the last call; None when it is disabled."""
        ...

    def named_local_weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """(Megatron name, FP8 codes or BF16 weight, scale_inv or None), read after the parameter sync; bytes as they are in memory."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RolloutEngine(Protocol):
    """vLLM on either ground."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]:
        """``group_size`` samples for each prompt, in prompt order; log-probs at the sampling temperature."""
        ...

    def update_weights(self, tensors: Iterable[ExportedTensor], *, policy_version: int) -> int:
        """Deliver a complete set of weights into the running engine and reset its prefix cache; returns the bytes moved."""
        ...

    covered: Literal["all", "fp8"]
    """Which of the delivered tensors ``read_back`` gives: all, or FP8 codes and their scales."""

    def read_back(self) -> Iterable[ExportedTensor]:
        """The covered tensors of the live engine under their HF names, as views of the engine's own memory."""
        ...

    def sleep(self) -> None:
        """Give up the memory that the configuration says until the next update or generation."""
        ...

    def close(self) -> None: ...


class TaskData(Protocol):
    """Prompts with a verifier."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def score(self, prompt: Prompt, response_text: str) -> float:
        """Finite reward; raises DataError naming the prompt otherwise."""
        ...


class MetricSink(Protocol):
    """Receives one flat record a step."""

    def log(self, step: int, record: dict[str, float]) -> None: ...
    def close(self) -> None: ...
