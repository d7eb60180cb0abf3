"""Build Megatron-Core's real GPTModel on one of several gloo ranks and write down every parameter and the router's bias.

Usage: ``python trainer_parameters_process.py RANK WORLD_SIZE PORT CASES.json OUT.json``. A case has an HF config, Megatron's
parallel sizes and the spec, ``te`` needing a GPU with Transformer Engine.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_patches.cpu_device import megatron_on_cpu

Found = list[dict[str, list[int]]]


def transformer_config(hf: dict, case: dict):
    """Megatron's configuration of the model, as a foreign training script would write it."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = hf["model_type"] == "deepseek_v3"
    experts = hf.get("n_routed_experts") or hf.get("num_experts")
    options = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "tensor_model_parallel_size": case["tensor"],
        "pipeline_model_parallel_size": case["pipeline"],
        "virtual_pipeline_model_parallel_size": case.get("virtual_pipeline"),
        "expert_model_parallel_size": case["expert"],
        "expert_tensor_parallel_size": case["expert_tensor"],
        # torch's norms refuse sequence parallelism, and nothing is computed here
        "sequence_parallel": case["spec"] == "te" and bool(experts) and case["tensor"] > 1,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "normalization": "RMSNorm",
        "qk_layernorm": latent or hf["model_type"].startswith("qwen3"),
        "perform_initialization": False,
        "use_cpu_initialization": case["spec"] == "local",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    if experts:
        options |= {"num_moe_experts": experts, "moe_ffn_hidden_size": hf["moe_intermediate_size"], "moe_router_topk": 2}
        options |= {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": case["spec"] == "te"}
        options |= {"moe_layer_freq": [int(i >= hf.get("first_k_dense_replace", 0)) for i in range(hf["num_hidden_layers"])]}
    if not latent:
        return TransformerConfig(**options, num_query_groups=hf["num_key_value_heads"], kv_channels=hf.get("head_dim"))
    options |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    options |= {"moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"]}
    options |= {"multi_latent_attention": True, "q_lora_rank": hf["q_lora_rank"], "kv_lora_rank": hf["kv_lora_rank"]}
    options |= {"qk_head_dim": hf["qk_nope_head_dim"], "qk_pos_emb_head_dim": hf["qk_rope_head_dim"], "v_head_dim": hf["v_head_dim"]}
    return MLATransformerConfig(**options, rope_type="rope")


class UnusedAttention(torch.nn.Module):
    """Stands where Megatron's local spec fails for latent attention: its DotProductAttention, which owns no parameter, does not
    take latent attention's arguments."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()


def build(hf: dict, case: dict) -> Found:
    """``{name: shape}`` of each model chunk of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    parallel_state.initialize_model_parallel(
        case["tensor"],
        case["pipeline"],
        case.get("virtual_pipeline"),
        expert_model_parallel_size=case["expert"],
        expert_tensor_parallel_size=case["expert_tensor"],
    )
    config, found = transformer_config(hf, case), []
    chunks = case.get("virtual_pipeline") or 1
    stage, last = parallel_state.get_pipeline_model_parallel_rank(), case["pipeline"] - 1
    for chunk in range(chunks):
        stage_of = chunk if chunks > 1 else None
        if case["spec"] == "te" or config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(config, case["spec"] == "te", normalization="RMSNorm", vp_stage=stage_of)
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        for layer in spec.layer_specs if case["spec"] == "local" and hf["model_type"] == "deepseek_v3" else ():
            layer.submodules.self_attention.submodules.core_attention = UnusedAttention
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=-(-hf["vocab_size"] // case["tensor"]) * case["tensor"],
            max_sequence_length=64,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == last and chunk == chunks - 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            vp_stage=stage_of,
        )
        tensors = dict(model.named_parameters())
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}
        found.append({name: list(t.shape) for name, t in tensors.items()})
    parallel_state.destroy_model_parallel()
    return found


def main(rank: int, world_size: int, port: int, cases: Path, out: Path) -> None:
    wanted, found = json.loads(cases.read_text()), {}
    on_gpu = any(case["spec"] == "te" for case in wanted.values())
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    for name, case in wanted.items():
        if on_gpu:
            torch.cuda.set_device(rank)
            found[name] = build(case["config"], case)
        else:
            from e2e_fp8.patching import apply_all
            from megatron_patches.registry import CPU_PATCHES

            apply_all(CPU_PATCHES)
            with megatron_on_cpu():
                found[name] = build(case["config"], case)
    out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
