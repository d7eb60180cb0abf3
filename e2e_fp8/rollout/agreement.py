"""Preflight: what the trainer plans and what the engine's workers will compute with, compared before anything starts."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from e2e_fp8.config.alignment import CAUSES, choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.config.validation import linear_modules
from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.rollout.environment import NUMERIC_SWITCHES, check_environment
from e2e_fp8.rollout.live_operators import SAMPLER_CAUSES, live_operators
from e2e_fp8.rollout.router_gate import engine_precision, live_precision
from e2e_fp8.rollout.shared_operators import engine_choices
from e2e_fp8.sync.process_group import nccl_device

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = ".mlp.experts"
_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
"""Without scales of their own: nobody delivers those of a quantized cache, and sleep loses them."""
_WEIGHT_ONLY = ("MARLIN", "HUMMING")
"""Kernels that do not compute what the trainer does, whatever the plan says."""
_SAMPLER = "Set VLLM_USE_V2_MODEL_RUNNER=0 for it, or start it with the run's additional_config."
_REMEDIES: dict[str, str] = dict.fromkeys(SAMPLER_CAUSES, _SAMPLER)
"""Cause -> what to do about a layer with another operator than planned."""
_FORBIDDEN_SWITCHES = ("VLLM_DISABLED_KERNELS", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def planned_facts(cfg: Config) -> dict[str, Any]:
    """The trainer's side of the comparison: ``modules`` (HF linear module, all experts of a layer as one -> ``fp8`` or
    ``bf16``), ``power_2_scale`` (None without FP8), ``amax_epsilon``, ``head_dtype``, ``router_precision`` (None without experts)."""
    plan = QuantizationPlan.from_config(cfg)
    modules = {}
    for name, _, _ in linear_modules(cfg.model, experts=1):
        collapsed = name.partition(_EXPERTS)[0] + _EXPERTS if _EXPERTS in name else name
        modules[collapsed] = "fp8" if plan.rollout_fp8 and plan.is_fp8(name) else "bf16"
    if cfg.model.tie_word_embeddings:
        modules.pop("lm_head", None)
    return {
        "modules": dict(sorted(modules.items())),
        "power_2_scale": plan.power_2_scale if plan.rollout_fp8 else None,
        "amax_epsilon": plan.amax_epsilon if plan.rollout_fp8 else None,
        "head_dtype": cfg.numerics.head_dtype,
        "router_precision": engine_precision(cfg),
    }


def plan_digest(facts: Mapping[str, Any]) -> str:
    """SHA-256 of planned or live facts; equal digests mean equal plans."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def worker_facts(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> dict[str, Any]:
    """What a worker computes with, as JSON values: ``plan`` (live facts, as :func:`planned_facts`) and ``plan_digest``,
    ``kernels`` (quantization method and kernel -> number of layers), ``device``, ``nccl_device``, see
    :func:`~e2e_fp8.sync.process_group.nccl_device`, ``capability``, ``environment`` (the switches that change numerics), ``alignment``
    (cause -> choice), ``operators`` (what is live, by cause, see :func:`e2e_fp8.rollout.live_operators.live_operators`),
    ``tensor_parallel``, ``kv_cache_dtype``, ``pid`` and versions."""
    plan = _live_plan(model, vllm_config, device)
    cuda = device.type == "cuda"
    index = torch.cuda.current_device() if cuda else 0
    return {
        "plan": plan,
        "plan_digest": plan_digest(plan),
        "kernels": dict(sorted(Counter(filter(None, map(_kernel_of, model.modules()))).items())),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(index) if cuda else "cpu",
        "nccl_device": nccl_device(index) if cuda else "",
        "capability": list(torch.cuda.get_device_capability(index)) if cuda else [],
        "environment": {name: os.environ[name] for name in NUMERIC_SWITCHES if name in os.environ},
        "alignment": engine_choices(vllm_config),
        "operators": live_operators(model, vllm_config, device),
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "pid": os.getpid(),
        "torch": str(torch.__version__),
    }


def _live_plan(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> dict[str, Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    tied = bool(getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False))
    modules = {}
    for name, module in model.named_modules():
        kind = _precision_of(module)
        if kind is None or (isinstance(module, ParallelLMHead) and tied):
            continue
        parent, _, leaf = name.rpartition(".")
        if _EXPERTS in name:
            modules[name.partition(_EXPERTS)[0] + _EXPERTS] = kind
        else:
            for part in _FUSED.get(leaf, (leaf,)):
                modules[f"{parent}.{part}" if parent else part] = kind
    fp8 = "fp8" in modules.values()
    options = (vllm_config.additional_config or {}).get("e2e_fp8", {})
    return {
        "modules": dict(sorted(modules.items())),
        "power_2_scale": _power_2_scale(options, device) if fp8 else None,
        "amax_epsilon": options.get("amax_epsilon") if fp8 else None,
        "head_dtype": str(vllm_config.model_config.head_dtype).removeprefix("torch."),
        "router_precision": live_precision(model),
    }


def _power_2_scale(options: Mapping[str, Any], device: torch.device) -> bool:
    if device.type == "cuda":
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        return bool(is_deep_gemm_e8m0_used())
    return bool(options["power_2_scale"])


def _precision_of(module: torch.nn.Module) -> str | None:
    """``fp8`` or ``bf16`` for a linear layer, an output head or a set of experts; None for anything else."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not isinstance(module, LinearBase | RoutedExperts | ParallelLMHead):
        return None
    return "fp8" if isinstance(module.quant_method, Fp8LinearMethod | Fp8MoEMethod) else "bf16"


def _kernel_of(module: torch.nn.Module) -> str | None:
    if _precision_of(module) is None:
        return None
    method: Any = module.quant_method
    kernel = getattr(method, "fp8_linear", None)
    backend = getattr(method, "fp8_backend", None)
    chosen = type(kernel).__name__ if kernel is not None else getattr(backend, "name", None)
    return type(method).__name__ + (f"/{chosen}" if chosen else "")


def check_agreement(cfg: Config, workers: Sequence[Mapping[str, Any]]) -> None:
    """Compare the trainer's plan with what every worker reported.

    Raises EngineError with one sentence for the first disagreement: device, switch, scale rounding, module, head, kernel; and
    ConfigError for a switch that contradicts the configuration.
    """
    planned = planned_facts(cfg)
    for rank, worker in enumerate(workers):
        where = f"rollout rank {rank} (pid {worker['pid']})"
        if cfg.run.backend not in ("auto", worker["device"]):
            raise EngineError(f"The trainer runs on {cfg.run.backend} and {where} on {worker['device']}: start both on one ground.")
        if worker["tensor_parallel"] != cfg.rollout.tensor_parallel:
            raise EngineError(
                f"rollout.tensor_parallel is {cfg.rollout.tensor_parallel}, but {where} is one of {worker['tensor_parallel']}: "
                "change either."
            )
        if worker["kv_cache_dtype"] not in _KV_CACHE_DTYPES:
            raise EngineError(
                f"{where} keeps its KV cache in {worker['kv_cache_dtype']}, whose scales no weight update delivers: start it with "
                "--kv-cache-dtype auto."
            )
        fp8 = planned["power_2_scale"] is not None
        if fp8 and worker["device"] == "cuda" and list(worker["capability"]) != [9, 0]:
            raise EngineError(
                f"{where} runs on compute capability {worker['capability']}: block FP8 with these kernels needs 9.0 (Hopper)."
            )
        for name in _FORBIDDEN_SWITCHES:
            if worker["environment"].get(name, "") not in ("", "0"):
                raise EngineError(f"{name} is {worker['environment'][name]!r} at {where}, which changes products or kernels: unset it.")
        _check_alignment(cfg, worker, where)
        check_environment(cfg, worker["environment"], device=worker["device"])
        _check_plan(planned, worker["plan"], where)
        _check_kernels(workers[0]["kernels"], worker["kernels"], where)


def _check_alignment(cfg: Config, worker: Mapping[str, Any], where: str) -> None:
    planned = choices_of(cfg.numerics)
    for name, choice in planned.items():
        if worker["alignment"][name] != choice:
            raise EngineError(
                f"numerics.alignment={cfg.numerics.alignment} asks for {name}={choice}, but {where} was started with "
                f"{worker['alignment'][name]}: pass the run's additional_config to vLLM."
            )
    if worker["device"] == "cuda":
        _check_operators(planned, worker["operators"], where, is_moe=cfg.model.is_moe)


def _check_operators(planned: Mapping[str, str], live: Mapping[str, Mapping[str, Any]], where: str, *, is_moe: bool) -> None:
    """Every layer of a GPU worker has the operator that its cause's choice says."""
    for name, choice in planned.items():
        # vLLM multiplies by the router's probabilities where the shared operator does
        in_engine = name != "router_probabilities" and (is_moe or not CAUSES[name].moe_only)
        if choice != "native" and in_engine and name not in live:
            raise EngineError(f"numerics.alignment asks for {name}={choice}, but {where} reports no layer that could have it.")
    for name, operators in live.items():
        wanted = "native" if planned[name] == "native" else "shared"
        if wanted == "native" and name in SAMPLER_CAUSES:
            # vLLM's own choice of a model runner may be the one that shares them
            continue
        other = "shared" if wanted == "native" else "native"
        if count := operators[other]:
            layers = ", ".join(operators[f"{other}_at"]) + (" and others" if count > len(operators[f"{other}_at"]) else "")
            raise EngineError(
                f"numerics.alignment asks for {name}={planned[name]}, but {count} layers at {where} have their {other} operator: {layers}. "
                f"{_REMEDIES.get(name, f'Set numerics.alignment_overrides.{name} to native.')}"
            )


def _check_kernels(first: Mapping[str, int], kernels: Mapping[str, int], where: str) -> None:
    for kernel, layers in kernels.items():
        if any(name in kernel.upper() for name in _WEIGHT_ONLY):
            raise EngineError(
                f"{where} serves {layers} layers with {kernel}, which repacks FP8 weights and multiplies BF16 activations: unset "
                "VLLM_TEST_FORCE_FP8_MARLIN, and leave rollout.moe_backend at deep_gemm."
            )
    for kernel in sorted(first.keys() | kernels.keys()):
        if first.get(kernel, 0) != kernels.get(kernel, 0):
            raise EngineError(
                f"{where} serves {kernels.get(kernel, 0)} layers with {kernel}, rollout rank 0 {first.get(kernel, 0)}: start all ranks "
                "with one vLLM, on the same kind of device, in the same environment."
            )


def _check_plan(planned: Mapping[str, Any], live: Mapping[str, Any], where: str) -> None:
    if plan_digest(planned) == plan_digest(live):
        return
    for name in sorted(planned["modules"].keys() | live["modules"].keys()):
        ours, theirs = planned["modules"].get(name, "absent"), live["modules"].get(name, "absent")
        if ours != theirs:
            raise EngineError(
                f"{name} is {ours} in the trainer's plan and {theirs} at {where}: start the server from the run's model folder, whose "
                "config.json carries the plan."
            )
    remedies = {
        "power_2_scale": "pass the run's additional_config, and set VLLM_USE_DEEP_GEMM_E8M0=0 for FP32 scales",
        "amax_epsilon": "pass the run's additional_config to vLLM",
        "router_precision": "pass the run's additional_config to vLLM",
        "head_dtype": 'pass --hf-overrides \'{"head_dtype": "float32"}\' to vLLM',
    }
    for name, remedy in remedies.items():
        if planned[name] != live[name]:
            raise EngineError(f"{name} is {planned[name]} in the trainer's plan and {live[name]} at {where}: {remedy}.")
