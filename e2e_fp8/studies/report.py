"""The page of a study: verdicts, a table with mean and spread, paired differences, curves, what was not run. Written, never edited."""

import math
from collections.abc import Sequence
from pathlib import Path

from e2e_fp8.errors import ConfigError, writing
from e2e_fp8.observability.names import METRICS
from e2e_fp8.studies.claims import Claim, Judgement, judge, mean, parse_claim, spread
from e2e_fp8.studies.curves import Curve, curve_of, panels_svg
from e2e_fp8.studies.results import TAIL, Results, as_json, read_results, write_text
from e2e_fp8.studies.runs import planned_runs
from e2e_fp8.studies.schema import Study

_OVER = {
    "mean": "mean over the RL steps",
    "first": "first value",
    "last": "last value",
    "max": "largest over the RL steps",
    "tail": f"mean of the last {TAIL} steps",
    "gain": "last minus first",
}


def write_page(study: Study, path: Path, size: str, out: Path, docs: Path, *, extra: Sequence[str] = ()) -> Path:
    """Write ``docs/studies/NAME.md``, its curves and ``docs/evidence/SIZE/studies/NAME.json`` from the runs in ``out``.

    A size other than the study's first has its name in the page's file name. ``extra`` are the overrides that the runs were given.

    Raises:
        ConfigError: no run is complete, or a run folder holds other settings than the study.
        StorageError: a file cannot be written.
    """
    results = read_results(study, planned_runs(study, path, size, out, extra=extra))
    if not results.runs:
        raise ConfigError(f"No run of {path} is complete in {out}: run e2e-fp8 study {path} first, or name its folder with --out.")
    name = path.stem if size == next(iter(study.sizes)) else f"{path.stem}_{size}"
    numbers = docs / "evidence" / size / "studies" / f"{path.stem}.json"
    page = docs / "studies" / f"{name}.md"
    settings = {"base": study.sizes[size].base, "set": {**study.sizes[size].set, **study.set}, "overrides": list(extra), "arms": study.arms}
    with writing(page):
        write_text(numbers, as_json(results, study=path.stem, size=size, settings=settings))
        figures = _write_curves(study, results, page.parent / "figures", name)
        text = _page(study, path, size, results, extra, figures, Path("..") / numbers.relative_to(docs))
        return write_text(page, text)


def _write_curves(study: Study, results: Results, folder: Path, name: str) -> list[str]:
    """One SVG for each metric of ``study.curves``; returns their paths as seen from the page."""
    written = []
    for metric in study.curves:
        panels: dict[str, list[Curve]] = {}
        for panel, arms in (study.panels or {"": tuple(study.arms)}).items():
            found = [curve_of(arm, [run.curves[metric] for run in results.of_arm(arm)]) for arm in arms]
            panels[panel] = [curve for curve in found if curve]
        panels = {panel: curves for panel, curves in panels.items() if curves}
        if panels:
            file = folder / f"{name}_{metric.replace('/', '_')}.svg"
            write_text(file, panels_svg(f"{metric}: {METRICS[metric].description}", panels))
            written.append(f"figures/{file.name}")
    return written


def _page(study: Study, path: Path, size: str, results: Results, extra: Sequence[str], figures: list[str], numbers: Path) -> str:
    count = len(results.runs) + len(results.missing)
    flags = "".join(f" --set {text}" for text in extra)
    parts = [
        f"# {study.title}",
        "Written by `e2e-fp8 study report`; not edited by hand.",
        " ".join(study.question.split()),
        f"    e2e-fp8 study configs/studies/{path.name} --size {size}{flags}",
        _conditions(study, size, results, count),
        _verdicts(study, results),
        f"## Results\n\n{_table(study, results)}\n\n{_legend(study)}",
    ]
    if any(results.of_arm(pair.arm) and results.of_arm(pair.against) for pair in study.pairs):
        parts.append(f"## Seed by seed\n\n{_pairs(study, results)}")
    if figures:
        parts.append("## Curves\n\n" + "\n\n".join(f"![{file}]({file})" for file in figures))
    parts.append(f"## Arms\n\n{_arms(study)}")
    parts.append(f"## Not run\n\n{_missing(study, size, results)}")
    parts.append(f"All numbers and curves: [{numbers.name}]({numbers.as_posix()}).")
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(study: Study, size: str, results: Results, count: int) -> str:
    environment = results.runs[0].environment
    commits = sorted({str(run.environment.get("commit", "unknown")) for run in results.runs})
    passed, compared = (sum(run.receipts[i] for run in results.runs) for i in (0, 1))
    where = environment.get("gpu", f"{environment.get('cores', '?')} CPU cores, shared with other work")
    base = study.sizes[size].base.removeprefix("../")
    shared = sum("same_run_as" in run.environment for run in results.runs)
    same = f"{shared} shared with another study that has the same run; " if shared else ""
    start = "all arms of one seed from the same supervised start; " if study.start else ""
    return (
        f"{len(results.runs)} of {count} runs complete, {results.steps} RL steps each; base `configs/{base}`; "
        f"{same}{start}seeds {', '.join(map(str, study.seeds))}; {where}; commit {', '.join(commits)}; "
        f"receipts passed: {passed} of {compared}; "
        f"{mean([run.seconds for run in results.runs]):.0f} s a run."
    )


def _verdicts(study: Study, results: Results) -> str:
    if not study.expect:
        return ""
    lines = []
    for expectation in study.expect:
        claim = parse_claim(expectation.claim, arms=study.arms, figures=study.figures)
        judgement = judge(claim, results.values(claim.figure))
        lines.append(f"- **{judgement.verdict}**: `{expectation.claim}` ({expectation.source}). {_evidence(claim, judgement)}")
    rule = (
        "Confirmed when every seed that all arms of a line share agrees, contradicted when none does, undecided when they differ; the "
        "numbers are means over those seeds."
    )
    return f"## Expectations\n\n{rule}\n\n" + "\n".join(lines)


def _evidence(claim: Claim, judgement: Judgement) -> str:
    if judgement.verdict == "not run":
        return "No seed has every arm of this line."
    values = ", ".join(f"{arm} {_number(value)}" for arm, value in judgement.means.items())
    return f"{values}; {judgement.agreeing} of {judgement.seeds} seeds agree."


def _table(study: Study, results: Results) -> str:
    names = list(study.figures)
    lines = ["| arm | seeds | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for arm in study.arms:
        runs = results.of_arm(arm)
        if runs:
            cells = [_mean_and_spread([r.figures[name] for r in runs if math.isfinite(r.figures[name])]) for name in names]
            lines.append(f"| {arm} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _legend(study: Study) -> str:
    lines = [f"- `{name}`: {METRICS[f.metric].description} (`{f.metric}`), {_OVER[f.over]}" for name, f in study.figures.items()]
    return "Mean ± sample standard deviation over seeds; one seed has no spread.\n\n" + "\n".join(lines)


def _pairs(study: Study, results: Results) -> str:
    names = list(study.figures)
    same_sign = []
    lines = [
        "Difference of two arms with the same seed, mean ± standard deviation, and in how many seeds it is negative.",
        "",
        "| difference | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for pair in study.pairs:
        cells = []
        for name in names:
            ours, theirs = (results.values(name).get(arm, {}) for arm in (pair.arm, pair.against))
            differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
            negative = sum(d < 0 for d in differences)
            if len(differences) > 1 and (negative == len(differences) or all(d > 0 for d in differences)):
                size = "lower" if negative else "higher"
                same_sign.append(f"- {name} of {pair.arm} is {size} than that of {pair.against} in all {len(differences)} seeds.")
            cells.append(f"{_mean_and_spread(differences)}, negative {negative}/{len(differences)}" if differences else "n/a")
        if any(cell != "n/a" for cell in cells):
            lines.append(f"| {pair.arm} - {pair.against} | " + " | ".join(cells) + " |")
    summary = "\n".join(same_sign) or "No difference has the same sign in every seed, of at least two."
    return "\n".join(lines) + f"\n\nThe same sign in every seed:\n\n{summary}"


def _arms(study: Study) -> str:
    lines = ["| arm | differs in |", "|---|---|"]
    for arm, fields in study.arms.items():
        lines.append(f"| {arm} | " + (", ".join(f"`{name}={value}`" for name, value in fields.items()) or "nothing") + " |")
    return "\n".join(lines)


def _missing(study: Study, size: str, results: Results) -> str:
    absent = [f"- {arm}: cannot run at this size" for arm in study.arms if arm not in (study.sizes[size].arms or study.arms)]
    if not results.missing:
        return "\n".join(absent) or "Nothing: every arm has run with every seed."
    arms: dict[tuple[str, str], list[str]] = {}
    for name, state in results.missing.items():
        arm, _, seed = name.rpartition("-seed")
        arms.setdefault((arm, state), []).append(seed)
    return "\n".join([*(f"- {arm}, seed {', '.join(seeds)}: {state}" for (arm, state), seeds in arms.items()), *absent])


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "n/a"
    deviation = spread(values)
    return _number(mean(values)) + ("" if math.isnan(deviation) else f" ± {_number(deviation, digits=2)}")


def _number(value: float, digits: int = 3) -> str:
    """Three significant digits; small magnitudes as 1.2e-4."""
    if value != 0 and abs(value) < 1e-2:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) >= 1000 else f"{value:.3f}"
