"""Error metrics, bitwise comparison."""

import math

import pytest
import torch

from e2e_fp8.numerics.metrics import assert_bitwise_equal, calc_diff, sqnr_db


def test_calc_diff():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert calc_diff(x, y) == pytest.approx(1 - 2 * 24 / 50, abs=1e-15)
    assert calc_diff(x, x) == 0.0 == calc_diff(torch.zeros(3), torch.zeros(3))
    assert calc_diff(x, -x) == 2.0
    # float64 inside: squares of these overflow float32.
    assert calc_diff(torch.tensor([1e30]), torch.tensor([1e30])) == 0.0


def test_sqnr():
    x = torch.tensor([10.0, 0.0])
    assert sqnr_db(x, torch.tensor([9.0, 0.0])) == pytest.approx(20.0)
    assert sqnr_db(x, x) == math.inf == sqnr_db(torch.zeros(2), torch.zeros(2))
    assert sqnr_db(torch.zeros(2), x) == -math.inf


def test_bitwise_comparison_names_the_first_difference():
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    y = x.clone()
    assert_bitwise_equal(x, y)
    y[1, 2], y[2, 0] = -6.0, 100.0
    with pytest.raises(
        AssertionError, match=r"w: 2 of 12 elements differ, first at \(1, 2\): 6\.0 \(0x40c00000\) against -6\.0 \(0xc0c00000\)"
    ):
        assert_bitwise_equal(x, y, "w")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (
            torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn),
        ),
    ],
)
def test_bitwise_comparison_is_strict(a, b):
    with pytest.raises(AssertionError):
        assert_bitwise_equal(a, b)


def test_bitwise_comparison_accepts_equal_nans_views_and_empty_tensors():
    x = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t().contiguous().t(), x)
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
