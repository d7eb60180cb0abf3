"""``e2e-fp8 study``: run the arms of studies, write their pages, pack what their runs left."""

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from e2e_fp8.cli.arguments import add_set
from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.studies.runs import Plan

EXIT_DONE, EXIT_SOME_FAILED = 0, 1
_ACTIONS = ("run", "report", "pack")

_DETAIL = """\
  e2e-fp8 study STUDY.yaml ...           run every arm with every seed, each in a process of e2e-fp8 train
  e2e-fp8 study report STUDY.yaml ...    write the page, figures and numbers of what has run
  e2e-fp8 study pack STUDY.yaml ... --to FILE.tar.xz    records of the runs without weights, to be reported on elsewhere

Runs that are done are skipped, interrupted ones resume, a failed one is named and the others go on. Ctrl-C stops after the
current step; the same command continues. Several studies share starts, and runs that differ in their names alone. Exit code 0:
all done; 1: some runs failed or --minutes were over; 2: a mistake in what was asked. docs/studies/README.md describes the files.
"""


def add_study(commands: "argparse._SubParsersAction") -> None:
    """Add the sub-command to the parser."""
    parser = commands.add_parser(
        "study", help="run the arms of studies with several seeds, and write their pages", description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="+", metavar="[report|pack] STUDY.yaml", help="what to do (default: run) and the studies' files")
    parser.add_argument("--size", metavar="NAME", help="size of the studies, such as cpu or h200 (default: the first of each)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path,
        help="folder of the runs (default: runs/studies/NAME/SIZE); of several studies DIR/NAME/SIZE",
    )  # fmt: skip
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="run these arms alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="run these seeds alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--devices", nargs="+", type=int, default=[], metavar="N", help="GPUs over which the runs are dealt out in turn")
    parser.add_argument(
        "--stagger", type=float, default=0.0, metavar="S", help="seconds between the starts of two processes (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after this time; the same command continues")
    parser.add_argument("--list", action="store_true", help="print every run and how far it is, and start none")
    parser.add_argument("--docs", metavar="DIR", type=Path, default=Path("docs"), help="where report writes (default: %(default)s)")
    parser.add_argument("--to", metavar="FILE.tar.xz", type=Path, help="where pack writes")
    add_set(parser, of="one field of every arm")
    parser.set_defaults(command=_study)


def _study(args: argparse.Namespace) -> int:
    action, paths = _parse_words(args.words)
    _check_numbers(args)
    plans = _plans(args, paths)
    if action == "report":
        return _report(args, plans)
    if action == "pack":
        if args.to is None:
            raise ConfigError("study pack needs --to FILE.tar.xz: name the archive to write.")
        from e2e_fp8.studies.pack import pack

        print(f"{pack(plans, args.to)} runs, {args.to.stat().st_size / 2**20:.1f} MiB: {args.to}")
        return EXIT_DONE
    return _list(plans) if args.list else _run(args, plans)


def _parse_words(words: list[str]) -> tuple[str, list[Path]]:
    action, names = (words[0], words[1:]) if words[0] in _ACTIONS else ("run", words)
    if not names or any(not name.endswith((".yaml", ".yml")) for name in names):
        raise ConfigError(
            f"study {' '.join(words)}: write 'e2e-fp8 study STUDY.yaml', 'e2e-fp8 study report STUDY.yaml' or "
            "'e2e-fp8 study pack STUDY.yaml', with one study or several."
        )
    stems = [Path(name).stem for name in names]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None)
    if twice:
        raise ConfigError(f"study {' '.join(words)}: two files are named {twice}, and so are their folders: give each once.")
    return action, [Path(name) for name in names]


def _check_numbers(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}, but must be at least 1.")
    if not args.stagger >= 0:
        raise ConfigError(f"--stagger is {args.stagger}, but must be 0 seconds or more.")
    if args.minutes is not None and not args.minutes > 0:
        raise ConfigError(f"--minutes is {args.minutes}, but must be above 0.")


def _plans(args: argparse.Namespace, paths: Sequence[Path]) -> list["Plan"]:
    """Every study with the runs that ``--arms`` and ``--seeds`` select; one of several studies may have none of them."""
    from e2e_fp8.studies.runs import Plan, check_arms, planned_runs
    from e2e_fp8.studies.schema import load_study, size_of

    studies = {path: load_study(path) for path in paths}
    plans = []
    for path, study in studies.items():
        size = size_of(study, args.size)
        check_arms(study, path, size, args.overrides)
        parent = (args.out or Path("runs") / "studies") if len(paths) > 1 else None
        out = parent / path.stem / size if parent else args.out or Path("runs") / "studies" / path.stem / size
        arms, seeds = args.arms, args.seeds
        if len(paths) > 1:
            arms, seeds = [a for a in arms if a in study.arms], [s for s in seeds if s in study.seeds]
        nothing = (args.arms and not arms) or (args.seeds and not seeds)
        runs = [] if nothing else planned_runs(study, path, size, out, extra=args.overrides, arms=arms, seeds=seeds)
        plans.append(Plan(study=study, path=path, size=size, out=out, extra=tuple(args.overrides), runs=tuple(runs)))
    for kind, wanted, known in (
        ("--arms", args.arms, {a for s in studies.values() for a in s.arms}),
        ("--seeds", args.seeds, {n for s in studies.values() for n in s.seeds}),
    ):
        for item in wanted:
            if item not in known:
                raise ConfigError(f"{kind} {item} is in no study of this call: correct or remove it.")
    return plans


def _report(args: argparse.Namespace, plans: Sequence["Plan"]) -> int:
    from e2e_fp8.studies.report import write_page

    written = 0
    for plan in plans:
        if len(plans) > 1 and not any(run.ready and run.done() for run in plan.runs):
            print(f"{plan.name}: no run is complete in {plan.out}")
            continue
        print(write_page(plan.study, plan.path, plan.size, plan.out, args.docs, extra=args.overrides))
        written += 1
    return EXIT_DONE if written else EXIT_SOME_FAILED


def _list(plans: Sequence["Plan"]) -> int:
    from e2e_fp8.studies.runs import steps_done

    for plan in plans:
        for run in plan.runs:
            print(f"{f'{plan.name}/' if len(plans) > 1 else ''}{run.name}: {steps_done(run.folder)} RL steps")
    return EXIT_DONE


def _run(args: argparse.Namespace, plans: Sequence["Plan"]) -> int:
    from e2e_fp8.studies.runner import StudyRunner

    devices = _visible(args.devices, plans) if args.devices else ()
    runner = StudyRunner(
        plans, say=lambda text: print(text, flush=True), jobs=args.jobs, devices=devices, stagger_s=args.stagger, minutes=args.minutes
    )
    previous = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        outcome = runner.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
    total = sum(len(plan.runs) for plan in plans)
    if outcome.out_of_time:
        print(f"{args.minutes:g} minutes are over: stopped; the same command continues")
    print(f"{len(outcome.done)} of {total} done, {len(outcome.failed)} failed in {', '.join(str(plan.out) for plan in plans)}")
    for name, problem in outcome.failed.items():
        print(f"  {name}: {problem}")
    return EXIT_SOME_FAILED if outcome.failed or outcome.out_of_time else EXIT_DONE


def _visible(devices: Sequence[int], plans: Sequence["Plan"]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each device, counted within those that this process sees.

    Raises:
        ConfigError: a device is not there, or a run would not use one.
    """
    import torch

    from e2e_fp8.studies.schema import arm_config

    count = torch.cuda.device_count()
    missing = [device for device in devices if not 0 <= device < count]
    if missing:
        raise ConfigError(f"--devices names {missing[0]}, but torch sees {count} GPUs here: name some of them, or remove the option.")
    for plan in plans:
        for arm in plan.study.arms:
            if arm_config(plan.study, plan.path, plan.size, arm, plan.extra).run.backend == "cpu":
                raise ConfigError(f"--devices is given, but run.backend of {plan.path}, arm {arm}, is cpu: remove one of the two.")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in seen.split(",")] if seen else [str(i) for i in range(count)]
    return [names[device] for device in devices]


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
