"""Operators that trainer and engine share: equal to their element-by-element definition, and blind to the rows beside a row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import row_reference

from e2e_fp8.numerics import row_invariant

EPSILON = 1e-6


@pytest.fixture
def generator():
    fresh = torch.Generator()
    print("seed", fresh.seed())
    return fresh


def normal(generator, *shape, spread=3.0):
    """bfloat16 values over several binades."""
    values = torch.randn(*shape, generator=generator) * torch.exp2(spread * torch.randn(*shape, generator=generator))
    return values.bfloat16()


def rows_of(x):
    return x.float().numpy()


@pytest.mark.parametrize("width", [16, 128, 200])
def test_rms_norm_is_its_definition(width, generator):
    x, weight = normal(generator, 5, width), normal(generator, width, spread=0.5)
    expected = np.stack([row_reference.rms_norm_row(row, rows_of(weight), EPSILON) for row in rows_of(x)])
    assert torch.equal(row_invariant.rms_norm(x.float(), weight, EPSILON), torch.from_numpy(expected))
    assert torch.equal(row_invariant.rms_norm(x, weight, EPSILON), torch.from_numpy(expected).bfloat16())


def test_matmul_is_its_definition(generator):
    x, weight = normal(generator, 4, 40), normal(generator, 7, 40)
    expected = np.stack([row_reference.matmul_row(row, rows_of(weight)) for row in rows_of(x)])
    assert torch.equal(row_invariant.matmul_fp32(x, weight), torch.from_numpy(expected))
    assert row_invariant.matmul_fp32(x.view(2, 2, 40), weight).shape == (2, 2, 7)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 32), (3, 1, 24)])
def test_attention_is_its_definition(heads, groups, width, generator):
    lengths = [5, 1, 9]
    q = normal(generator, sum(lengths), heads, width, spread=1.0)
    k, v = (normal(generator, sum(lengths), groups, width, spread=1.0) for _ in range(2))
    out = attend(q, k, v, lengths, width)
    start = 0
    for length in lengths:
        for position in range(length):
            keys = slice(start, start + position + 1)
            for head in range(heads):
                group = head // (heads // groups)
                expected = row_reference.attention_row(
                    rows_of(q[start + position, head]), rows_of(k[keys, group]), rows_of(v[keys, group]), width**-0.5
                )
                assert torch.equal(out[start + position, head], torch.from_numpy(expected).bfloat16())
        start += length


def attend(q, k, v, lengths, width):
    """The trainer's call: every query row of packed sequences."""
    sizes = torch.tensor(lengths)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return row_invariant.causal_attention(q, k, v, first, torch.arange(len(q)) - first, width**-0.5)


@settings(deadline=None, max_examples=25)
@given(length=st.integers(1, 40), data=st.data())
def test_attention_of_the_last_tokens_alone_is_that_of_all(length, data):
    """Decoding, a chunk or a cached prefix: the keys are there, and only some queries are asked."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    q, k, v = (normal(generator, length, 2, 32, spread=1.0) for _ in range(3))
    whole = attend(q, k, v, [length], 32)
    cut = data.draw(st.integers(0, length - 1))
    positions = torch.arange(cut, length)
    part = row_invariant.causal_attention(q[cut:], k, v, torch.zeros_like(positions), positions, 32**-0.5)
    assert torch.equal(part, whole[cut:])


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 40), width=st.integers(1, 160), data=st.data())
def test_rows_do_not_know_their_neighbours(rows, width, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    x, weight, matrix = normal(generator, rows, width), normal(generator, width), normal(generator, 9, width)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20)))
    logits = row_invariant.matmul_fp32(x, matrix)
    ids = row_invariant.top_k(logits, 3)
    operators = {
        "rms_norm": lambda i: row_invariant.rms_norm(x[i], weight, EPSILON),
        "matmul": lambda i: row_invariant.matmul_fp32(x[i], matrix),
        "silu": lambda i: row_invariant.silu(x[i]),
        "top_k": lambda i: row_invariant.top_k(logits[i], 3),
        "router_weights": lambda i: row_invariant.router_weights(logits[i], ids[i], renormalize=True),
        # torch's own; the trainer relies on it as vLLM's sampler does
        "log_softmax": lambda i: logits[i].log_softmax(-1),
    }
    for name, operator in operators.items():
        assert torch.equal(operator(torch.arange(rows))[chosen], operator(chosen)), name


@pytest.mark.parametrize("vocabulary", [1, 7, 112, 1000, 5003])
def test_log_softmax_of_torch_keeps_a_row_in_any_batch(vocabulary, generator):
    logits = torch.randn(70, vocabulary, generator=generator) * 8
    whole = logits.log_softmax(-1)
    for rows in (1, 2, 3, 15, 16, 17, 33, 64):
        assert torch.equal(logits[5 : 5 + rows].clone().log_softmax(-1), whole[5 : 5 + rows])


def test_silu_of_every_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    finite = x.isfinite()
    expected = [v / (1 + math.exp(-v)) if v > -700 else v * math.exp(v) for v in x[finite].double().tolist()]
    assert torch.equal(row_invariant.silu(x)[finite], torch.tensor(expected, dtype=torch.float64).bfloat16())
    gate, up = x[finite].view(-1, 128), x[finite].flip(0).view(-1, 128)
    assert torch.equal(row_invariant.silu_and_mul(torch.cat([gate, up], -1)), row_invariant.silu(gate) * up)


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_its_definition_also_in_ties(renormalize, generator):
    logits = torch.randint(-3, 4, (50, 8), generator=generator).float()
    ids = row_invariant.top_k(logits, 3)
    weights = row_invariant.router_weights(logits, ids, renormalize=renormalize)
    for row in range(len(logits)):
        expected = row_reference.top_k_row(logits[row].tolist(), 3)
        assert ids[row].tolist() == expected
        reference = row_reference.router_weights_row(logits[row].tolist(), expected, renormalize)
        assert torch.equal(weights[row], torch.from_numpy(reference))


def test_rotation_keeps_lengths_and_is_its_definition(generator):
    cos, sin = row_invariant.rotary_table(10_000.0, 8, 50)
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            # float64 angles differ by their own rounding, 1e-14 at most here; float32 keeps 24 bits
            assert abs(float(cos[position, pair]) - math.cos(angle)) <= 2**-24
            assert abs(float(sin[position, pair]) - math.sin(angle)) <= 2**-24
    x, positions = normal(generator, 6, 2, 8), torch.tensor([0, 3, 3, 49, 1, 7])
    out = row_invariant.rotate(x, cos[positions], sin[positions])
    first, second = rows_of(x[..., :4]), rows_of(x[..., 4:])
    c, s = cos[positions][:, None].numpy(), sin[positions][:, None].numpy()
    expected = np.concatenate([first * c - second * s, second * c + first * s], -1)
    assert torch.equal(out, torch.from_numpy(expected).bfloat16())
    assert torch.equal(out[:1], x[:1])


def test_combine_sums_in_the_given_order(generator):
    outputs, weights = normal(generator, 9, 4, 16), torch.rand(9, 4, generator=generator)
    total = np.zeros((9, 16), np.float32)
    for slot in range(4):
        total = total + rows_of(outputs[:, slot]) * weights[:, slot : slot + 1].numpy()
    assert torch.equal(row_invariant.combine(outputs, weights), torch.from_numpy(total).bfloat16())
