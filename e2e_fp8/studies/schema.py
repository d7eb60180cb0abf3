"""What a study is, read from ``configs/studies/*.yaml``. Torch-free."""

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from e2e_fp8.config.base import Section
from e2e_fp8.config.load import error_sentence, load_config, read_yaml
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.observability.names import METRICS
from e2e_fp8.studies.claims import parse_claim

RESERVED = ("run.name", "run.out_dir", "run.seed", "run.resume")
"""Fields that the study itself sets for every run."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_START_RESERVED = ("model.hf_path", "training.warm_start.steps")


class Size(Section):
    """One size of a study: the run configuration its arms start from, on one kind of machine."""

    base: str = Field(description="Run configuration, relative to the study's file.")
    set: dict[str, Any] = Field(default={}, description="Fields of every arm at this size, by dotted name.")
    arms: tuple[str, ...] = Field(default=(), description="Arms that can run at this size; empty for all.")


class Start(Section):
    """Weights that all arms of one seed start from: the base configuration's warm start, trained once for each seed."""

    set: dict[str, Any] = Field(default={}, description="Fields of the warm-start run, by dotted name, such as its precision.")


class Figure(Section):
    """One number of a run."""

    metric: str = Field(description="Name of a metric (e2e_fp8/observability/names.py).")
    over: Literal["mean", "first", "last", "max", "tail", "gain"] = Field(
        description="How its values over the RL steps become one: tail is the mean of the last five, gain is last minus first."
    )


class Pair(Section):
    """Two arms compared seed by seed."""

    arm: str = Field(description="Arm whose figures are reported.")
    against: str = Field(description="Arm they are compared with.")


class Expectation(Section):
    """A stated order of figures, judged by the report."""

    claim: str = Field(description="FIGURE: TERM > TERM ..., terms being arms or numbers, signs > and <.")
    source: str = Field(description="Who states it.")


class Study(Section):
    """Arms, seeds and what to report."""

    title: str = Field(description="Heading of the page.")
    question: str = Field(description="What the study is to answer.")
    sizes: dict[str, Size] = Field(min_length=1, description="Sizes by name; the first is the default.")
    seeds: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1, description="Seeds; each arm is run once with each.")
    set: dict[str, Any] = Field(default={}, description="Fields of every arm, by dotted name.")
    start: Start | None = Field(default=None, description="Shared start; None lets each run do its own warm start.")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="Fields of each arm, by dotted name.")
    figures: dict[str, Figure] = Field(min_length=1, description="Figures by name.")
    curves: tuple[str, ...] = Field(default=(), description="Metrics drawn against the step.")
    panels: dict[str, tuple[str, ...]] = Field(default={}, description="Arms drawn in one panel each; empty draws all in one.")
    pairs: tuple[Pair, ...] = Field(default=(), description="Arms compared seed by seed.")
    expect: tuple[Expectation, ...] = Field(default=(), description="Expectations to be judged.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Names must exist and no field may be set that the study sets itself; raises ConfigError."""
        for kind, names in (("arms", self.arms), ("sizes", self.sizes)):
            for name in names:
                if not re.match(_NAME, name) or name.replace(".", "").isdigit():
                    raise ConfigError(f"{kind}: {name!r} cannot be part of a file name, or is a number: use letters, digits, '_' and '-'.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: {list(self.seeds)} names a seed twice: give each once.")
        self._check_fields()
        self._check_names()
        return self

    def _check_fields(self) -> None:
        groups = {"set": self.set} | {f"arms.{name}": fields for name, fields in self.arms.items()}
        groups |= {f"sizes.{name}.set": size.set for name, size in self.sizes.items()}
        for where, fields in groups.items():
            reserved = [*RESERVED, *(_START_RESERVED if self.start else ())]
            clash = next((name for name in fields if name in reserved), None)
            if clash:
                raise ConfigError(f"{where}: {clash} is set by the study itself for each run: remove it.")

    def _check_names(self) -> None:
        for metric in (*self.curves, *(figure.metric for figure in self.figures.values())):
            if metric not in METRICS:
                raise ConfigError(f"figures or curves: {metric!r} is no metric: e2e_fp8/observability/names.py lists them.")
        named = [(f"panels.{name}", arm) for name, arms in self.panels.items() for arm in arms]
        named += [(f"sizes.{name}.arms", arm) for name, size in self.sizes.items() for arm in size.arms]
        named += [("pairs", arm) for pair in self.pairs for arm in (pair.arm, pair.against)]
        for where, arm in named:
            if arm not in self.arms:
                raise ConfigError(f"{where}: {arm!r} is no arm of this study: its arms are {', '.join(self.arms)}.")
        for expectation in self.expect:
            parse_claim(expectation.claim, arms=self.arms, figures=self.figures)


def load_study(path: Path) -> Study:
    """Parse a study and the configuration of every arm at every size.

    Raises:
        ConfigError: a field is wrong, or the configuration of an arm is; the sentence names the arm.
    """
    values = read_yaml(path)
    try:
        study = Study.model_validate(values)
    except ValidationError as err:
        raise ConfigError("\n".join(f"{path}: {error_sentence(e)}" for e in err.errors())) from err
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err
    for size in study.sizes:
        for arm in study.arms:
            arm_config(study, path, size, arm)
    return study


def size_of(study: Study, name: str | None) -> str:
    """The named size, or the first. Raises ConfigError when there is none of that name."""
    if name is None:
        return next(iter(study.sizes))
    if name not in study.sizes:
        raise ConfigError(f"--size {name} is no size of this study: it has {', '.join(study.sizes)}.")
    return name


def base_of(study: Study, path: Path, size: str) -> Path:
    """The run configuration that ``size`` starts from."""
    return path.parent / study.sizes[size].base


def arm_overrides(study: Study, size: str, arm: str, extra: list[str] | tuple[str, ...] = ()) -> list[str]:
    """``--set`` texts of one arm: the size's, the study's, ``extra``, then the arm's own, so that an arm always differs as it says."""
    return [*as_overrides(study.sizes[size].set), *as_overrides(study.set), *extra, *as_overrides(study.arms[arm])]


def arm_config(study: Study, path: Path, size: str, arm: str, extra: list[str] | tuple[str, ...] = ()) -> Config:
    """Configuration of one arm, without the fields of a single run. Raises ConfigError naming the arm."""
    try:
        return load_config(base_of(study, path, size), arm_overrides(study, size, arm, extra))
    except ConfigError as err:
        raise ConfigError(f"{path}, size {size}, arm {arm}: {err}") from err


def as_overrides(fields: dict[str, Any]) -> list[str]:
    """``{"a.b": value}`` as texts for ``--set``."""
    return [f"{name}={_flow(value)}" for name, value in fields.items()]


def _flow(value: Any) -> str:
    """YAML of any value on one line."""
    return yaml.dump([value], Dumper=_QuotingDumper, default_flow_style=True, width=1 << 30).strip()[1:-1]


class _QuotingDumper(yaml.SafeDumper):
    """Every text in double quotes, so that line ends and the like stay escapes on one line."""


_QuotingDumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
