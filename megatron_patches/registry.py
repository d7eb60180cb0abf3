"""All replaced Megatron-Core functions. The list is short on purpose: what the spec can inject is not patched."""

from typing import Any

import torch

from e2e_fp8.patching import Patch


def _splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """``maybe_move_tensor_to_cpu`` that keeps its promise of a numpy array for tensors already on the CPU."""
    if not torch.is_tensor(tensor):
        return tensor
    if tensor.is_cuda:
        host = tensor.to(torch.device("cpu"), non_blocking=True)
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream())
        tensor = host
    return tensor.numpy() if as_numpy else tensor


CPU_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="moe_splits_to_host",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        also_bound_in=("megatron.core.transformer.moe.token_dispatcher",),
        distribution="megatron-core",
        versions=("0.19.2",),
        reason="as_numpy is honoured for CUDA tensors only; all_to_all split sizes stay tensors on the CPU and gloo refuses them.",
        upstream="not filed; megatron/core/transformer/moe/moe_utils.py",
        remove_when="upstream converts CPU tensors when as_numpy is set",
        source_sha256="8fc5847a887d73195b064efc01599f8768a48bbe3327b8fa50f34112cbbf1153",
        replacement=_splits_to_host,
    ),
)
"""Applied by the CPU ground before it builds a model."""
