"""Tiny configurations of each family that the real model classes accept, and a launcher for groups of real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_COMMON = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def tiny_configs(layers: int = 2) -> dict[str, dict[str, Any]]:
    """Family -> config.json with block FP8; a router is never FP8. Qwen2.5's has fewer key-value heads than two ranks."""
    moe = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 256}
    qwen3_moe = {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
    latent = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    deepseek = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_key_value_heads": 4}
    deepseek |= {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
    deepseek |= {"num_nextn_predict_layers": 1}
    routers = [f"model.layers.{index}.mlp.gate" for index in range(layers)]
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen2": ("Qwen2ForCausalLM", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None, "tie_word_embeddings": True}),
        "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        "qwen3_moe": ("Qwen3MoeForCausalLM", moe | qwen3_moe),
        "llama": ("LlamaForCausalLM", {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}),
        "deepseek_v3": ("DeepseekV3ForCausalLM", moe | latent | deepseek | {"head_dim": None}),
    }
    configs = {}
    for family, (architecture, fields) in families.items():
        config = {"model_type": family, "architectures": [architecture], "num_hidden_layers": layers, "tie_word_embeddings": False}
        config |= _COMMON | fields | {"quantization_config": _FP8 | {"modules_to_not_convert": routers if family == "qwen3_moe" else []}}
        configs[family] = {name: value for name, value in config.items() if value is not None}
    return configs


def run_ranks(script: str, world_size: int, cases: dict[str, Any], folder: Path, timeout: float = 420.0) -> list[Any]:
    """Run ``script`` in ``world_size`` processes that know each other; what each wrote, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outs = [folder / f"rank{rank}.json" for rank in range(world_size)]
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank in range(world_size):
        command = [sys.executable, str(HERE / script), str(rank), str(world_size), str(port), str(folder / "cases.json"), str(outs[rank])]
        with logs[rank].open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(out.read_text()) for out in outs]
