"""Rollout correction: importance weights and rejection masks, under verl's option names. Formulas: docs/formulas.md."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from e2e_fp8.config.base import Section
from e2e_fp8.errors import ConfigError

RATIO_OPTIONS = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Rejections by an interval of the ratio."""
DIVERGENCE_OPTIONS = ("token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3")
"""Rejections by an upper bound of a divergence."""
REJECTION_OPTIONS = RATIO_OPTIONS + DIVERGENCE_OPTIONS

Preset = Literal[
    "disabled",
    "decoupled_token_is",
    "decoupled_token_icepop",
    "decoupled_seq_is",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis",
]
_PARTS: dict[str, dict[str, Any]] = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "none": {"rollout_is": None},
    "seq_rs": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "geo_rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "k3_rs": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "bypass_ppo_clip": {"bypass_mode": True, "loss_type": "ppo_clip"},
    "bypass_pg": {"bypass_mode": True, "loss_type": "reinforce"},
}
_STRUCTURE = ("rollout_is", "rollout_rs", "bypass_mode", "loss_type")
"""What a preset is; thresholds may be set beside it."""


def preset_values(name: str) -> dict[str, Any]:
    """Fields of one of verl's presets; every structural field is among them."""
    parts = {
        "disabled": ("none",),
        "decoupled_token_is": ("token",),
        "decoupled_token_icepop": ("icepop",),
        "decoupled_seq_is": ("sequence",),
        "decoupled_seq_is_rs": ("sequence", "seq_rs"),
        "decoupled_geo_rs": ("none", "geo_rs"),
        "decoupled_geo_rs_token_tis": ("token", "geo_rs"),
        "decoupled_geo_rs_seq_tis": ("sequence", "geo_rs"),
        "decoupled_k3_rs": ("none", "k3_rs"),
        "decoupled_k3_rs_token_tis": ("token", "k3_rs"),
        "decoupled_k3_rs_seq_tis": ("sequence", "k3_rs"),
        "bypass_ppo_clip": ("none", "bypass_ppo_clip"),
        "bypass_ppo_clip_geo_rs": ("none", "geo_rs", "bypass_ppo_clip"),
        "bypass_ppo_clip_k3_rs": ("none", "k3_rs", "bypass_ppo_clip"),
        "bypass_pg_is": ("sequence", "bypass_pg"),
        "bypass_pg_token_icepop": ("icepop", "bypass_pg"),
        "bypass_pg_geo_rs": ("none", "geo_rs", "bypass_pg"),
        "bypass_pg_geo_rs_token_tis": ("token", "geo_rs", "bypass_pg"),
        "bypass_pg_geo_rs_seq_tis": ("sequence", "geo_rs", "bypass_pg"),
    }[name]
    values: dict[str, Any] = {"rollout_rs": None, "bypass_mode": False, "loss_type": "ppo_clip"}
    for part in parts:
        values |= _PARTS[part]
    return values


@dataclass(frozen=True, kw_only=True)
class RejectionRule:
    """Keep a token or sequence whose statistic is within ``[low, high]``: a ratio for k1, a divergence for k2 and k3."""

    option: str
    low: float
    high: float


class CorrectionConfig(Section):
    """Importance weights and rejection masks between the rollout policy and the trainer's."""

    preset: Preset | None = Field(
        default=None, description="One of verl's presets: sets the fields below, of which thresholds may be given beside it."
    )
    rollout_is: Literal["token", "sequence"] | None = Field(
        default="token",
        validation_alias=AliasChoices("rollout_is", "rollout_is_level"),
        description="Importance weights per token, or the product over the sequence, or None for no weights.",
    )
    rollout_is_threshold: float | str | None = Field(
        default=2.0, description='Upper bound C, or "low_high" such as "0.5_5.0" (IcePop), or None for weights without a bound.'
    )
    rollout_is_mode: Literal["truncate", "clip", "mask"] | None = Field(
        default=None,
        description="Weights outside the bounds: truncate to the upper one (TIS), clip to both, or mask, which sets 0 (IcePop; MIS with "
        "an upper bound alone). None: truncate with one bound, mask with two.",
    )
    rollout_is_batch_normalize: bool = Field(default=False, description="Divide the weights by their mean.")
    rollout_rs: str | None = Field(
        default=None,
        description=f"Rejections, several with commas between: {', '.join(REJECTION_OPTIONS)}.",
    )
    rollout_rs_threshold: float | str | None = Field(
        default=None,
        description='One for all rejections or one each, with commas between: k1 a ratio interval "low_high", or its upper end alone, '
        "whose inverse is then the lower; k2 and k3 an upper bound of the divergence.",
    )
    rollout_token_veto_threshold: float | None = Field(
        default=None, description="Reject a sequence with a token whose ratio is below this, such as 1e-4."
    )
    bypass_mode: bool = Field(
        default=False, description="Take the rollout policy as the old policy: no old log-probs are computed, the ratio is against it."
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        default="ppo_clip", description="reinforce, in bypass mode alone: no ratio in the loss, the importance weight corrects instead."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("preset") not in Preset.__args__:
            return values
        preset = preset_values(values["preset"])
        given = {("rollout_is" if name == "rollout_is_level" else name): value for name, value in values.items()}
        for name in _STRUCTURE:
            if name in given and given[name] != preset[name]:
                raise ConfigError(
                    f"correction.{name} is {given[name]!r}, but correction.preset is {values['preset']} and means {preset[name]!r}: remove "
                    "one of the two."
                )
        return {**preset, **given}

    @model_validator(mode="after")
    def _check(self) -> "CorrectionConfig":
        """Thresholds can be read, so that a mistake shows when the file is parsed."""
        _ = self.is_bounds, self.rejections
        if self.rollout_is_mode in ("clip", "mask") and self.rollout_is_threshold is None:
            raise ConfigError(f"correction.rollout_is_mode is {self.rollout_is_mode}, but rollout_is_threshold is None: give a bound.")
        if self.rollout_is_mode == "truncate" and self.is_bounds[0] > 0:
            raise ConfigError(
                f"correction.rollout_is_mode is truncate, but rollout_is_threshold is {self.rollout_is_threshold!r} and has a lower bound: "
                "use clip or mask, or give the upper bound alone."
            )
        if self.rollout_token_veto_threshold is not None and not 0 < self.rollout_token_veto_threshold < 1:
            raise ConfigError(
                f"correction.rollout_token_veto_threshold is {self.rollout_token_veto_threshold}, but a ratio that is vetoed is between 0 "
                "and 1: use for example 1e-4, or null for none."
            )
        return self

    @property
    def is_bounds(self) -> tuple[float, float]:
        """``(low, high)`` of the importance weights; 0 and infinity where there is no bound. Raises ConfigError."""
        if self.rollout_is_threshold is None:
            return 0.0, float("inf")
        return _bounds("correction.rollout_is_threshold", self.rollout_is_threshold, lambda high: 0.0)

    @property
    def mismatch_threshold(self) -> float:
        """Ratio above which, and below whose inverse, the mismatch metrics count a token; 2 where weights have no bound."""
        return 2.0 if self.rollout_is_threshold is None else self.is_bounds[1]

    @property
    def is_mode(self) -> Literal["truncate", "clip", "mask"]:
        """What happens outside the bounds."""
        return self.rollout_is_mode or ("mask" if self.is_bounds[0] > 0 else "truncate")

    @property
    def rejections(self) -> tuple[RejectionRule, ...]:
        """Rules of the chain, in order; a token must pass all. Raises ConfigError."""
        field = "correction.rollout_rs_threshold"
        if self.rollout_rs is None:
            return ()
        options = [option.strip() for option in self.rollout_rs.split(",")]
        unknown = [option for option in options if option not in REJECTION_OPTIONS]
        if unknown or len(set(options)) < len(options):
            raise ConfigError(
                f"correction.rollout_rs is {self.rollout_rs!r}, but {unknown[0] + ' is unknown' if unknown else 'an option comes twice'}: "
                f"use {', '.join(REJECTION_OPTIONS)}, once each, with commas between."
            )
        if self.rollout_rs_threshold is None:
            raise ConfigError(f"{field} is not set, but correction.rollout_rs is {self.rollout_rs!r}: give a bound for each option.")
        texts = str(self.rollout_rs_threshold).split(",")
        if len(texts) not in (1, len(options)):
            raise ConfigError(f"{field} has {len(texts)} bounds, but correction.rollout_rs {len(options)} options: give one or as many.")
        return tuple(_rule(field, o, t) for o, t in zip(options, texts * (len(options) if len(texts) == 1 else 1), strict=True))

    @property
    def corrects(self) -> bool:
        """Whether there is a weight or a rejection at all."""
        return self.rollout_is is not None or self.rollout_rs is not None or self.rollout_token_veto_threshold is not None


def _rule(field: str, option: str, text: str) -> RejectionRule:
    if option in RATIO_OPTIONS:
        low, high = _bounds(field, text, lambda high: 1.0 / high)
        if low > high:
            raise ConfigError(f"{field} is {text!r} for {option}, whose inverse is above it: write an interval low_high of the ratio.")
        return RejectionRule(option=option, low=low, high=high)
    low, high = _bounds(field, text, lambda high: 0.0)
    if low > 0:
        raise ConfigError(f"{field} is {text!r}, but {option} is a divergence and has no lower bound: give the upper bound alone.")
    return RejectionRule(option=option, low=0.0, high=high)


def _bounds(field: str, value: float | str, default_low: Any) -> tuple[float, float]:
    """``(low, high)`` of a number or of ``"low_high"``."""
    try:
        numbers = [float(part) for part in str(value).strip().split("_")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and 0 < numbers[0] < float("inf"):
        return default_low(numbers[0]), numbers[0]
    if len(numbers) == 2 and 0 < numbers[0] < numbers[1] < float("inf"):
        return numbers[0], numbers[1]
    raise ConfigError(f'{field} is {value!r}, but must be a positive number or two growing ones as in "0.5_5.0": rewrite it.')
