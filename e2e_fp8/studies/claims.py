"""Stated orders of figures: read from text and judged against what the seeds show."""

import math
import operator
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from e2e_fp8.errors import ConfigError

_SIGN = re.compile(r"\s+([<>=])\s+")
_HOLDS = {">": operator.gt, "<": operator.lt, "=": operator.eq}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``figure: terms[0] signs[0] terms[1] signs[1] ...``; a term is an arm or a number."""

    figure: str
    terms: tuple[str | float, ...]
    signs: tuple[str, ...]

    def holds(self, value_of: Mapping[str, float]) -> bool:
        """Whether the order holds, ``=`` exactly, for one value for each arm."""
        values = [value_of[term] if isinstance(term, str) else term for term in self.terms]
        pairs = zip(self.signs, values[:-1], values[1:], strict=True)
        return all(_HOLDS[sign](left, right) for sign, left, right in pairs)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it speaks of."""
        return tuple(term for term in self.terms if isinstance(term, str))


def parse_claim(text: str, *, arms: Container[str], figures: Container[str]) -> Claim:
    """Read ``mismatch_kl: rollout_only > fp8 > bf16``, ``gain: fp8 > 0`` or ``mismatch_kl: bitwise = 0``.

    Raises:
        ConfigError: not of that form, or a figure or an arm that the study does not have.
    """
    figure, colon, order = text.partition(":")
    parts = _SIGN.split(order.strip())
    terms = tuple(_term(part) for part in parts[::2])
    if not colon or len(parts) < 3 or not any(isinstance(term, str) for term in terms):
        raise ConfigError(f"expect: {text!r} is not of the form 'figure: arm > arm' or 'figure: arm > 0.5': rewrite it.")
    if figure.strip() not in figures:
        raise ConfigError(f"expect: {text!r} speaks of {figure.strip()!r}, which is no figure of this study: name one of its figures.")
    unknown = [term for term in terms if isinstance(term, str) and term not in arms]
    if unknown:
        raise ConfigError(f"expect: {text!r} names {unknown[0]!r}, which is neither an arm of this study nor a number: correct the name.")
    return Claim(figure=figure.strip(), terms=terms, signs=tuple(parts[1::2]))


def _term(text: str) -> str | float:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the runs say about a claim."""

    verdict: str
    """``confirmed`` when every seed agrees, ``contradicted`` when none does, ``undecided`` when they differ, or ``not run``."""
    means: Mapping[str, float]
    seeds: int
    """How many have the figure of every arm of the claim."""
    agreeing: int
    """Those of them whose own values are in the stated order."""


def judge(claim: Claim, values: Mapping[str, Mapping[int, float]]) -> Judgement:
    """Judge by the seeds that all arms of the claim share; ``values`` is figure values, arm -> seed -> value."""
    per_arm = {arm: {s: v for s, v in values.get(arm, {}).items() if math.isfinite(v)} for arm in claim.arms}
    shared = sorted(set.intersection(*(set(found) for found in per_arm.values())))
    if not shared:
        return Judgement(verdict="not run", means={}, seeds=0, agreeing=0)
    means = {arm: mean([found[seed] for seed in shared]) for arm, found in per_arm.items()}
    agreeing = sum(claim.holds({arm: found[seed] for arm, found in per_arm.items()}) for seed in shared)
    verdict = {len(shared): "confirmed", 0: "contradicted"}.get(agreeing, "undecided")
    return Judgement(verdict=verdict, means=means, seeds=len(shared), agreeing=agreeing)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; nan for fewer than two values."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))
