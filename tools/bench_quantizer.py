"""Print what the CPU quantizer and linear take on this machine: ``python tools/bench_quantizer.py [--threads N]``.

Best of several calls, in milliseconds. The quantizer's own loops run on one thread; matrix products use ``--threads``.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from e2e_fp8.numerics.blockwise import TILE_SHAPES, quantize_blockwise
from e2e_fp8.numerics.linear import block_scaled_matmul, fp8_dgrad, fp8_wgrad


class HybridRecipe(NamedTuple):
    """E4M3 forward, E5M2 output gradients, FP32 scales."""

    forward_format: str = "e4m3"
    backward_format: str = "e5m2"
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def best_ms(call: Callable[[], object], repeats: int) -> float:
    """Shortest duration of ``call`` in milliseconds; one call before is not counted, as it may compile."""
    call()
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest * 1e3


def bench_quantizer() -> None:
    for shape, repeats in (((4096, 4096), 7), ((2400, 256), 50), ((256, 256), 200)):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape).to(dtype)
            for tile in TILE_SHAPES:
                ms = best_ms(lambda x=x, tile=tile: quantize_blockwise(x, "e4m3", tile, power_2_scale=False), repeats)  # type: ignore[misc]
                print(f"quantize {shape[0]:>4} x {shape[1]:<4} {str(dtype)[6:]:<8} {tile:<7} {ms:9.3f} ms")


def bench_linear() -> None:
    recipe = HybridRecipe()
    for tokens, out_features, in_features in ((8, 256, 256), (2400, 256, 256), (1024, 1024, 1024)):
        x, dy = torch.randn(tokens, in_features).bfloat16(), torch.randn(tokens, out_features).bfloat16()
        weight = quantize_blockwise(torch.randn(out_features, in_features), "e4m3", "128x128", power_2_scale=False)
        block = quantize_blockwise(x, "e4m3", "1x128", power_2_scale=False)
        calls = {
            "fprop": lambda block=block, weight=weight: block_scaled_matmul(block, weight, torch.bfloat16),
            "dgrad": lambda dy=dy, weight=weight: fp8_dgrad(dy, weight, recipe),
            "wgrad": lambda dy=dy, x=x: fp8_wgrad(dy, x, recipe),
        }
        for name, call in calls.items():
            print(f"{name} {tokens:>4} tokens {in_features:>4} -> {out_features:<4} {best_ms(call, 10):9.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the CPU quantizer and linear.")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    torch.set_num_threads(parser.parse_args().threads)
    bench_quantizer()
    bench_linear()


if __name__ == "__main__":
    main()
