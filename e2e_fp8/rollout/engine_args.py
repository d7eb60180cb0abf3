"""What a run's configuration means as arguments of vLLM, in process and as a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e_fp8.config.alignment import ALIGNMENT_KEY, choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.rollout.router_gate import router_options

STEP_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of one engine step where nobody says: as many as keep the device busy while the host prepares the next."""


def compilation_config(choices: Mapping[str, str], device: str) -> dict[str, Any]:
    """vLLM's compilation; with an operator shared with the trainer, CUDA graphs of decoding alone, which replay the same kernels.

    Compiled code fuses operators and so rounds differently. ``rollout.enforce_eager`` turns graphs off as well.
    """
    # These passes quantize inside other kernels and drop the configured rounding of scales.
    config: dict[str, Any] = {"pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}
    if device == "cuda" and any(choice != "native" for choice in choices.values()):
        config |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return config


def engine_args(cfg: Config, model_dir: Path, *, device: str, is_moe: bool, fp8: bool) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for a run; a pure function of its inputs."""
    rollout, choices = cfg.rollout, choices_of(cfg.numerics)
    args: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": cfg.run.seed,
        "generation_config": "vllm",
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens or max(STEP_TOKENS[device], rollout.max_num_seqs, rollout.max_model_len),
        # vLLM rewinds the generator of a request whose prompt it cuts, and a CPU generator cannot be rewound
        "enable_chunked_prefill": device != "cpu",
        "tensor_parallel_size": rollout.tensor_parallel,
        "enforce_eager": rollout.enforce_eager or device == "cpu",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "hf_overrides": {"head_dtype": cfg.numerics.head_dtype},
        "weight_transfer_config": {"backend": "e2e_fp8_local"},
        "enable_return_routed_experts": is_moe and rollout.capture_routed_experts,
        "compilation_config": compilation_config(choices, device),
        "additional_config": {
            "e2e_fp8": {
                "power_2_scale": cfg.numerics.activation_power_2_scale,
                "amax_epsilon": cfg.numerics.amax_epsilon,
                ALIGNMENT_KEY: choices,
                **router_options(cfg),
            },
        },
        "disable_log_stats": True,
    }
    if rollout.expert_parallel:
        args["enable_expert_parallel"] = True
    if device == "cuda":
        args["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        if rollout.kv_cache_gib is not None:
            # vLLM still asks for its share to be free at the start
            args |= {"kv_cache_memory_bytes": rollout.kv_cache_gib << 30, "gpu_memory_utilization": 0.02}
        args["enable_sleep_mode"] = rollout.sleep_level > 0
        if is_moe and fp8:
            args["moe_backend"] = rollout.moe_backend
    return args
