"""RMSNorm of the CPU ground, and of both grounds where the engine shares it.

Megatron's wrapper of torch's norm refuses sequence parallelism, which this one knows.
"""

from typing import Any

import torch

from e2e_fp8.errors import ConfigError


def rms_norm(
    config: Any, hidden_size: int, eps: float = 1e-5, norm_class: type[torch.nn.RMSNorm] = torch.nn.RMSNorm, **unused: Any
) -> torch.nn.RMSNorm:
    """RMSNorm over the last axis; each tensor rank sees its own tokens, so its weight gradient is summed over them.

    Raises:
        ConfigError: the configuration asks for another normalization.
    """
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ConfigError("The trainer has RMSNorm only, without zero-centred weights.")
    norm = norm_class(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return norm
