"""Products of experts one after another, and keys and values rounded on their way, without an engine."""

import torch

from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.rollout.swapped_kernels import grouped_by_expert

EXPERTS, WIDTH, OUTPUTS = 3, 256, 384


def product(codes, scale_inv, weight, weight_scale_inv):
    """Of dequantized operands, a row at a time, so that a row's bits do not depend on those beside it."""
    left = dequantize_blockwise(BlockScaled(codes, scale_inv, "1x128")).double()
    right = dequantize_blockwise(BlockScaled(weight, weight_scale_inv, "128x128")).double()
    return torch.stack([(row * right).sum(1) for row in left]).bfloat16()


def test_every_row_meets_the_weights_of_its_expert_and_padding_is_left_alone():
    rows = 20
    left = quantize_blockwise(torch.randn(rows, WIDTH).bfloat16(), E4M3, "1x128", power_2_scale=False, amax_epsilon=0.0)
    weights = [
        quantize_blockwise(torch.randn(OUTPUTS, WIDTH).bfloat16(), E4M3, "128x128", power_2_scale=False, amax_epsilon=0.0)
        for _ in range(EXPERTS)
    ]
    codes = torch.stack([w.codes.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
    scales = torch.stack([w.scale_inv for w in weights])
    # expert 1 gets nothing, as happens in most steps of decoding
    expert_P = torch.randint(0, 2, (rows,), dtype=torch.int32) * 2
    expert_P[[2, 11, 19]] = -1
    out = torch.full((rows, OUTPUTS), 7.0, dtype=torch.bfloat16)
    grouped_by_expert(product, (left.codes, left.scale_inv), (codes, scales), out, expert_P)
    for row, expert in enumerate(expert_P.tolist()):
        codes_1K = left.codes.view(torch.uint8)[row : row + 1].view(torch.float8_e4m3fn)
        alone = product(codes_1K, left.scale_inv[row : row + 1], codes[expert], scales[expert])[0]
        assert torch.equal(out[row], torch.full((OUTPUTS,), 7.0, dtype=torch.bfloat16) if expert < 0 else alone), row
