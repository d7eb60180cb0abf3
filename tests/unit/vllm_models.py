"""vLLM's own model classes, built without an engine: what the processes that ask them for names and parameters share."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SWITCHES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_SGL_KERNEL": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}


def allow_latent_attention() -> None:
    """Let DeepSeek's classes be built: vLLM's CPU platform has no kernels for latent attention and refuses at construction.

    The kernels own no parameter and are never run here.
    """
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = type(current_platform).get_attn_backend_cls

    def get_attn_backend_cls(selected_backend, attn_selector_config, num_heads=None):
        if attn_selector_config.use_mla:
            return AttentionBackendEnum.TRITON_MLA.get_path()
        return choose(selected_backend, attn_selector_config, num_heads)

    type(current_platform).get_attn_backend_cls = staticmethod(get_attn_backend_cls)
    MLAPrefillBackend.__abstractmethods__ = frozenset()
    mla_attention.get_mla_prefill_backend = lambda config: MLAPrefillBackend


def vllm_config(config: dict[str, Any], **sizes: Any) -> Any:
    """vLLM's configuration of the model with this config.json; ``sizes``: further engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        args = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            distributed_executor_backend="external_launcher",
            additional_config={"e2e_fp8": {"power_2_scale": False, "amax_epsilon": 0.0}},
            **sizes,
        )
        return args.create_engine_config()


@contextmanager
def building(config: Any, world_size: int, rank: int, method: str, *, tensor: int = 1) -> Iterator[None]:
    """Inside, models of ``config`` can be built: BF16, over real gloo groups of ``world_size`` processes that meet at ``method``."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(world_size, rank, method, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor, backend="gloo")
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(previous)
            parallel_state.destroy_model_parallel()
