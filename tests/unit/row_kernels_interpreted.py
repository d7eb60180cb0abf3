"""The CUDA kernels of the shared operators on CPU memory under Triton's interpreter, against the CPU's operators and float64.

Run with ``TRITON_INTERPRET=1``, which Triton reads when it is imported. Prints the seed, then ``ok``.
"""

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from e2e_fp8.numerics import row_fused_cuda, row_invariant, row_kernels_cuda
from e2e_fp8.numerics.blockwise import quantize_with_torch
from e2e_fp8.numerics.formats import E4M3

_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "fp8e4nv": torch.float8_e4m3fn}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def convert(data, source, target, rounding_mode):
    """The interpreter truncates where hardware rounds to nearest even."""
    before, after = _TYPES[source.name], _TYPES[target.name]
    bits = np.ascontiguousarray(data).view(f"{'u' if before.itemsize == 1 else 'i'}{before.itemsize}")
    converted = torch.from_numpy(bits.copy()).view(before).to(after)
    return converted.view(_BITS[after.itemsize]).numpy().view(f"u{after.itemsize}")


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """The interpreter multiplies the bit patterns of BF16 operands, and its BLAS takes another path for other shapes."""

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x.data
        return convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32).reshape(x.data.shape)

    return interpreter.TensorHandle(np.einsum("mk,kn->mn", wide(a), wide(b)) + d.data, d.dtype.scalar)


def normal(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape) * torch.exp2(spread * torch.randn(*shape))).to(dtype)


def check_norms() -> None:
    for width in (64, 200, 1024):
        x, weight = normal(9, width), normal(width)
        normed = row_kernels_cuda.rms_norm(x, weight, 1e-6)
        exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
        assert bool(((normed.double() - exact).abs() <= 1.001 * 2.0**-8 * exact.abs() + 1e-30).all()), width
        assert torch.equal(row_kernels_cuda.rms_norm(x[4:5], weight, 1e-6), normed[4:5])
    fused, weight = normal(5, 8, 64), normal(64)
    assert torch.equal(
        row_kernels_cuda.rms_norm(fused[:, 2:5], weight, 1e-6), row_kernels_cuda.rms_norm(fused[:, 2:5].clone(), weight, 1e-6)
    )
    residual = normal(5, 8, 64)
    normed, total = row_kernels_cuda.add_rms_norm(fused, residual, weight, 1e-6)
    assert torch.equal(total, fused + residual)
    assert torch.equal(normed, row_kernels_cuda.rms_norm(total, weight, 1e-6))


def check_elementwise() -> None:
    gate_up = normal(5, 2 * 1300)
    gate, up = gate_up.chunk(2, -1)
    silu, exact = row_kernels_cuda.silu_and_mul(torch.cat([gate, torch.ones_like(up)], -1)), F.silu(gate.double())
    assert bool(((silu.double() - exact).abs() <= 1.001 * 2.0**-8 * exact.abs() + 1e-38).all())
    assert torch.equal(row_kernels_cuda.silu_and_mul(gate_up), silu * up)
    cos, sin = (values[torch.tensor([0, 3, 3, 49, 1])] for values in row_invariant.rotary_table(1e4, 64, 50))
    fused = normal(5, 8, 64)
    expected = row_invariant.rotate(fused[:, 1:4], cos, sin)
    assert torch.equal(row_kernels_cuda.rotate(fused[:, 1:4], cos, sin), expected)
    both = torch.cat([cos, sin], -1)
    assert torch.equal(row_kernels_cuda.rotate(fused[:, 1:4], both[:, :32], both[:, 32:]), expected)


def check_products() -> None:
    x = normal(70, 200, spread=0.0)
    for outputs in (37, 600):
        weight = normal(outputs, 200, spread=0.0)
        exact = x.double() @ weight.double().t()
        bound = 200 * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
        for operands in ((x, weight), (x.float(), weight), (x.float(), weight.float())):
            found = row_kernels_cuda.matmul_fp32(*operands)
            assert bool(((found.double() - exact).abs() <= bound).all())
        assert torch.equal(row_kernels_cuda.matmul_fp32(x[5:6], weight), row_kernels_cuda.matmul_fp32(x, weight)[5:6])


def check_routing() -> None:
    logits = torch.randint(-3, 4, (50, 11)).float()
    logits[4, 2] = -torch.inf
    ids = row_kernels_cuda.top_k(logits, 3)
    assert torch.equal(ids, row_invariant.top_k(logits, 3))
    garbage = logits.clone()
    garbage[7], garbage[8, 3:] = torch.nan, torch.nan
    found = row_kernels_cuda.top_k(garbage, 3)
    assert found[7].tolist() == [0, 1, 2]
    assert sorted(found[8].tolist()) == [0, 1, 2]
    for renormalize in (True, False):
        for chosen in (ids, ids.int()):
            weights = row_kernels_cuda.router_weights(logits, chosen, renormalize=renormalize)
            assert torch.equal(weights, row_invariant.router_weights(logits, ids, renormalize=renormalize))
    outputs, weights = normal(9, 4, 48), torch.rand(9, 4)
    expected = row_invariant.combine(outputs, weights)
    assert torch.equal(row_kernels_cuda.combine(outputs, weights), expected)
    order = torch.randperm(36)
    named = order.argsort().view(9, 4).int()
    assert torch.equal(row_kernels_cuda.combine(outputs.view(36, 48)[order], weights, named), expected)


def check_quantizer() -> None:
    limit = E4M3.max_value / torch.finfo(torch.float32).max
    for dtype in (torch.bfloat16, torch.float32):
        x = normal(33, 328, spread=8.0, dtype=dtype)
        x[:5, 128:256], x[6, 0], x[7, 0], x[8, :128] = 0, torch.nan, torch.inf, torch.nan
        x[9, :128], x[10, :128], x[11, :128] = 1e-40, limit * 1.002, x[11, :128] * 1e-36
        for power_2_scale in (False, True):
            for amax_epsilon in (0.0, 1e-6):
                options = {"power_2_scale": power_2_scale, "amax_epsilon": amax_epsilon}
                expected = quantize_with_torch(x, E4M3, "1x128", **options)
                for column_major in (False, True):
                    codes, scale_inv = row_kernels_cuda.quantize_activations(x, **options, column_major=column_major)
                    assert scale_inv.stride() == ((1, 36) if column_major else (3, 1))
                    assert torch.equal(scale_inv, expected.scale_inv)
                    assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))


def check_fused() -> None:
    """SwiGLU and quantizer in one kernel give what the two give one after the other; rows of padding stay as memory was."""
    gate_up, expert_P = normal(37, 512, spread=3.0), torch.randint(-1, 3, (37,), dtype=torch.int32)
    gate_up[3, :128], gate_up[4, 5], gate_up[5, 260], expert_P[3:6], expert_P[8:24] = 0, torch.nan, torch.inf, 1, -1
    real = expert_P >= 0
    for power_2_scale in (False, True):
        for amax_epsilon in (0.0, 1e-3):
            options = {"power_2_scale": power_2_scale, "amax_epsilon": amax_epsilon}
            codes, scale_inv = row_fused_cuda.silu_and_mul_quantized(gate_up, expert_P, **options)
            activation = row_kernels_cuda.silu_and_mul(gate_up)
            expected = row_kernels_cuda.quantize_activations(activation, **options, column_major=True)
            assert torch.equal(codes.view(torch.uint8)[real], expected[0].view(torch.uint8)[real])
            assert torch.equal(scale_inv[real], expected[1][real])


def check_no_rows() -> None:
    assert row_kernels_cuda.rms_norm(normal(0, 64), normal(64), 1e-6).shape == (0, 64)
    assert row_kernels_cuda.silu_and_mul(normal(0, 64)).shape == (0, 32)
    assert row_kernels_cuda.matmul_fp32(normal(0, 64), normal(5, 64)).shape == (0, 5)
    assert row_kernels_cuda.top_k(torch.empty(0, 4), 2).shape == (0, 2)
    assert row_kernels_cuda.quantize_activations(normal(0, 128), power_2_scale=False, amax_epsilon=0.0, column_major=True)[1].shape == (
        0,
        1,
    )


def main() -> None:
    print("seed", torch.seed())
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
    for check in (check_norms, check_elementwise, check_products, check_routing, check_quantizer, check_fused, check_no_rows):
        check()
    print("ok")


if __name__ == "__main__":
    main()
