"""``e2e-fp8 study``: run the arms of a study, and write its page."""

import argparse
import signal
from pathlib import Path
from types import FrameType

from e2e_fp8.cli.arguments import add_set
from e2e_fp8.errors import ConfigError

EXIT_DONE, EXIT_SOME_FAILED = 0, 1

_DETAIL = """\
  e2e-fp8 study STUDY.yaml           run every arm with every seed, each in a process of e2e-fp8 train
  e2e-fp8 study report STUDY.yaml    write the page, figures and numbers of what has run

Runs that are done are skipped, interrupted ones resume, a failed one is named and the others go on. Ctrl-C stops after the
current step; the same command continues. Exit code 0: all done; 1: some runs failed; 2: a mistake in what was asked.
docs/studies/README.md describes the files of configs/studies.
"""


def add_study(commands: "argparse._SubParsersAction") -> None:
    """Add the sub-command to the parser."""
    parser = commands.add_parser(
        "study", help="run the arms of a study with several seeds, and write its page", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="+", metavar="[report] STUDY.yaml", help="what to do (default: run) and the study's file")
    parser.add_argument("--size", metavar="NAME", help="size of the study, such as cpu or h200 (default: its first)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the runs (default: runs/studies/NAME/SIZE)")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="run these arms alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="run these seeds alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print every run and how far it is, and start none")
    parser.add_argument("--docs", metavar="DIR", type=Path, default=Path("docs"), help="where report writes (default: %(default)s)")
    add_set(parser, of="one field of every arm")
    parser.set_defaults(command=_study)


def _study(args: argparse.Namespace) -> int:
    action, path = _parse_words(args.words)
    from e2e_fp8.studies.runs import check_arms, planned_runs
    from e2e_fp8.studies.schema import load_study, size_of

    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}, but must be at least 1.")
    study = load_study(path)
    size = size_of(study, args.size)
    check_arms(study, path, size, args.overrides)
    out = args.out or Path("runs") / "studies" / path.stem / size
    if action == "report":
        from e2e_fp8.studies.report import write_page

        print(write_page(study, path, size, out, args.docs, extra=args.overrides))
        return EXIT_DONE
    runs = planned_runs(study, path, size, out, extra=args.overrides, arms=args.arms, seeds=args.seeds)
    return _list(runs) if args.list else _run(args, study, path, size, out, runs)


def _parse_words(words: list[str]) -> tuple[str, Path]:
    action, name = ("run", words[0]) if len(words) == 1 else (words[0], words[1])
    if len(words) > 2 or action not in ("run", "report"):
        raise ConfigError(f"study {' '.join(words)}: write 'e2e-fp8 study STUDY.yaml' or 'e2e-fp8 study report STUDY.yaml'.")
    return action, Path(name)


def _list(runs: list) -> int:
    from e2e_fp8.studies.runs import steps_done

    for run in runs:
        print(f"{run.name}: {steps_done(run.folder)} RL steps")
    return EXIT_DONE


def _run(args: argparse.Namespace, study, path: Path, size: str, out: Path, runs: list) -> int:
    from e2e_fp8.studies.runs import StudyRunner

    runner = StudyRunner(study, path, size, out, extra=args.overrides, say=lambda text: print(text, flush=True))
    previous = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        outcome = runner.run(runs, args.jobs)
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(f"{len(outcome.done)} done, {len(outcome.failed)} failed in {out}")
    for name, problem in outcome.failed.items():
        print(f"  {name}: {problem}")
    return EXIT_SOME_FAILED if outcome.failed else EXIT_DONE


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
