"""Hugging Face ``config.json`` of Qwen3 and Qwen3-MoE, read into and written from the fields of ``ModelConfig``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.model import ModelConfig

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_COMMON = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
_MOE = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
# Values transformers assumes when a key is absent from config.json; keys not here must be present.
_HF_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "norm_topk_prob": False}
_HF_ROPE_THETA = 10_000.0
# Qwen3-MoE in transformers stores num_experts under either name.
_ALIASES = {"num_experts": "num_local_experts"}


def merge_hf_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the model section with the dimensions of ``values["hf_path"]`` filled in.

    Raises ConfigError when a field given beside ``hf_path`` differs from the directory's config.json.
    """
    hf_path = values.get("hf_path")
    if not isinstance(hf_path, str):
        return values
    fields = read_hf_fields(Path(hf_path))
    clashes = [f"{k} is {values[k]!r} here and {v!r} there" for k, v in fields.items() if k in values and values[k] != v]
    if clashes:
        raise ConfigError(
            f"model.hf_path and other model fields disagree: {'; '.join(clashes)} ({Path(hf_path) / 'config.json'}): "
            "remove these fields, the directory already fixes them."
        )
    return {**values, **fields}


def read_hf_fields(hf_path: Path) -> dict[str, Any]:
    """Read the ``ModelConfig`` fields that ``hf_path/config.json`` determines.

    Raises ConfigError for a missing or malformed file, another architecture, or a feature that is not implemented
    (sliding window, scaled rotary embedding, attention bias, dense layers inside an MoE).
    """
    path = hf_path / "config.json"
    hf = _load_json(path)
    model_type = hf.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"{path}: model_type is {model_type!r}, but only {' and '.join(ARCHITECTURES)} are supported: use a Qwen3 model.")
    _refuse_features(path, hf)
    fields: dict[str, Any] = {"architecture": model_type, "rope_theta": _rope_theta(path, hf)}
    for name in _COMMON + (_MOE if model_type == "qwen3_moe" else ()):
        key = name if name in hf else _ALIASES.get(name, name)
        if key not in hf and name not in _HF_DEFAULTS:
            raise ConfigError(f"{path}: {name} is missing, so the model cannot be sized: add it or download the file again.")
        fields[name] = hf.get(key, _HF_DEFAULTS.get(name))
    return fields


def to_hf_config(
    model: "ModelConfig",
    quantization_config: dict[str, Any] | None,
    *,
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """Build the ``config.json`` that transformers 5 and vLLM 0.26 read for ``model``.

    ``quantization_config`` is the block-FP8 entry (``quant_method`` fp8), or None for a BF16 checkpoint. The rotary base is
    written under ``rope_parameters`` (transformers 5) and ``rope_theta`` (transformers 4); both readers take either.
    """
    hf: dict[str, Any] = {"architectures": [ARCHITECTURES[model.architecture]], "model_type": model.architecture}
    hf |= {name: getattr(model, name) for name in _COMMON}
    hf |= {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eos_token_id": eos_token_id,
        "bos_token_id": bos_token_id,
        "pad_token_id": pad_token_id,
    }
    if model.is_moe:
        hf |= {name: getattr(model, name) for name in _MOE}
        hf |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.0}
    if quantization_config is not None:
        hf["quantization_config"] = quantization_config
    return hf


def _load_json(path: Path) -> dict[str, Any]:
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ConfigError(f"{path} does not exist: model.hf_path must be a local directory holding config.json.") from err
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read ({err}): check model.hf_path and its permissions.") from err
    except json.JSONDecodeError as err:
        raise ConfigError(f"{path} is not valid JSON (line {err.lineno}: {err.msg}): download it again.") from err
    if not isinstance(hf, dict):
        raise ConfigError(f"{path} holds a {type(hf).__name__}, not an object: download it again.")
    return hf


def _rope_theta(path: Path, hf: dict[str, Any]) -> float:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or float(rope.get("factor") or 1.0) != 1.0:
        raise ConfigError(
            f"{path}: rope scaling {kind!r} is not implemented on the training side: use a model with plain rotary embedding."
        )
    return float(rope.get("rope_theta", hf.get("rope_theta", _HF_ROPE_THETA)))


def _refuse_features(path: Path, hf: dict[str, Any]) -> None:
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ConfigError(f"{path}: sliding-window attention is not implemented on the training side: use a full-attention model.")
    if hf.get("attention_bias"):
        raise ConfigError(f"{path}: attention_bias is true, but the projections here have no bias: use a model without it.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act is {hf['hidden_act']!r}, but only silu (SwiGLU) is implemented: use a Qwen3 model.")
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{path}: mlp_only_layers {hf.get('mlp_only_layers')} and decoder_sparse_step {hf.get('decoder_sparse_step', 1)} mix dense "
            "layers into the MoE, which is not implemented: use a model whose every layer is a mixture."
        )
