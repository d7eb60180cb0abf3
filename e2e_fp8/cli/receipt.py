"""``e2e-fp8 receipt``: check what a run's receipts say, offline."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e_fp8.orchestration.verify_receipt import RankVerification

EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
_SHOWN = 50


def add_receipt(commands: "argparse._SubParsersAction") -> None:
    """Add ``receipt verify`` to the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    summary = "check a checkpoint against the receipt of a step"
    parser = commands.add_parser("receipt", help=summary, description=_verify.__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(required=True, metavar="{verify}")
    verify = actions.add_parser("verify", help=summary, description=_verify.__doc__, formatter_class=formatter)
    verify.add_argument("run_dir", metavar="RUN", type=Path, help="run folder, for example runs/quickstart")
    verify.add_argument("step", metavar="STEP", type=int, help="step whose sync is checked, as counted in receipts.jsonl")
    verify.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="Hugging Face folder to check (default: the run's own checkpoint of that step, rounded and quantized again)",
    )
    verify.set_defaults(command=_verify)


def _verify(args: argparse.Namespace) -> int:
    """Recomputes the digest of every tensor of a checkpoint and compares it with
    what the rollout engine held after the sync of STEP.

    Needs neither a GPU nor vLLM nor Megatron-Core. Exit code 0: equal; 1: tensors
    differ, and they are named; 2: there is nothing to compare."""
    from e2e_fp8.orchestration.verify_receipt import verify

    result = verify(args.run_dir, args.step, args.checkpoint)
    print(f"checked {result.source}")
    for rank in result.ranks:
        print(_describe(rank))
    if result.not_covered:
        print(f"{result.not_covered} more tensors of the checkpoint are not covered by the receipt (high precision)")
    return EXIT_EQUAL if result.equal else EXIT_DIFFERENT


def _describe(rank: "RankVerification") -> str:
    record = rank.record
    head = (
        f"receipt of step {record['step']}, policy version {record['policy_version']}, rank {record['rank']}: "
        f"{record['tensors']} tensors, {record['bytes']:,} bytes, covered: {record['covered']}, digest {record['digest']}"
    )
    if rank.equal:
        return f"{head}\nequal"
    if not rank.per_tensor:
        return (
            f"{head}\nDIFFERENT: the checkpoint's digest is {rank.combined}; the run kept no table of that step, so no tensor can be named"
        )
    lines = [f"  {name}: {problem}" for name, problem in list(rank.different.items())[:_SHOWN]]
    if len(rank.different) > _SHOWN:
        lines.append(f"  and {len(rank.different) - _SHOWN} more")
    return "\n".join([f"{head}\nDIFFERENT: {len(rank.different)} tensors", *lines])
