"""Build vLLM's real model classes, without an engine, load a checkpoint with their own loaders, and write down every parameter.

Usage: ``python engine_parameters_process.py RANK WORLD_SIZE PORT CASES.json OUT.json``. Each case has an HF config, parallel
sizes (tensor x data = world size) and a checkpoint; OUT.json gets the name of a file with the parameters of each. Groups are real
gloo groups between WORLD_SIZE processes.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def load(model: torch.nn.Module, checkpoint: str) -> dict[str, torch.Tensor]:
    """Every parameter as vLLM's loader leaves it; what the loader does not touch has all bits set."""
    found = dict(model.named_parameters())
    for parameter in found.values():
        parameter.data.reshape(-1).view(torch.uint8).fill_(255)
    model.load_weights(load_file(checkpoint).items())  # pyright: ignore[reportCallIssue]
    return {name: parameter.detach().clone().contiguous() for name, parameter in found.items()}


def parameters(case: dict, rank: int, world_size: int, port: int) -> dict[str, torch.Tensor]:
    """The parameters of the model that vLLM builds on this rank, with the weights of the case's checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        args = EngineArgs(
            model=folder,
            tensor_parallel_size=case["tensor"],
            enable_expert_parallel=case["expert"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            distributed_executor_backend="external_launcher",
            additional_config={"e2e_fp8": {"power_2_scale": False, "amax_epsilon": 0.0}},
        )
        config = args.create_engine_config()
    config.parallel_config.data_parallel_size = case["data"]
    config.parallel_config.data_parallel_rank = rank // case["tensor"]
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            method = f"tcp://127.0.0.1:{port}"
            parallel_state.init_distributed_environment(world_size, rank, method, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(case["tensor"], backend="gloo")
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return load(initialize_model(config), case["checkpoint"])
        finally:
            torch.set_default_dtype(previous)
            parallel_state.destroy_model_parallel()


def main(rank: int, world_size: int, port: int, cases: Path, out: Path) -> None:
    # the executor, which is left out here, names the shared memory of one engine's ranks
    os.environ.update(SWITCHES, VLLM_DIST_IDENT=f"names-{port}")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    allow_latent_attention()
    found = {}
    for index, (name, case) in enumerate(json.loads(cases.read_text()).items()):
        found[name] = str(out.with_suffix(f".{index}.safetensors"))
        save_file(parameters(case, rank, world_size, port), found[name])
        gc.collect()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
