"""The comparison that the parity chain rests on: it finds the first difference, with its place and both values, or says there is none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.alignment.compare import bits_differ, compare, open_causes
from e2e_fp8.config.alignment import CAUSES, choices_at

ORDER = ["embedding", "layers.0.attention", "layers.1.mlp", "logits"]
SIDES = ("trainer", "engine")


def recording(rows=5):
    values = torch.arange(1.0, rows * 3 + 1).view(rows, 3)
    return {name: (values * (index + 1)).bfloat16() for index, name in enumerate(ORDER)}


def test_equal_recordings_hold():
    link = compare("modules", recording(), recording(), ORDER, sides=SIDES)
    assert link.holds
    assert (link.modules, link.elements) == (4, 60)


@given(module=st.sampled_from(ORDER), row=st.integers(0, 4), column=st.integers(0, 2), later=st.booleans())
def test_the_first_difference_is_named_with_its_place_and_values(module, row, column, later):
    left, right = recording(), recording()
    right[module][row, column] += 8
    if later:
        right["logits"][4, 2] += 16
    found = compare("modules", left, right, ORDER, sides=SIDES).difference
    assert (found.module, found.row, found.column) == (module, row, column)
    assert (found.left, found.right) == (float(left[module][row, column]), float(right[module][row, column]))
    assert found.elements == 15
    both = later and module == "logits"
    assert found.unequal == (2 if both and (row, column) != (4, 2) else 1)


def test_one_bit_is_a_difference_and_a_nan_equals_itself():
    one = torch.tensor([[1.0, math.nan, 0.0]])
    assert not bits_differ(one, one.clone()).any()
    assert bits_differ(one, torch.tensor([[1.0 + 2**-23, math.nan, -0.0]])).tolist() == [[True, False, True]]


def test_what_cannot_be_compared_is_never_called_equal():
    short = recording()
    short["logits"] = short["logits"][:4]
    for other in ({k: v for k, v in recording().items() if k != "embedding"}, short):
        with pytest.raises(ValueError, match="trainer"):
            compare("modules", recording(), other, ORDER, sides=SIDES)
    with pytest.raises(ValueError, match="nothing was compared"):
        compare("modules", {}, {}, ORDER, sides=SIDES)


def test_every_cause_shows_somewhere_and_only_while_it_is_open():
    fast, bitwise = choices_at("fast"), choices_at("bitwise")
    for name, cause in CAUSES.items():
        for module in cause.links:
            assert name in open_causes(f"layers.3.{module}", fast, within_one_side=False)
            assert open_causes(f"layers.3.{module}", bitwise, within_one_side=False) == ()
    assert open_causes("log_probs", bitwise | {"router_gemm": "native"}, within_one_side=False) == ("router_gemm",)
    assert open_causes("log_probs", bitwise | {"attention": "native"}, within_one_side=True) == ("attention",)
