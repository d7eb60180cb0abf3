"""Files of one run: ``config.yaml environment.json metrics.jsonl receipts.jsonl receipts/ samples.jsonl checkpoints/ model/`` and
``report.html``.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from e2e_fp8.config.load import load_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, writing


class RunFolder:
    """Opens the folder of a run; refuses to mix two runs."""

    def __init__(self, cfg: Config) -> None:
        self.root = Path(cfg.run.out_dir) / cfg.run.name
        self.model_dir = self.root / "model"
        self.checkpoints = self.root / "checkpoints"
        occupied = (self.root / "config.yaml").exists()
        if occupied and not cfg.run.resume:
            raise ConfigError(f"run.name: {self.root} already holds a run; add --resume to continue it, or choose another run.name.")
        if cfg.run.resume and not occupied:
            raise ConfigError(f"run.resume: {self.root} holds no run, so there is nothing to resume; drop --resume to start this run.")
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def write_inputs(self, cfg: Config, environment: dict[str, str]) -> None:
        """Record what the run was started with."""
        with writing(self.root):
            (self.root / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
            (self.root / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Append one JSON line to ``name``."""
        with writing(self.root / name), open(self.root / name, "a") as file:
            file.write(json.dumps(record) + "\n")


def load_run_config(run_dir: Path) -> Config:
    """The configuration a run was started with.

    Raises:
        ConfigError: ``run_dir`` is not a run folder.
    """
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ConfigError(
            f"{run_dir} is not a run folder: it has no config.yaml. Give a folder that `e2e-fp8 train` wrote, such as runs/NAME."
        )
    return load_config(path)
