"""The CUDA kernels of the shared operators without a GPU: under Triton's interpreter, and compiled for Hopper."""

import os
import re
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

    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    norm = {"K": 4096, "BLOCK": 4096, "residual_ptr": None, "sum_ptr": None}
    for kernel, constants in ((kernels._rms_norm, norm), (kernels._silu_and_mul, {"WIDTH": 12288, "BLOCK": 1024})):
        warps = {"num_warps": 8} if kernel is kernels._rms_norm else {}
        ptx = compiled(kernel, pointers | {"epsilon": "fp32"}, constants, **warps)
        assert "ld.global.v4.b32" in ptx
        assert not re.search(r"fma\.rn\.f32|ld\.global\.b16", ptx)


def test_the_heads_product_runs_on_the_tensor_cores():
    from e2e_fp8.numerics.row_kernels_cuda import _matmul

    tile = {"N": 151_936, "K": 4096, "BM": 128, "BN": 128, "BK": 64, "GROUP": 16}
    ptx = compiled(_matmul, {"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp32"}, tile, num_warps=8, num_stages=3)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg" in ptx
