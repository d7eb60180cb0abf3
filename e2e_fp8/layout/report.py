"""A plan as a table for people and as plain values for programs."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from e2e_fp8.layout.plan import Copy, Plan
from e2e_fp8.layout.straddles import Verdict, layer_names

_GIB = 1 << 30


def summary(plan: Plan, found: Sequence[Verdict]) -> dict[str, Any]:
    """Sizes, totals and verdicts as plain values. ``totals`` counts weights, scales and unquantized tensors."""
    train, rollout = plan.train, plan.rollout
    return {
        "family": plan.shape.family,
        "layers": plan.shape.layers,
        "train": {
            "tensor": train.tensor,
            "pipeline": train.pipeline,
            "virtual_pipeline": train.virtual_pipeline,
            "expert": train.expert,
            "expert_tensor": train.expert_tensor_size,
            "ranks": train.world_size,
            "qkv_order": plan.qkv_order,
        },
        "rollout": {"tensor": rollout.tensor, "data": rollout.data, "expert": rollout.expert, "ranks": rollout.world_size},
        "totals": plan.totals(),
        "verdicts": [
            {
                "parameter": layer_names(one.layers) + one.parameter,
                "layers": list(one.layers),
                "verdict": one.verdict,
                "reasons": list(one.reasons),
            }
            for one in found
        ],
    }


def chosen_copies(plan: Plan, rank: int, pattern: str = "*") -> list[Copy]:
    """Copies into engine rank ``rank`` whose source or target name matches ``pattern``. Raises LayoutError for an unknown rank."""
    return [one for one in plan.copies(rank) if fnmatchcase(one.target, pattern) or fnmatchcase(one.source, pattern)]


def copy_values(one: Copy) -> dict[str, Any]:
    """A copy as plain values; FP8 ones with their scale tiles."""
    values = one._asdict()
    if one.fp8:
        names = ("source_row", "source_col", "target_row", "target_col", "rows", "cols")
        values["tiles"] = dict(zip(names, one.tiles, strict=True))
    return values


def render_summary(plan: Plan, found: Sequence[Verdict]) -> str:
    """One line for each kind of FP8 parameter, then the totals."""
    values = summary(plan, found)
    train, rollout, totals = values["train"], values["rollout"], values["totals"]
    experts = f" ep {train['expert']} etp {train['expert_tensor']}" if plan.shape.experts else ""
    whole = ", experts whole" if rollout["expert"] else ""
    head = [
        f"{values['family']}, {values['layers']} layers; qkv order: {train['qkv_order']}",
        f"training: tp {train['tensor']} pp {train['pipeline']}{experts}, {train['ranks']} ranks; "
        f"rollout: tp {rollout['tensor']} dp {rollout['data']}{whole}, {rollout['ranks']} ranks",
        "",
    ]
    rows = [(entry["parameter"], entry["verdict"]) for entry in values["verdicts"]]
    tail = [
        "",
        f"{totals['copies']} copies, {totals['bytes'] / _GIB:.2f} GiB into all rollout ranks; at most "
        f"{totals['largest_rank_copies']} copies, {totals['largest_rank_bytes'] / _GIB:.2f} GiB into one",
    ]
    return "\n".join([*head, *_aligned([("FP8 engine parameter", "verdict"), *rows]), *tail])


def render_copies(copies: Sequence[Copy]) -> str:
    """One line for each copy, rows and columns as ``start-stop``."""
    rows = [("from rank", "trainer parameter", "rows", "columns", "engine parameter", "expert", "rows", "columns", "dtype")]
    for one in copies:
        chunk = f"{one.source_rank}" if one.chunk == 0 else f"{one.source_rank}, chunk {one.chunk}"
        source = _span(one.source_row, one.rows), _span(one.source_col, one.cols)
        target = _span(one.target_row, one.rows), _span(one.target_col, one.cols)
        expert = "" if one.expert is None else str(one.expert)
        rows.append((chunk, one.source, *source, one.target, expert, *target, one.dtype))
    return "\n".join(_aligned(rows))


def _span(start: int, size: int) -> str:
    return f"{start}-{start + size}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
