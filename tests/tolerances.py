"""The one table of tolerances of comparisons that cannot be exact. Everything not listed here is compared with ``==``."""

import torch

LINEAR_DIFF = {torch.float32: 1e-10, torch.bfloat16: 1.01 * 2**-17}
"""Largest ``calc_diff`` of an FP8 product against float64 of the same operands: FP32 sums, then one rounding to the output dtype."""

LINEAR_WORST = {torch.float32: 1e-5, torch.bfloat16: 1.01 * 2**-8}
"""Largest error of one element of the same comparison, relative to the largest magnitude of the result."""

QUANTIZATION_SQNR_DB = {"e4m3": 27.0, "e5m2": 22.0}
"""Smallest SQNR of a product of quantized normal operands against unquantized ones, by the coarser operand's format."""

RANKS_LOSS = {"bf16": 4e-3, "fp8": 6e-3}
"""Largest relative difference of loss and entropy between one and several trainer ranks: sums over tensor ranks round once more."""

RANKS_GRAD_NORM = {"bf16": 1e-2, "fp8": 4e-2}
"""The same of the gradient norm."""

RANKS_UPDATE = {"bf16": 0.05, "fp8": 0.15}
"""Largest L2 distance of the masters of one and several ranks after two steps, relative to how far they moved."""

RANKS_LOG_PROBS = {"bf16": 1.5e-2, "fp8": 6e-2}
"""Largest mean difference of log-probs, in nats, for the same weights under one and several tensor ranks (random weights)."""
