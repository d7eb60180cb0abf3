"""A module of any training loop under Hugging Face names: FP8 modules as the slow reference quantizes them, the rest as it is."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import blockwise_reference

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.foreign import block_fp8_tensors


@settings(deadline=None, max_examples=10)
@given(rows=st.integers(1, 300), tiles=st.integers(1, 2), power_2=st.booleans(), seed=st.integers(0, 2**32), wide=st.booleans())
def test_listed_modules_are_quantized_and_others_are_the_parameters_themselves(rows, tiles, power_2, seed, wide):
    torch.manual_seed(seed)
    dtype = torch.float32 if wide else torch.bfloat16
    model = torch.nn.ModuleDict({name: torch.nn.Linear(128 * tiles, rows, bias=False, dtype=dtype) for name in ("a", "b")})
    found = {entry.name: entry.tensor for entry in block_fp8_tensors(model, ["a"], power_2_scale=power_2)}
    assert list(found) == ["a.weight", "a.weight_scale_inv", "b.weight"]
    assert found["b.weight"].data_ptr() == model["b"].weight.data_ptr()
    rounded = model["a"].weight.detach().bfloat16().float().numpy()
    largest = float(torch.finfo(torch.bfloat16).max)
    codes, scales = blockwise_reference.quantize(rounded, "e4m3", "128x128", power_2, 0.0, largest)[:2]
    assert np.array_equal(found["a.weight"].view(torch.uint8).numpy(), codes)
    assert np.array_equal(found["a.weight_scale_inv"].view(torch.int32).numpy(), scales.view(np.int32))


def test_fp8_weights_of_an_unknown_form_are_refused():
    model = torch.nn.Linear(128, 128, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(EngineError, match="weight is Parameter in the trainer, but is no 128x128 block-FP8 weight"):
        list(block_fp8_tensors(torch.nn.ModuleDict({"a": model}), ["a"]))
