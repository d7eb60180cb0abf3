"""Arguments that several commands have."""

import argparse


def add_set(parser: argparse.ArgumentParser, *, of: str = "one field") -> None:
    """Add ``--set SECTION.FIELD=VALUE`` as ``overrides``; ``of`` says in its help what is overridden."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help=f"override {of}; the value is YAML; may be repeated (docs/config.md lists the fields)",
    )


def positive(text: str) -> int:
    """Type of an argument that is a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
