"""``e2e-fp8 export``: a run's newest checkpoint as a Hugging Face checkpoint."""

import tempfile
from pathlib import Path
from typing import Literal

from e2e_fp8.errors import ConfigError
from e2e_fp8.export.hf_checkpoint import write_hf_checkpoint
from e2e_fp8.export.hf_names import to_hf
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.environment import on_any_ground, prepare
from e2e_fp8.orchestration.ranks.shares import on_one_rank
from e2e_fp8.orchestration.run_folder import load_run_config
from e2e_fp8.orchestration.session import hf_config_of, open_session
from e2e_fp8.orchestration.weight_sync import exported_tensors


def export(run_dir: Path, out: Path, precision: Literal["fp8", "bf16"]) -> Path:
    """Write ``out``: block FP8 that stock vLLM serves (the bytes the run's engine held), or BF16 master-rounded weights.

    Raises:
        ConfigError: FP8 was asked of a run whose engine did not run FP8.
        CheckpointError: no whole checkpoint, ``out`` not empty, disk full.
    """
    cfg = prepare(on_any_ground(load_run_config(run_dir)))
    if precision == "fp8" and cfg.numerics.rollout_precision != "fp8":
        raise ConfigError(f"{run_dir} rolled out in BF16, so it has no FP8 bytes to export; use --precision bf16.")
    store = CheckpointStore(run_dir / "checkpoints", keep=cfg.run.keep_checkpoints)
    with tempfile.TemporaryDirectory() as scratch:
        session = open_session(on_one_rank(cfg), Path(scratch) / "model")
        session.load_weights(store)
        if precision == "fp8":
            tensors = exported_tensors(session.trainer, session.cfg)
            quantization = QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)
        else:
            tensors = to_hf(session.trainer.named_high_precision_weights(), cfg.model)
            quantization = None
        write_hf_checkpoint(out, tensors, hf_config_of(cfg, session.task, quantization), tokenizer_dir=session.model_dir)
    return out
