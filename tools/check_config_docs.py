"""Configuration reference: ``docs/config.md`` is generated from the schema, and every field must be described.

python tools/check_config_docs.py            exit 1 when a description is missing or the file is stale
python tools/check_config_docs.py --write    rewrite the file
"""

import argparse
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from e2e_fp8.config.root import Config

DOCS = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEADER = """\
# Configuration

Generated from `e2e_fp8/config` by `python tools/check_config_docs.py --write`; do not edit.

A run is one YAML file with the sections below; every field has a default. `--set section.field=value` overrides one field,
and `e2e-fp8 config FILE.yaml` prints the complete result. Unknown fields are errors. Rules that span fields are in
`e2e_fp8/config/validation.py`.
"""


def is_section(annotation: Any) -> bool:
    """Whether a field holds a group of fields."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def missing_descriptions(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of fields below ``section`` without a description ending in a full stop, and of sections without a docstring."""
    missing = [] if (section.__doc__ or "").strip() else [prefix.rstrip(".") or section.__name__]
    for name, info in section.model_fields.items():
        if not (info.description or "").strip().endswith("."):
            missing.append(prefix + name)
        if is_section(info.annotation):
            missing += missing_descriptions(typing.cast(type[BaseModel], info.annotation), f"{prefix}{name}.")
    return missing


def render() -> str:
    """The whole reference as Markdown."""
    return HEADER + "".join(_render_section(name, info) for name, info in Config.model_fields.items())


def _render_section(name: str, info: FieldInfo) -> str:
    section = typing.cast(type[BaseModel], info.annotation)
    doc = " ".join((section.__doc__ or "").split()).replace("``", "`")
    lines = [f"\n## {name}\n", doc, "", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    nested = []
    for field, field_info in section.model_fields.items():
        if is_section(field_info.annotation):
            nested.append(_render_section(f"{name}.{field}", field_info))
        else:
            cells = (f"`{field}`", _type(field_info), f"`{_default(field_info)}`", field_info.description or "")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n" + "".join(nested)


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    return json.dumps(value) if value is None or isinstance(value, bool | str | int | float) else json.dumps(value, default=list)


def _type(info: FieldInfo) -> str:
    signs = {
        annotated_types.Ge: ("ge", "≥"),
        annotated_types.Gt: ("gt", ">"),
        annotated_types.Le: ("le", "≤"),
        annotated_types.Lt: ("lt", "<"),
    }
    bounds = [f"{signs[type(m)][1]} {getattr(m, signs[type(m)][0])}" for m in info.metadata if type(m) in signs]
    return ", ".join([_type_name(info.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("`null`" if arg is type(None) else _type_name(arg) for arg in args)
    names = {int: "integer", float: "number", bool: "true or false", str: "text", tuple: "list of text", dict: "mapping"}
    return names[origin or annotation]


def main() -> int:
    """Check or rewrite; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite docs/config.md")
    args = parser.parse_args()
    missing = missing_descriptions(Config)
    for name in missing:
        print(f"{name}: add a description that ends with a full stop", file=sys.stderr)
    if args.write and not missing:
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(render(), encoding="utf-8")
    stale = not missing and (not DOCS.is_file() or DOCS.read_text(encoding="utf-8") != render())
    if stale:
        print(f"{DOCS.name} is stale: run python tools/check_config_docs.py --write", file=sys.stderr)
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main())
