"""``e2e-fp8``: the command line. Heavy imports happen inside the commands, so that ``--help`` and mistakes answer at once."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from e2e_fp8.cli.align import add_align
from e2e_fp8.cli.arguments import add_set, positive
from e2e_fp8.cli.plan import add_plan
from e2e_fp8.cli.receipt import add_receipt
from e2e_fp8.cli.study import add_study
from e2e_fp8.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config

EXIT_OK, EXIT_CANNOT_RUN, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

_EXAMPLES = """\
examples:
  e2e-fp8 doctor                                            what this machine can run, and what to fix
  e2e-fp8 train configs/quickstart.yaml                     train, roll out, score, update; ends with a report
  e2e-fp8 train configs/quickstart.yaml --set run.steps=5 --set run.name=short
  e2e-fp8 train configs/quickstart.yaml --resume            continue from the newest whole checkpoint
  e2e-fp8 eval runs/quickstart --samples 4                  held-out reward of a finished run
  e2e-fp8 export runs/quickstart --out quickstart-fp8       block-FP8 Hugging Face checkpoint
  e2e-fp8 receipt verify runs/quickstart 130                do the checkpoint and the engine of that step hold the same bytes?
  e2e-fp8 report runs/quickstart                            self-contained report.html
  e2e-fp8 align check configs/quickstart.yaml --set numerics.alignment=bitwise    do trainer and engine agree bit for bit?
  e2e-fp8 align explain runs/quickstart                     the mismatch by cause; thresholds in numerics.alignment_gates
  e2e-fp8 plan --model config.json --train-tp 4 --rollout-tp 2    do FP8 bytes pass between these layouts?
  e2e-fp8 study configs/studies/precision.yaml              run the arms of a study with several seeds, then study report

Every field is described in docs/config.md. Exit codes: 0 done, 1 no ground can run (doctor), tensors
differ (receipt), trainer and engine do (align check) or a gate is exceeded (align explain), 2 a mistake in
what was asked (one sentence says which), 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A UserError prints its message alone; any other exception is a bug and propagates."""
    # read when torch is first imported; its C++ warnings name nothing a user can act on
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = sys.argv[1:] if argv is None else argv
    if _is_follower(words):
        from e2e_fp8.orchestration.ranks.entry import follow

        return follow()
    args = build_parser().parse_args(words)
    try:
        return args.command(args)
    except UserError as err:
        print(f"e2e-fp8: {err}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("e2e-fp8: interrupted; if the run has a checkpoint, e2e-fp8 train CONFIG --resume continues from it.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _is_follower(words: Sequence[str]) -> bool:
    """Whether this is rank 1 or above of ``train``: it takes its configuration from rank 0, which alone reads the command line."""
    trains = words[:1] == ["train"] and not {"-h", "--help"} & {*words}
    return trains and os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1"


def build_parser() -> argparse.ArgumentParser:
    """The argument parser, with one sub-command for each thing a user does."""
    parser = argparse.ArgumentParser(
        prog="e2e-fp8",
        description="End-to-end FP8 reinforcement learning: Megatron-Core trains, vLLM serves the same bytes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "{train,eval,export,receipt,report,doctor,config,plan,align,study}"
    commands = parser.add_subparsers(title="commands", required=True, metavar=names)
    _add_train(commands)
    _add_eval(commands)
    _add_export(commands)
    add_receipt(commands)
    _add_report(commands)
    _add_doctor(commands)
    _add_config(commands)
    add_plan(commands)
    add_align(commands)
    add_study(commands)
    return parser


def _command(commands: "argparse._SubParsersAction", name: str, summary: str, detail: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=detail, formatter_class=argparse.RawDescriptionHelpFormatter)


def _add_train(commands: "argparse._SubParsersAction") -> None:
    parser = _command(
        commands,
        "train",
        "run the loop: warm start, then rollout, reward, update, sync",
        "Runs the whole loop of one configuration.\n\nWrites run.out_dir/run.name: config.yaml, metrics.jsonl, receipts.jsonl, "
        "checkpoints and report.html.\nCtrl-C ends after the current step and leaves a checkpoint that --resume continues.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="run configuration, for example configs/quickstart.yaml")
    add_set(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint of this run (run.resume=true)")
    parser.set_defaults(command=_train)


def _add_eval(commands: "argparse._SubParsersAction") -> None:
    parser = _command(
        commands,
        "eval",
        "held-out reward of a run, or of the starting weights of a configuration",
        "Samples the held-out prompts with the rollout engine, scores them and prints JSON.\n\nTARGET is a run folder (its newest "
        "checkpoint and its config.yaml are used)\nor a YAML file (the starting weights: random, or model.hf_path).",
    )
    parser.add_argument("target", metavar="TARGET", help="run folder or CONFIG.yaml")
    parser.add_argument("--samples", type=positive, default=None, metavar="K", help="samples per prompt (default: run.eval_samples)")
    add_set(parser)
    parser.set_defaults(command=_eval)


def _add_export(commands: "argparse._SubParsersAction") -> None:
    parser = _command(
        commands,
        "export",
        "write the newest checkpoint of a run as a Hugging Face folder",
        "Writes config.json, tokenizer and safetensors.\n\nfp8: the trainer's own bytes with weight_scale_inv, for vLLM.\n"
        "bf16: the FP32 master weights rounded to BF16, for anything that reads Hugging Face models.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder, for example runs/quickstart")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8", help="format of the linear layers (default: %(default)s)")
    parser.set_defaults(command=_export)


def _add_report(commands: "argparse._SubParsersAction") -> None:
    parser = _command(commands, "report", "write report.html of a run", "Draws the curves of a run into one self-contained HTML file.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder, for example runs/quickstart")
    parser.set_defaults(command=_report)


def _add_doctor(commands: "argparse._SubParsersAction") -> None:
    parser = _command(
        commands,
        "doctor",
        "what this machine can run, and what to fix",
        "Lists versions against the verified ones, the hardware, and every environment switch that changes numerics.\n\n"
        "With CONFIG.yaml, says which switches contradict it. Exit code 0 if the CPU or the CUDA ground can run, 1 if neither.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="configuration to check the environment against")
    add_set(parser)
    parser.set_defaults(command=_doctor)


def _add_config(commands: "argparse._SubParsersAction") -> None:
    parser = _command(
        commands,
        "config",
        "check a configuration and print it with every default",
        "Parses CONFIG.yaml and prints the complete configuration as YAML, so that nothing is left implicit.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration to check")
    add_set(parser)
    parser.set_defaults(command=_config)


def _load(path: str | Path, overrides: list[str]) -> "Config":
    from e2e_fp8.config.load import load_config

    return load_config(path, overrides)


def _run_folder(run_dir: Path) -> Path:
    """``run_dir`` if it holds a run; CheckpointError otherwise."""
    if not (run_dir / "config.yaml").is_file():
        raise CheckpointError(f"{run_dir} is not a run folder (it has no config.yaml): pass the folder that e2e-fp8 train wrote.")
    return run_dir


def train_config(args: argparse.Namespace) -> "Config":
    """Configuration of a ``train`` command; ``--resume`` has the last word. Raises ConfigError."""
    return _load(args.config, [*args.overrides, "run.resume=true"] if args.resume else args.overrides)


def _train(args: argparse.Namespace) -> int:
    cfg = train_config(args)
    from e2e_fp8.orchestration.ranks.meeting import check_ranks, is_first_to_tell, leave
    from e2e_fp8.training.parallel import world_size

    ranks = world_size()
    check_ranks(cfg, ranks)
    # the environment is set before anything imports Megatron-Core, Transformer Engine or vLLM
    from e2e_fp8.orchestration.environment import prepare

    cfg = prepare(cfg)
    from e2e_fp8.orchestration.loop import train

    try:
        print(train(cfg))
    except KeyboardInterrupt:
        # the others are not to wonder where rank 0 went
        is_first_to_tell()
        raise
    except BaseException as error:
        if ranks > 1:
            leave(error, 0)
        raise
    return EXIT_OK


def _eval(args: argparse.Namespace) -> int:
    target = Path(args.target)
    run_dir = _run_folder(target) if target.is_dir() else None
    cfg = _load(target / "config.yaml" if run_dir else target, args.overrides)
    from e2e_fp8.orchestration.environment import prepare

    cfg = prepare(cfg)
    from e2e_fp8.orchestration.evaluate import evaluate

    print(json.dumps(evaluate(run_dir, cfg, args.samples or cfg.run.eval_samples), indent=2))
    return EXIT_OK


def _export(args: argparse.Namespace) -> int:
    run_dir = _run_folder(args.run_dir)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise CheckpointError(f"--out {args.out} already exists and is not an empty folder: choose another, nothing is overwritten.")
    from e2e_fp8.orchestration.environment import on_any_ground, prepare

    # the environment is set before anything imports Megatron-Core
    prepare(on_any_ground(_load(run_dir / "config.yaml", [])))
    from e2e_fp8.orchestration.export_command import export

    print(export(run_dir, args.out, args.precision))
    return EXIT_OK


def _report(args: argparse.Namespace) -> int:
    run_dir = _run_folder(args.run_dir)
    from e2e_fp8.observability.report import write_report

    print(write_report(run_dir))
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    from e2e_fp8.doctor import diagnose

    if args.overrides and not args.config:
        from e2e_fp8.errors import ConfigError

        raise ConfigError("--set needs a CONFIG.yaml to override: add the file, for example configs/quickstart.yaml.")
    diagnosis = diagnose(_load(args.config, args.overrides) if args.config else None)
    print(diagnosis.render())
    return EXIT_OK if diagnosis.can_run else EXIT_CANNOT_RUN


def _config(args: argparse.Namespace) -> int:
    cfg = _load(args.config, args.overrides)
    from e2e_fp8.config.load import dump_config

    print(dump_config(cfg), end="")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
