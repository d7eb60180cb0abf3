"""Why a trainer and an engine on the same bytes give different log-probs: the causes, and what each can be set to. Torch-free.

The one table of ``numerics.alignment``. A cause has two or more named choices; ``native`` leaves both sides their own operator. A level
picks a choice for every cause, and ``numerics.alignment_overrides`` replaces single ones, so that causes can be switched one at a time.
Trainer and engine read :func:`choices_of` and nothing else. docs/alignment.md is the same table with the measured sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.numerics import NumericsConfig
    from e2e_fp8.config.root import Config

Level = Literal["fast", "aligned", "bitwise"]
ALIGNMENT_KEY = "alignment"
"""Key of the resolved choices inside the engine's ``additional_config["e2e_fp8"]``."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one choice means on each side."""

    trainer: str
    rollout: str
    row_invariant: bool
    """Whether a row keeps its bits in any batch, chunk or packing on both sides."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason for different bits, and its possible settings."""

    name: str
    links: tuple[str, ...]
    """Modules of the parity chain (e2e_fp8.alignment.capture) that show it first."""
    choices: Mapping[str, Choice]
    aligned: str
    bitwise: str
    moe_only: bool = False
    fast: str = "native"

    def at(self, level: Level) -> str:
        """Name of the choice at a level."""
        return {"fast": self.fast, "aligned": self.aligned, "bitwise": self.bitwise}[level]


def _both(trainer: str, rollout: str) -> Choice:
    return Choice(trainer=trainer, rollout=rollout, row_invariant=False)


def _same(text: str) -> Choice:
    return Choice(trainer=text, rollout=text, row_invariant=True)


_NORM = _same("sum of squares in a fixed FP32 order (16 lanes on the CPU), weight applied in FP32, one rounding to BF16")
_PRODUCT = _same("FP32 logits, every sum over K in order (CPU), in one tile shape for any number of rows (GPU)")
_TABLE = (
    Cause(
        name="rms_norm",
        links=("input_norm", "post_attention_norm"),
        choices={
            "native": _both("torch RMSNorm (CPU), Transformer Engine (GPU)", "vLLM rms_norm, which rounds before the weight"),
            "shared": _NORM,
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="residual_add",
        links=("post_attention_norm", "input_norm", "final_norm"),
        choices={
            "native": _both("normalises the BF16 sum", "normalises the FP32 sum before it is rounded (CPU); the BF16 sum (GPU)"),
            "shared": _same("normalises the BF16 sum"),
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="qk_norm",
        links=("q_norm", "k_norm"),
        choices={"native": _both("as rms_norm", "as rms_norm"), "shared": _NORM},
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="rotary",
        links=("q_rotary", "k_rotary"),
        choices={
            "native": _both(
                "Megatron: BF16 angles, every product and sum rounded to BF16", "vLLM rotary_embedding: BF16 table, its own rounding"
            ),
            "shared": _same("FP32 table from float64 angles, FP32 products, one rounding to BF16"),
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="attention",
        links=("attention",),
        choices={
            "native": _both(
                "scaled_dot_product_attention (CPU), varlen flash attention (GPU)", "vLLM's backend: another split when decoding"
            ),
            "shared": _same(
                "one query row at a time, keys in order, FP64 normaliser (CPU); FlashAttention 3 with one split of the keys (GPU)"
            ),
        },
        aligned="native",
        bitwise="shared",
    ),
    Cause(
        name="swiglu",
        links=("activation",),
        choices={
            "native": _both("silu(gate) rounded to BF16, then times up", "the same, vectorised differently"),
            "shared": _same("silu rounded to BF16, from one table (CPU), of one formula (GPU); then times up, rounded"),
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="router_gemm",
        links=("router_logits",),
        choices={
            "native": _both("FP32 logits of a BLAS product", "BF16 logits of a BLAS product"),
            "shared": _PRODUCT,
        },
        aligned="shared",
        bitwise="shared",
        moe_only=True,
    ),
    Cause(
        name="top_k",
        links=("router_weights",),
        choices={
            "native": _both("torch.topk over logits, ties undefined", "torch.topk over probabilities (CPU), ties undefined"),
            "shared": _same("largest logits, the lower expert wins a tie"),
        },
        aligned="shared",
        bitwise="shared",
        moe_only=True,
    ),
    Cause(
        name="gate_normalization",
        links=("router_weights",),
        choices={
            "native": _both("softmax over the chosen logits", "softmax over all, then divided by the chosen sum"),
            "shared": _same("softmax over all in FP64, divided by the chosen sum, rounded once to FP32"),
        },
        aligned="shared",
        bitwise="shared",
        moe_only=True,
    ),
    Cause(
        name="router_probabilities",
        links=("activation",),
        choices={
            "native": _both("multiply the input of fc2, before it is quantized", "multiply the output of down_proj"),
            "shared": _same("multiply the output of fc2 in FP32"),
        },
        aligned="shared",
        bitwise="shared",
        moe_only=True,
    ),
    Cause(
        name="combine",
        links=("mlp",),
        choices={
            "native": _both("summed in BF16 in the order of experts", "summed in FP32"),
            "shared": _same("summed in FP32 from the most to the least probable expert, rounded once"),
        },
        aligned="shared",
        bitwise="shared",
        moe_only=True,
    ),
    Cause(
        name="final_norm",
        links=("final_norm",),
        choices={"native": _both("as rms_norm", "as rms_norm"), "shared": _NORM},
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="head",
        links=("logits",),
        choices={
            "native": _both("FP32 logits of a BLAS product", "FP32 logits of a BLAS product"),
            "shared": _PRODUCT,
        },
        aligned="native",
        bitwise="shared",
    ),
    Cause(
        name="log_softmax",
        links=("log_probs",),
        choices={
            "native": _both("z - max - log(sum exp(z - max))", "torch.log_softmax"),
            "shared": _same("torch.log_softmax"),
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="temperature",
        links=("log_probs",),
        choices={
            "native": _both("logits / number, which CUDA turns into a product with its inverse", "logits / tensor"),
            "shared": _same("logits / FP32 tensor"),
        },
        aligned="shared",
        bitwise="shared",
    ),
    Cause(
        name="activation_scales",
        links=("qkv",),
        choices={
            "native": _both("448 / amax, inverted", "448 / amax, inverted (CPU); amax / 448 (GPU)"),
            "shared": _same("448 / amax, inverted"),
        },
        aligned="native",
        bitwise="shared",
    ),
)
MOE_CAUSES = ("swiglu", "router_gemm", "top_k", "gate_normalization", "router_probabilities", "combine")
"""Causes that live inside a mixture-of-experts layer; with one of them shared the trainer's layer is SharedMoELayer."""
CAUSES: dict[str, Cause] = {cause.name: cause for cause in _TABLE}
"""All causes by name, in the order in which a forward pass meets them (activation_scales, which the CPU does not have, last)."""


def choices_at(level: Level) -> dict[str, str]:
    """Cause -> choice of a level, without overrides."""
    return {name: cause.at(level) for name, cause in CAUSES.items()}


def choices_of(numerics: "NumericsConfig") -> dict[str, str]:
    """Cause -> choice of a configuration: the level's, then the overrides."""
    return choices_at(numerics.alignment) | dict(numerics.alignment_overrides)


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown cause or choice."""
    for name, choice in overrides.items():
        if name not in CAUSES:
            raise ConfigError(f"numerics.alignment_overrides names {name!r}, but the causes are {', '.join(CAUSES)}: use one of these.")
        if choice not in CAUSES[name].choices:
            known = ", ".join(CAUSES[name].choices)
            raise ConfigError(f"numerics.alignment_overrides.{name} is {choice!r}, but must be {known}: choose one of these.")


def check_alignment(cfg: "Config") -> None:
    """What shared operators need of the rest of the configuration.

    Raises:
        ConfigError: tensor parallelism, whose partial sums have an order of their own, or ``bitwise`` without FP8 on both sides.
    """
    numerics, parallel = cfg.numerics, cfg.training.parallel
    check_overrides(numerics.alignment_overrides)
    shared = [name for name, choice in choices_of(numerics).items() if choice != "native"]
    sizes = {
        "training.parallel.tensor": parallel.tensor,
        "training.parallel.expert_tensor": parallel.expert_tensor,
        "rollout.tensor_parallel": cfg.rollout.tensor_parallel,
    }
    for field, size in sizes.items():
        if shared and size != 1:
            raise ConfigError(
                f"numerics.alignment is {numerics.alignment}, but {field} is {size}: partial sums of several ranks round differently, "
                "so set it to 1, or numerics.alignment to fast."
            )
    if "router_gemm" in shared and numerics.router_precision != "mixed":
        raise ConfigError(
            f"numerics.router_precision is {numerics.router_precision}, but numerics.alignment {numerics.alignment} takes the router's "
            "product in FP32 on both sides: set router_precision to mixed, or numerics.alignment_overrides.router_gemm to native."
        )
    fp8 = numerics.training_precision == numerics.rollout_precision == "fp8"
    if numerics.alignment == "bitwise" and not fp8:
        raise ConfigError(
            f"numerics.alignment is bitwise, but numerics.training_precision is {numerics.training_precision} and rollout_precision "
            f"{numerics.rollout_precision}: only the FP8 products have one arithmetic on both sides. Set both to fp8, or alignment to fast."
        )
