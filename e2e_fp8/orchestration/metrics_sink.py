"""Which metric sinks a run writes to."""

from pathlib import Path

from e2e_fp8.config.root import Config
from e2e_fp8.observability.metrics import JsonlSink, MultiSink, TensorBoardSink, WandbSink
from e2e_fp8.protocols import MetricSink


def open_sink(cfg: Config, root: Path, resumed_step: int) -> MetricSink:
    """JSONL always; TensorBoard and W&B as configured. Records after ``resumed_step`` are dropped first."""
    sinks: list[MetricSink] = [JsonlSink(root / "metrics.jsonl", resume_step=resumed_step)]
    if cfg.run.tensorboard:
        sinks.append(TensorBoardSink(root / "tensorboard", resume_step=resumed_step))
    if cfg.run.wandb_project:
        sinks.append(WandbSink(cfg.run.wandb_project, cfg.run.name, cfg.model_dump(mode="json")))
    return MultiSink(sinks)
