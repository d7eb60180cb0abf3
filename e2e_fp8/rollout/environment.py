"""Environment variables that decide which bytes vLLM computes with.

They must be set before vLLM is imported. :func:`check_environment` refuses a user's value that would change bytes or
kernels; :func:`apply_environment` sets what is missing.
"""

import os
from collections.abc import Mapping, MutableMapping

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError

CAPTURE_GATE_WEIGHTS = "E2E_FP8_CAPTURE_GATE_WEIGHTS"
"""1: the plugin makes vLLM record gate weights beside expert ids."""
_REASONS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "rollout.placement says whether the engine lives in the trainer's process",
    "VLLM_USE_DEEP_GEMM_E8M0": "vLLM's default of 1 requantizes the delivered FP8 weights to power-of-two scales",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "FlashInfer's kernel quantizes activations differently at small batches",
    "VLLM_USE_FLASHINFER_SAMPLER": "FlashInfer's sampler ignores per-request seeds and processed log-probs",
    "TORCH_COMPILE_DISABLE": "compiled code rounds differently from the reference arithmetic and costs half a minute",
    "VLLM_CPU_KVCACHE_SPACE": "rollout.kv_cache_gib sets the size of the KV cache",
    "VLLM_CPU_SGL_KERNEL": "the packed kernel keeps no checkpoint layout",
    CAPTURE_GATE_WEIGHTS: "training.router_replay.mode replays gate weights, which vLLM then has to record",
}
NUMERIC_SWITCHES = (
    *_REASONS,
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_DISABLED_KERNELS",
    "VLLM_BATCH_INVARIANT",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that a rollout worker reports at start, because they change bytes, kernels or products."""


def rollout_environment(cfg: Config, *, device: str) -> dict[str, str]:
    """Variables the engine needs on ``device`` (``cpu`` or ``cuda``)."""
    in_process = cfg.rollout.placement == "in_process"
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1", "VLLM_NO_USAGE_STATS": "1"}
    if cfg.training.router_replay.needs_gate_weights:
        common[CAPTURE_GATE_WEIGHTS] = "1"
    if device == "cpu":
        if cfg.rollout.tensor_parallel > 1:
            # vLLM's own choice is one rank for each memory node, and refuses more ranks than there are nodes.
            cores = sorted(os.sched_getaffinity(0))
            common["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(cfg.rollout.tensor_parallel))
        return common | {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(cfg.rollout.kv_cache_gib or 1),
            "VLLM_CPU_SGL_KERNEL": "0",
        }
    return common | {
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }


def check_environment(cfg: Config, environ: Mapping[str, str], *, device: str) -> None:
    """Raise ConfigError when ``environ`` or ``cfg`` asks for other bytes or kernels than the trainer's.

    Only variables with an entry in the table of reasons are enforced; the others are preferences a user may change.
    """
    for name, wanted in rollout_environment(cfg, device=device).items():
        found = environ.get(name)
        if found is not None and found != wanted and name in _REASONS:
            raise ConfigError(f"Environment variable {name} is {found!r} but must be {wanted!r} or unset: {_REASONS[name]}.")
    fp8 = cfg.numerics.rollout_precision == "fp8"
    if device == "cuda" and fp8 and environ.get("VLLM_USE_DEEP_GEMM") not in (None, "1"):
        raise ConfigError("Environment variable VLLM_USE_DEEP_GEMM must be unset or 1: other kernels differ from the trainer's products.")
    if device == "cuda" and fp8 and cfg.numerics.activation_power_2_scale:
        field = "activation_scale_format" if cfg.numerics.activation_scale_format else "scale_format"
        raise ConfigError(
            f"numerics.{field}=pow2 is not supported with FP8 rollout on CUDA: vLLM would either requantize the weights or "
            f"quantize activations to FP32 scales. Use numerics.{field}=fp32, or the CPU backend."
        )
    if device == "cpu" and cfg.rollout.sleep_level:
        raise ConfigError(f"rollout.sleep_level is {cfg.rollout.sleep_level}, but vLLM's CPU build cannot sleep. Set it to 0.")
    if cfg.rollout.tensor_parallel != 1 and cfg.rollout.placement == "in_process":
        raise ConfigError(
            f"rollout.tensor_parallel is {cfg.rollout.tensor_parallel}, but the in-process engine drives one device. Set it to 1."
        )


def apply_environment(cfg: Config, *, device: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Check ``environ``, then set the variables it lacks.

    Raises ConfigError as :func:`check_environment` does.
    """
    check_environment(cfg, environ, device=device)
    for name, value in rollout_environment(cfg, device=device).items():
        environ.setdefault(name, value)
