"""Environment switches that change numerics: what each does, and whether its value contradicts a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from e2e_fp8.config.beside import fp8_models
from e2e_fp8.config.root import Config
from e2e_fp8.rollout.environment import rollout_environment

# name -> (what it does, grounds that read it)
EFFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (
        "1: Transformer Engine keeps exact FP32 block scales; otherwise powers of two; read at import",
        ("cuda",),
    ),
    "NVTE_BACKWARD_OVERRIDE": ("replaces the FP8 backward pass of Transformer Engine by a high-precision one", ("cuda",)),
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": ("other grouped matrix product, refuses Megatron's padded splits", ("cuda",)),
    "VLLM_USE_DEEP_GEMM_E8M0": ("1, vLLM's default: requantizes loaded weights to power-of-two scales, so the bytes change", ("cuda",)),
    "VLLM_USE_DEEP_GEMM": ("0: CUTLASS and Triton kernels instead of DeepGEMM; Triton's differ from the trainer's products", ("cuda",)),
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": ("1, vLLM's default: FlashInfer quantizes activations its own way below 32 rows", ("cuda",)),
    "VLLM_USE_FLASHINFER_SAMPLER": ("1: FlashInfer's sampler, without per-request seeds", ("cuda",)),
    "VLLM_BATCH_INVARIANT": ("1: batch-invariant kernels; for MoE this means Triton", ("cuda",)),
    "VLLM_DEEP_GEMM_WARMUP": ("compiles kernels at start; costs minutes, changes no value", ()),
    "VLLM_DISABLED_KERNELS": ("removes kernels from vLLM's selection, so another one multiplies", ("cpu", "cuda")),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (
        "1, vLLM's default: the engine runs in another process, out of reach of local delivery",
        ("cpu", "cuda"),
    ),
    "VLLM_CPU_SGL_KERNEL": ("1: packs CPU weights into another layout", ("cpu",)),
    "E2E_FP8_CAPTURE_GATE_WEIGHTS": (
        "1: vLLM records gate weights beside expert ids, for router replay; changes no value",
        ("cpu", "cuda"),
    ),
    "VLLM_CPU_KVCACHE_SPACE": ("KV cache in GiB; changes no value", ("cpu",)),
    "TORCH_COMPILE_DISABLE": ("1: no compiled code, whose rounding differs from the reference arithmetic", ("cpu",)),
    "NVIDIA_TF32_OVERRIDE": ("1: FP32 products, the logits among them, run in TF32 with 10 mantissa bits", ("cuda",)),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("1: torch runs FP32 products in TF32", ("cuda",)),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8 or :16:8 make cuBLAS deterministic over streams; changes kernel choice", ()),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1: kernel order as Megatron expects; changes no value", ()),
    "OMP_NUM_THREADS": ("threads of CPU products; another count may sum in another order", ()),
}
# Values refused whatever the configuration says, with FP8 on the side that reads them.
_FORBIDDEN = {
    "NVTE_BACKWARD_OVERRIDE": lambda value: value != "",
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": lambda value: value == "1",
    "VLLM_USE_DEEP_GEMM": lambda value: value == "0",
    "VLLM_DISABLED_KERNELS": lambda value: value != "",
    "NVIDIA_TF32_OVERRIDE": lambda value: value == "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": lambda value: value == "1",
}
_SETTABLE = {"VLLM_DEEP_GEMM_WARMUP", "VLLM_NO_USAGE_STATS"}
"""Preferences that a run sets when absent and a user may change."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One environment variable."""

    name: str
    value: str
    """Its value, or ``unset``."""
    effect: str
    status: str
    """``ok``, ``unset, run sets X``, or ``contradicts ...``."""
    blocks: tuple[str, ...] = ()
    """Grounds that refuse to run with this value."""


def required_values(cfg: Config | None, ground: str) -> dict[str, str]:
    """Values a run on ``ground`` sets itself when they are unset, and refuses to replace; the default configuration for None."""
    cfg = cfg or Config()
    values = {k: v for k, v in rollout_environment(cfg, device=ground).items() if k not in _SETTABLE}
    if ground == "cuda" and fp8_models(cfg):
        values["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1" if cfg.numerics.any_fp32_scale else "0"
    return values


def check_switches(cfg: Config | None, environ: Mapping[str, str]) -> tuple[Switch, ...]:
    """One ``Switch`` for each variable of ``EFFECTS``, judged against ``cfg``."""
    required = {ground: required_values(cfg, ground) for ground in ("cpu", "cuda")}
    return tuple(_judge(name, environ.get(name), required) for name in EFFECTS)


def _judge(name: str, value: str | None, required: dict[str, dict[str, str]]) -> Switch:
    effect, readers = EFFECTS[name]
    wanted = {ground: required[ground][name] for ground in readers if name in required[ground]}
    if value is None:
        status = f"unset, a run sets {' or '.join(dict.fromkeys(wanted.values()))}" if wanted else "ok"
        return Switch(name=name, value="unset", effect=effect, status=status)
    blocks = tuple(ground for ground, want in wanted.items() if value != want)
    if blocks:
        want = " or ".join(dict.fromkeys(wanted[ground] for ground in blocks))
        return Switch(name=name, value=value, effect=effect, status=f"contradicts the configuration, which needs {want}", blocks=blocks)
    if name in _FORBIDDEN and _FORBIDDEN[name](value):
        return Switch(name=name, value=value, effect=effect, status="contradicts the verified numerics", blocks=readers)
    return Switch(name=name, value=value, effect=effect, status="ok")
