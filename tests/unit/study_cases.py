"""A study of two arms and two seeds, and folders as finished runs leave them."""

from pathlib import Path

import yaml
from synthetic_run import write_run

from e2e_fp8.config.load import dump_config
from e2e_fp8.studies.runs import Plan, planned_runs
from e2e_fp8.studies.schema import load_study

STUDY = {
    "title": "A study",
    "question": "Which?",
    "sizes": {"cpu": {"base": "base.yaml", "set": {"run.steps": 4}}, "big": {"base": "base.yaml", "set": {"run.steps": 8}}},
    "seeds": [1, 2],
    "set": {"run.tensorboard": False},
    "arms": {"low": {"training.learning_rate": 1.0e-4}, "high": {"training.learning_rate": 1.0e-3}},
    "figures": {"reward": {"metric": "reward/mean", "over": "tail"}, "kl": {"metric": "mismatch_kl", "over": "mean"}},
    "curves": ["reward/mean"],
    "pairs": [{"arm": "high", "against": "low"}],
    "expect": [{"claim": "reward: high > low", "source": "hope"}, {"claim": "kl: low > 1000", "source": "fear"}],
}


def written(tmp_path: Path, **changes) -> Path:
    """The study above with ``changes``, beside its base configuration."""
    (tmp_path / "base.yaml").write_text("model: {num_hidden_layers: 1}\n")
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in {**STUDY, **changes}.items() if v is not None}, sort_keys=False))
    return path


def plan_of(path: Path, out: Path, *, size: str = "cpu", runs=None) -> Plan:
    study = load_study(path)
    found = planned_runs(study, path, size, out) if runs is None else runs
    return Plan(study=study, path=path, size=size, out=out, extra=(), runs=tuple(found))


def finished(run, *, seed: int) -> None:
    """A folder that a finished run of ``run`` would leave."""
    write_run(run.folder, warm_steps=0, rl_steps=run.config().run.steps, seed=seed)
    (run.folder / "config.yaml").write_text(dump_config(run.config()))
