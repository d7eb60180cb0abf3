"""Digest, error metrics, bitwise comparison."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.numerics import metrics
from e2e_fp8.numerics.metrics import assert_bitwise_equal, calc_diff, sqnr_db, tensor_digest

_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def digest_of_bytes(raw: bytes) -> int:
    """The digest's definition in unbounded integers, one 32-bit word after the other."""
    golden, mix = signed(0x9E3779B97F4A7C15), signed(0xBF58476D1CE4E5B9)
    padded = raw + bytes(-len(raw) % 4)
    total = len(raw) * mix
    for index in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * index : 4 * index + 4], "little", signed=True)
        mixed = signed((word + signed((index + 1) * golden)) * mix)
        mixed = signed((mixed ^ (mixed >> 29)) * golden)
        total += mixed ^ (mixed >> 32)
    return total & _MASK


@given(raw=st.binary(max_size=67))
@settings(max_examples=200, deadline=None)
def test_digest_is_its_definition(raw):
    assert tensor_digest(torch.tensor(list(raw), dtype=torch.uint8)) == digest_of_bytes(raw)


def test_digest_of_known_bytes_never_changes():
    """Digests are compared between processes of different machines, so a new formula needs a new name."""
    assert tensor_digest(torch.arange(256, dtype=torch.uint8)) == digest_of_bytes(bytes(range(256))) == 0xA68204A7B7D28C48


def test_chunks_do_not_show(monkeypatch):
    x = torch.randint(0, 256, (40_003,), dtype=torch.uint8)
    whole = tensor_digest(x)
    monkeypatch.setattr(metrics, "_WORDS_AT_ONCE", 999)
    assert tensor_digest(x) == whole == digest_of_bytes(bytes(x.tolist()))


@given(data=st.data(), size=st.integers(2, 600))
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit_and_one_exchange_change_the_digest(data, size):
    x = torch.randint(0, 256, (size,), dtype=torch.uint8)
    flipped = x.clone()
    flipped[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(flipped) != tensor_digest(x)
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = x.clone()
    swapped[i], swapped[j] = x[j], x[i]
    assert (tensor_digest(swapped) == tensor_digest(x)) is bool(x[i] == x[j])


def test_exchanged_rows_and_columns_change_the_digest():
    x = torch.randn(64, 96).to(torch.float8_e4m3fn).view(torch.uint8)
    digests = {tensor_digest(x), tensor_digest(x.t()), tensor_digest(x.flip(0)), tensor_digest(x.roll(1, 0)), tensor_digest(x.roll(32, 1))}
    assert len(digests) == 5


def test_every_single_bit_flip_of_a_tile_gives_its_own_digest():
    x = torch.randint(0, 256, (512,), dtype=torch.uint8)
    seen = {tensor_digest(x)}
    for bit in range(4096):
        y = x.clone()
        y[bit // 8] ^= 1 << (bit % 8)
        seen.add(tensor_digest(y))
    assert len(seen) == 4097


def test_zero_tensors_of_different_sizes_differ():
    assert len({tensor_digest(torch.zeros(size, dtype=torch.uint8)) for size in range(300)}) == 300


def test_dtype_shape_and_strides_do_not_enter():
    x = torch.randn(12, 20)
    expected = tensor_digest(x)
    assert tensor_digest(x.view(torch.uint8)) == tensor_digest(x.view(240)) == tensor_digest(x.view(torch.int32)) == expected
    wide = torch.zeros(12, 40)
    wide[:, ::2] = x
    assert tensor_digest(wide[:, ::2]) == expected
    assert tensor_digest(x.t().contiguous().t()) == expected
    assert tensor_digest(x.clone().requires_grad_()) == expected
    assert tensor_digest(torch.tensor(1.5)) == tensor_digest(torch.tensor([1.5]))
    raw = torch.cat([torch.zeros(3, dtype=torch.uint8), x.view(torch.uint8).flatten()])
    assert tensor_digest(raw[3:]) == expected


def test_negative_zero_and_nan_payloads_are_seen():
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    assert tensor_digest(bits[:1].view(torch.float32)) != tensor_digest(bits[1:].view(torch.float32))


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
