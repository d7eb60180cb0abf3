"""What the runs of studies left, without weights, as one small archive that ``study report`` can be run on elsewhere."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e_fp8.errors import ConfigError, writing
from e2e_fp8.studies.runner import RECORDS
from e2e_fp8.studies.runs import Plan

_WEIGHTS = (".safetensors",)


def pack(plans: Sequence[Plan], archive: Path) -> int:
    """Write ``STUDY/SIZE/...`` of every plan into a tar.xz: configuration and records of each run, logs, starts without weights.

    Returns the number of runs in it.

    Raises:
        ConfigError: no plan has a run.
        StorageError: the archive cannot be written.
    """
    runs = sum((run.folder / "config.yaml").exists() for plan in plans for run in plan.runs)
    if not runs:
        raise ConfigError(f"There is no run in {', '.join(str(plan.out) for plan in plans)}: run e2e-fp8 study first, or name --out.")
    with writing(archive):
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:xz") as tar:
            for plan in plans:
                for file in _files(plan):
                    tar.add(file, Path(plan.name) / plan.size / file.relative_to(plan.out))
    return runs


def _files(plan: Plan) -> Iterator[Path]:
    if not plan.out.is_dir():
        return
    yield from sorted(plan.out.glob("*.log"))
    for start in sorted({run.start for run in plan.runs if run.start}):
        yield from sorted(file for file in start.glob("*") if file.suffix not in _WEIGHTS)
    for run in plan.runs:
        yield from (file for name in ("config.yaml", *RECORDS) if (file := run.folder / name).exists())
