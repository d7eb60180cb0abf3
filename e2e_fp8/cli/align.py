"""``e2e-fp8 align``: do trainer and engine compute the same, where not, and why."""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from e2e_fp8.cli.align_explain import add_explain
from e2e_fp8.cli.arguments import add_set

if TYPE_CHECKING:
    from e2e_fp8.alignment.compare import Link

EXIT_EQUAL, EXIT_DIFFERENT = 0, 1


def add_align(commands: "argparse._SubParsersAction") -> None:
    """Add ``align check`` to the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    summary = "parity of trainer and engine, link by link"
    parser = commands.add_parser("align", help=summary, description="Compares what trainer and engine compute.", formatter_class=formatter)
    actions = parser.add_subparsers(required=True, metavar="{check,explain}")
    check = actions.add_parser(
        "check", help="run the parity chain of a configuration", description=_check.__doc__, formatter_class=formatter
    )
    check.add_argument("config", metavar="CONFIG.yaml", help="run configuration, for example configs/quickstart.yaml")
    add_set(check)
    check.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the chain's random tokens (default: %(default)s)")
    check.add_argument("--json", action="store_true", help="print the links as JSON")
    check.set_defaults(command=_check)
    add_explain(actions)


def _check(args: argparse.Namespace) -> int:
    """Starts the trainer and a vLLM engine on the configuration's starting weights
    and compares them link by link: bytes, batch sizes, prefill against decode,
    chunked prefill, cached prefixes, every module, log-probs. Every comparison is
    bit for bit. On a GPU without CUDA graphs, whose modules cannot be read.

    Exit code 0: all links hold; 1: one breaks, and its first differing value is
    printed with its place and the causes that show there (docs/alignment.md);
    2: the configuration cannot be checked."""
    from e2e_fp8.config.load import load_config

    cfg = load_config(args.config, args.overrides)
    from e2e_fp8.orchestration.environment import prepare

    cfg = prepare(cfg)
    from e2e_fp8.alignment.chain import check

    # vLLM logs to standard output, which is the links' alone.
    with tempfile.TemporaryDirectory(prefix="e2e-fp8-align-") as folder, contextlib.redirect_stdout(sys.stderr):
        links = check(cfg, Path(folder), seed=args.seed)
    return report(links, level=cfg.numerics.alignment, as_json=args.json)


def report(links: "list[Link]", *, level: str, as_json: bool) -> int:
    """Print the links and return the exit code."""
    broken = next((link for link in links if not link.holds), None)
    if as_json:
        first = None if broken is None else broken.name
        record = {"alignment": level, "holds": broken is None, "first_broken": first, "links": [link.record() for link in links]}
        json.dump(record, sys.stdout, indent=2)
        print()
    else:
        for link in links:
            print(_describe(link))
        print(f"numerics.alignment={level}: " + (f"first broken link: {broken.name}" if broken else "all links hold"))
    return EXIT_EQUAL if broken is None else EXIT_DIFFERENT


def _describe(link: "Link") -> str:
    found = link.difference
    if found is None:
        return f"holds   {link.name}: {link.left} = {link.right} ({link.modules} modules, {link.elements:,} values)"
    causes = ", ".join(link.causes) or "none, so this is a fault of the project or a cause not listed yet"
    return (
        f"BREAKS  {link.name} at {found.module}, row {found.row}, column {found.column}: {link.left} {found.left!r}, "
        f"{link.right} {found.right!r}\n        {found.unequal:,} of {found.elements:,} values of the module differ, by at most "
        f"{found.largest:.3g}; causes left open that show there: {causes}"
    )
