"""The runs of a study: which there are, and what state each is in.

A run's folder holds the state: a run is done once its metrics have the last RL step, so nothing else can go stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_fp8.config.load import load_config, parse_config, read_yaml
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.observability.history import flatten, read_records
from e2e_fp8.studies.schema import Study, arm_config, arm_overrides, as_overrides, base_of


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    base: Path
    overrides: tuple[str, ...]
    start: Path | None
    """Hugging Face folder of the seed's shared start; None without one."""

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Equal for two runs that differ in nothing but their names and the folder of their start. Raises ConfigError as config."""
        settings = settings_of(self.config())
        return tuple(
            (name, value) for name, value in settings.items() if name != "run.name" and not (self.start and name == "model.hf_path")
        )

    @property
    def name(self) -> str:
        """``arm-seedN``, the run's folder."""
        return self.folder.name

    def config(self) -> Config:
        """Configuration of the run. Raises ConfigError, also when its start is not there yet."""
        return load_config(self.base, self.overrides)

    def done(self) -> bool:
        """Whether the folder holds every RL step."""
        return steps_done(self.folder) >= self.config().run.steps

    @property
    def ready(self) -> bool:
        """Whether the weights that it starts from are there."""
        return self.start is None or self.start.is_dir()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One study at one size, and which of its runs are asked for."""

    study: Study
    path: Path
    size: str
    out: Path
    extra: tuple[str, ...]
    """Overrides of the command line."""
    runs: tuple[PlannedRun, ...]

    @property
    def name(self) -> str:
        """Of the study's file."""
        return self.path.stem


def planned_runs(
    study: Study, path: Path, size: str, out: Path, *, extra: Sequence[str] = (), arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[PlannedRun]:
    """Every run of the size's arms, all seeds of an arm before the next arm; ``arms`` and ``seeds`` select some.

    Raises:
        ConfigError: an arm or seed that the study does not have.
    """
    here = [arm for arm in study.arms if arm in (study.sizes[size].arms or study.arms)]
    for kind, wanted, known in (("--arms", arms, here), ("--seeds", seeds, list(study.seeds))):
        unknown = [item for item in wanted if item not in known]
        if unknown:
            raise ConfigError(f"{kind} {unknown[0]} is not in {path}: it has {', '.join(map(str, known))}.")
    return [
        _planned(study, path, size, out, arm, seed, list(extra))
        for arm in here
        if arm in (arms or here)
        for seed in study.seeds
        if seed in (seeds or study.seeds)
    ]


def _planned(study: Study, path: Path, size: str, out: Path, arm: str, seed: int, extra: list[str]) -> PlannedRun:
    start = out / f"start-seed{seed}-hf" if study.start else None
    common = arm_overrides(study, size, arm, extra)
    common += as_overrides({"run.name": f"{arm}-seed{seed}", "run.out_dir": str(out), "run.seed": seed})
    if start:
        common += as_overrides({"model.hf_path": str(start), "training.warm_start.steps": 0})
    folder = out / f"{arm}-seed{seed}"
    return PlannedRun(arm=arm, seed=seed, folder=folder, base=base_of(study, path, size), overrides=tuple(common), start=start)


def start_run(study: Study, path: Path, size: str, out: Path, seed: int, extra: Sequence[str] = ()) -> PlannedRun:
    """The run that makes the shared start of a seed: the warm start of the base configuration alone."""
    assert study.start is not None
    name = f"start-seed{seed}"
    settings = {**study.start.set, "run.steps": 0, "run.eval_interval": 0, "run.checkpoint_interval": 1}
    settings |= {"run.name": name, "run.out_dir": str(out), "run.seed": seed}
    texts = [*as_overrides(study.sizes[size].set), *as_overrides(study.set), *extra, *as_overrides(settings)]
    return PlannedRun(arm="start", seed=seed, folder=out / name, base=base_of(study, path, size), overrides=tuple(texts), start=None)


def steps_done(folder: Path) -> int:
    """RL steps that the run logged; 0 when there is no run."""
    return sum(record.get("phase") == 1.0 for record in read_records(folder)) if folder.is_dir() else 0


def check_same_settings(run: PlannedRun) -> None:
    """Refuse a folder that holds a run of other settings.

    Raises:
        ConfigError: names the run and the first fields that differ.
    """
    if not (run.folder / "config.yaml").exists():
        return
    found, wanted = (settings_of(cfg) for cfg in (stored_config(run), run.config()))
    different = [name for name in wanted if found.get(name) != wanted[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({name}: {found.get(name)} there, {wanted[name]} in the study"
            f"{f', and {len(different) - 1} more' if len(different) > 1 else ''}): remove the folder or choose another --out."
        )


def stored_config(run: PlannedRun) -> Config:
    """The configuration in a run's folder, at its own shared start: the folder may have moved, and its path may be relative."""
    path = run.folder / "config.yaml"
    values = read_yaml(path)
    if run.start:
        values["model"] = {**values.get("model", {}), "hf_path": str(run.start)}
    return parse_config(values, where=str(path))


def settings_of(cfg: Config) -> dict[str, str]:
    """What the numbers of a run depend on, by dotted name."""
    document = cfg.model_dump(mode="json")
    for name in ("resume", "out_dir", "backend", "tensorboard", "wandb_project", "threads", "checkpoint_interval", "keep_checkpoints"):
        document["run"].pop(name)
    return flatten(document)


def check_arms(study: Study, path: Path, size: str, extra: Sequence[str]) -> None:
    """Parse every arm with the command's own overrides, before anything starts. Raises ConfigError naming the arm."""
    for arm in study.arms:
        arm_config(study, path, size, arm, list(extra))
