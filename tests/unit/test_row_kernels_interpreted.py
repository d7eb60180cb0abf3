"""The CUDA kernels of the shared operators without a GPU: under Triton's interpreter, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

INTERPRETED = Path(__file__).parent / "row_kernels_interpreted.py"


def test_kernels_are_the_operators_under_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, str(INTERPRETED)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split()[-1] == "ok"


def compiled(kernel, signature: dict[str, str], constants: dict, **options) -> str:
    """PTX for Hopper; pointers start at multiples of 16 bytes, as the launches see to."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in kernel.arg_names}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if types[name].startswith("*")}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, **options}).asm["ptx"]


def test_kernels_compile_to_vector_loads_without_contracted_products():
    """A norm's and an activation's rows are read 16 bytes at once, and no product is fused with the sum behind it."""
    from e2e_fp8.numerics import row_kernels_cuda as kernels

    rows, turns = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16") | {"epsilon": "fp32"}, {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    plain = {"residual_ptr": None, "sum_ptr": None}
    summed = rows | dict.fromkeys(("residual_ptr", "sum_ptr"), "*bf16")
    cases = [
        (kernels._rms_norm, rows, plain | {"K": 4096, "BLOCK": 4096, "ROWS": 1}, 8),
        (kernels._rms_norm, rows, plain | {"K": 128, "BLOCK": 128, "ROWS": 16}, 4),
        (kernels._rms_norm, summed, {"K": 2048, "BLOCK": 2048, "ROWS": 1}, 4),
        (kernels._silu_and_mul, rows, {"WIDTH": 12288, "BLOCK": 1024}, 4),
        (kernels._rotate, rows | turns, {"N": 32, "HALF": 64, "HEADS": 32, "BLOCK": 64}, 4),
    ]
    for kernel, signature, constants, warps in cases:
        ptx = compiled(kernel, signature, constants, num_warps=warps)
        assert "ld.global.v4.b32" in ptx, constants
        assert "fma.rn.f32" not in ptx, constants
        # rows that lie side by side read their weights, which one row of threads has, once and by element
        assert ptx.count("ld.global.b16") == (constants.get("ROWS", 1) > 1), constants


def test_the_heads_product_runs_on_the_tensor_cores():
    from e2e_fp8.numerics.row_kernels_cuda import _matmul

    tile = {"N": 151_936, "K": 4096, "BM": 128, "BN": 128, "BK": 64, "GROUP": 16}
    ptx = compiled(_matmul, {"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp32"}, tile, num_warps=8, num_stages=3)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg" in ptx
