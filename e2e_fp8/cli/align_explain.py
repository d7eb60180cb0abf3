"""``e2e-fp8 align explain``: the mismatch by cause, as a table, a plot and JSON for CI."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from e2e_fp8.cli.arguments import add_set, positive

EXIT_WITHIN, EXIT_ABOVE = 0, 1
DEFAULT_PROMPTS = 32


def add_explain(actions: "argparse._SubParsersAction") -> None:
    """Add ``explain`` to ``align``."""
    parser = actions.add_parser(
        "explain",
        help="split the mismatch of a configuration or a run by cause",
        description=_explain.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="TARGET", help="run folder (its newest checkpoint) or CONFIG.yaml (its weights after the warm start)"
    )
    add_set(parser)
    parser.add_argument(
        "--prompts",
        type=positive,
        default=DEFAULT_PROMPTS,
        metavar="N",
        help="prompts, rollout.group_size samples each (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for explain.json and explain.png (default: the run's folder)")
    parser.add_argument("--json", action="store_true", help="print the JSON record instead of the table")
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace) -> int:
    """Samples responses once with the configuration, then opens one cause of the
    mismatch at a time from numerics.alignment=bitwise to the configuration. The
    engine decodes the same tokens again for every row. CPU or GPU.

    Writes explain.json and explain.png. numerics.alignment_gates sets thresholds.

    Exit code 0: baseline 0 and all gates met; 1: a gate is exceeded, a row
    failed, or the baseline is not 0, said in one sentence; 2: the
    configuration cannot be explained."""
    from e2e_fp8.config.load import load_config

    target = Path(args.target)
    run_dir = target if target.is_dir() else None
    if run_dir is not None and not (run_dir / "config.yaml").is_file():
        from e2e_fp8.errors import CheckpointError

        raise CheckpointError(f"{run_dir} is not a run folder (it has no config.yaml): pass the folder that e2e-fp8 train wrote.")
    cfg = load_config(target / "config.yaml" if run_dir else target, args.overrides)
    from e2e_fp8.config.alignment import choices_at
    from e2e_fp8.config.alignment_explain import explain_config, with_numerics
    from e2e_fp8.orchestration.environment import check_alignment_on_cuda, prepare_environment, resolve_backend

    # what is refused leaves the environment as it was
    cfg = explain_config(resolve_backend(cfg), one_rank=run_dir is not None)
    if cfg.run.backend == "cuda":
        check_alignment_on_cuda(with_numerics(cfg, choices_at("bitwise"), training_precision="fp8"))
    prepare_environment(cfg)
    from e2e_fp8.alignment.explain_run import explain, write

    out = args.out or run_dir or Path(cfg.run.out_dir) / cfg.run.name
    with tempfile.TemporaryDirectory(prefix="e2e-fp8-explain-") as folder:
        record = explain(cfg, run_dir, Path(folder), prompts=args.prompts)
    paths = write(record, out)
    if args.json:
        json.dump(record, sys.stdout, indent=2)
        print()
    else:
        print_record(record)
        print(f"written: {paths[0]}, {paths[1]}")
    return judged(record)


def judged(record: dict[str, Any]) -> int:
    """Exit code of a record; what is wrong goes to the standard error, a sentence each."""
    wrong = [f"The row {name} could not be measured: {record['not_measured'][name]}." for name in record["failed"]]
    wrong += record["violations"]
    if not record["baseline_is_zero"]:
        wrong.insert(0, "The baseline with every operator shared is not 0: this is a fault of the project or a cause not listed yet.")
    for sentence in wrong:
        print(f"e2e-fp8: {sentence}", file=sys.stderr)
    return EXIT_ABOVE if wrong else EXIT_WITHIN


def print_record(record: dict[str, Any]) -> None:
    """The table and the sentences under it."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_table(record))
    for line in sentences(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"mismatch by cause, numerics.alignment={record['alignment']}, {record['samples']} samples, {record['tokens']:,} tokens"
    )
    for name in ("cause", "part"):
        table.add_column(name)
    for name in ("k3 KL", "mean |d|", "max |d|", "TME", "max TME", "ratio > 2", "changed experts by layer"):
        table.add_column(name, justify="right")
    kinds = [row["kind"] for row in record["rows"]]
    for index, row in enumerate(record["rows"]):
        metrics, changed = row["metrics"], row["changed_experts"]
        last_of_kind = index + 1 < len(kinds) and kinds[index + 1] != row["kind"]
        table.add_row(
            row["name"] + (" *" if row["kind"] == "what_if" else ""),
            row["group"],
            *(_number(metrics[name]) for name in ("mismatch_kl", "abs_mean", "abs_max")),
            f"{metrics['tme']:.4f}",
            f"{metrics['tme_max']:.3f}",
            f"{100 * metrics['ratio_above_2']:.2f} %",
            "-" if changed is None else ", ".join(f"{100 * share:.2f} %" for share in changed),
            end_section=last_of_kind or index + 1 == len(kinds),
        )
    for name in record["not_measured"]:
        table.add_row(name, "not measured", *["-"] * 7)
    return table


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def sentences(record: dict[str, Any]) -> list[str]:
    """What the table does not show."""
    total, added = record["total"], record["sum_of_causes"]
    lines = [
        "d: trainer's log-prob minus the engine's of the same token. baseline: every operator shared, "
        + ("equal bit for bit." if record["baseline_is_zero"] else "NOT equal, so the rows are no attribution.")
    ]
    if total:
        lines.append(
            f"sum of the causes {added:.3g}, all of them together {total:.3g}: interactions {total - added:+.2g} "
            "(FP8 amplifies a single flipped code, so sizes need not add up)."
        )
    else:
        lines.append("the configuration has no mismatch: the trainer's log-prob of every token equals the engine's.")
    if any(row["kind"] == "what_if" for row in record["rows"]):
        lines.append("*: put on the baseline alone, no part of the sum:")
        lines += [f"   {row['name']}: {row['what']}" for row in record["rows"] if row["kind"] == "what_if"]
    first, position = record["first_module"], record["first_position"]
    if first is not None:
        lines.append(
            f"first module that differs: {first['module']}, token {first['first_row']}, relative error {first['relative_error']:.2g}, "
            f"{100 * first['unequal']:.3g} % of its values."
        )
        lines += _layer_lines(record["modules"])
    if record["hidden_modules"]:
        lines.append(f"modules that one side's fused kernels do not show: {', '.join(record['hidden_modules'])}.")
    if position["earliest"] is not None:
        lines.append(
            f"by position: log-probs differ from token {position['earliest']} of the response on, in "
            f"{position['responses_that_differ']} of {position['responses']} responses; mean |d| "
            + ", ".join(f"{p['abs_mean']:.2g}" for p in record["positions"][:12])
            + (" ..." if len(record["positions"]) > 12 else ".")
        )
    lines.append(
        "the engine's log-probs when it sampled and when it decoded the same tokens again: "
        f"{record['sampled_again_abs_max']:.2g} apart at most."
    )
    lines += [f"not measured: {name}: {why}." for name, why in record["not_measured"].items()]
    return lines


def _layer_lines(modules: list[dict[str, Any]]) -> list[str]:
    """For each layer, where it differs first and the error at its end."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for module in modules:
        parts = module["module"].split(".")
        if parts[0] == "layers":
            layers.setdefault(parts[1], []).append(module)
    found = []
    for layer, inside in layers.items():
        first = next((m for m in inside if m["first_row"] is not None), None)
        where = "equal" if first is None else f"first {first['module'].rpartition('.')[2]}"
        before, after = inside[0]["relative_error"], inside[-1]["relative_error"]
        found.append(f"   layer {layer}: {where}, relative error {before:.2g} going in, {after:.2g} of its MLP")
    return found
