"""Rewards before advantages: DAPO's soft overlong punishment, and the KL to the reference taken off the reward."""

import torch


def soft_overlong_penalty(lengths_N: torch.Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> torch.Tensor:
    """Not positive, ``[N]`` float32: 0 up to ``max_tokens - buffer_tokens``, then linear down to ``-penalty`` at ``max_tokens`` and beyond.

    Source: DAPO, arXiv 2503.14476, equation 13. ``buffer_tokens`` 0 punishes nothing.

    Raises:
        ValueError: the buffer is negative or not shorter than the limit.
    """
    if not 0 <= buffer_tokens < max_tokens:
        raise ValueError(f"a buffer of {buffer_tokens} tokens does not fit below {max_tokens}")
    if buffer_tokens == 0:
        return torch.zeros(lengths_N.shape)
    over = (lengths_N.float() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * over.clamp(0.0, 1.0)
