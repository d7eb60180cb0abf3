"""Weights and config.json of models for the tests, made of a configuration; imports no engine."""

from collections.abc import Iterator

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.config.validation import linear_modules
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.types import ExportedTensor


def hf_config(cfg: Config) -> dict:
    """config.json of the configured model, as transformers writes it."""
    m = cfg.model
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    names += ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "vocab_size", "rope_theta", "rms_norm_eps")
    names += ("max_position_embeddings", "tie_word_embeddings")
    config = {name: getattr(m, name) for name in names}
    config |= {"model_type": m.architecture, "architectures": ["Qwen3MoeForCausalLM" if m.is_moe else "Qwen3ForCausalLM"]}
    config |= {"hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16", "decoder_sparse_step": 1, "mlp_only_layers": []}
    plan = QuantizationPlan.from_config(cfg)
    if plan.rollout_fp8:
        config["quantization_config"] = plan.hf_quantization_config(m)
    return config


def random_weights(cfg: Config, seed: int) -> dict[str, torch.Tensor]:
    """A full set of HF tensors; module list and quantization come from the plan, not from the rollout stage."""
    generator, plan, m = torch.Generator().manual_seed(seed), QuantizationPlan.from_config(cfg), cfg.model
    norms = {"model.norm": m.hidden_size}
    for i in range(m.num_hidden_layers):
        norms |= {f"model.layers.{i}.{n}": m.hidden_size for n in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"model.layers.{i}.self_attn.{n}": m.head_dim for n in ("q_norm", "k_norm")}
    weights = {f"{name}.weight": (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16() for name, size in norms.items()}
    weights["model.embed_tokens.weight"] = torch.randn(m.vocab_size, m.hidden_size, generator=generator).bfloat16()
    for name, rows, columns in linear_modules(m):
        weight = (0.06 * torch.randn(rows, columns, generator=generator)).bfloat16()
        if plan.rollout_fp8 and plan.is_fp8(name):
            block = quantize_blockwise(weight, E4M3, "128x128", power_2_scale=plan.weight_power_2_scale)
            weights |= {f"{name}.weight": block.codes, f"{name}.weight_scale_inv": block.scale_inv}
        else:
            weights[f"{name}.weight"] = weight
    return weights


def exported(weights: dict[str, torch.Tensor]) -> Iterator[ExportedTensor]:
    return (ExportedTensor(name=name, tensor=tensor) for name, tensor in weights.items())
