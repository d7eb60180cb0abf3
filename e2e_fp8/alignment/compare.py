"""The first place where two recordings differ."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from e2e_fp8.config.alignment import CAUSES


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two recordings differ first, in the order of a forward pass."""

    module: str
    """``layers.I.MODULE``, or a name outside the layers."""
    row: int
    """Token position in the sequence (or sampled token, for log-probs)."""
    column: int
    left: float
    right: float
    unequal: int
    """Elements of this module that differ."""
    elements: int
    largest: float
    """Largest absolute difference in this module."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One equality of the chain, and whether it held."""

    name: str
    left: str
    """What the left values are."""
    right: str
    modules: int
    elements: int
    difference: Difference | None
    causes: tuple[str, ...] = ()
    """Causes that the configuration leaves open and that show where the link broke."""

    @property
    def holds(self) -> bool:
        """No element differs."""
        return self.difference is None

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"holds": self.holds}


def open_causes(module: str, choices: Mapping[str, str], *, within_one_side: bool) -> tuple[str, ...]:
    """Causes that ``choices`` leaves ``native`` and that can make ``module`` differ.

    Those that show in this module, and for sampled tokens and log-probs, which depend on all modules, every cause; within one side
    (batch, decode, chunk) only those whose operator does not keep a row's bits.
    """
    leaf = module.rpartition(".")[2]
    found = []
    for name, cause in CAUSES.items():
        if choices[name] != "native" or (within_one_side and cause.choices["native"].row_invariant):
            continue
        if leaf in cause.links or leaf in ("log_probs", "tokens"):
            found.append(name)
    return tuple(found)


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool of the common shape: which elements differ, by their bits where the dtypes agree, else by value."""
    if left.dtype == right.dtype and left.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        return left.contiguous().view(integer) != right.contiguous().view(integer)
    return left.double() != right.double()


def compare(
    name: str, left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], order: Sequence[str], *, sides: tuple[str, str]
) -> Link:
    """Compare ``[T, C]`` values module by module in ``order``; names that neither side has are skipped.

    Raises:
        ValueError: one side lacks a module or has another shape, or nothing was compared.
    """
    modules = elements = 0
    for module in order:
        if module not in left and module not in right:
            continue
        if module not in left or module not in right or left[module].shape != right[module].shape:
            shapes = [tuple(side[module].shape) if module in side else None for side in (left, right)]
            raise ValueError(f"{name}: {module} is {shapes[0]} in {sides[0]} and {shapes[1]} in {sides[1]}")
        modules, elements = modules + 1, elements + left[module].numel()
        differing = bits_differ(left[module], right[module])
        if bool(differing.any()):
            return Link(
                name=name, left=sides[0], right=sides[1], modules=modules, elements=elements,
                difference=_difference(module, left[module], right[module], differing),
            )  # fmt: skip
    if not elements:
        raise ValueError(f"{name}: nothing was compared")
    return Link(name=name, left=sides[0], right=sides[1], modules=modules, elements=elements, difference=None)


def _difference(module: str, left: torch.Tensor, right: torch.Tensor, differing: torch.Tensor) -> Difference:
    row, column = (int(i) for i in differing.nonzero()[0])
    return Difference(
        module=module,
        row=row,
        column=column,
        left=float(left[row, column]),
        right=float(right[row, column]),
        unequal=int(differing.sum()),
        elements=differing.numel(),
        largest=float((left.double() - right.double()).abs().max()),
    )
