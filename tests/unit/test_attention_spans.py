"""Positions of packed queries, whole sequences and a rank's part of one."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.training.attention import Spans

sequences = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5)


@given(sequences)
def test_every_query_has_its_position_in_its_sequence(found):
    """``(queries, keys before them)`` of each sequence; without keys before them the queries are the sequence."""
    queries, before = zip(*found, strict=True)
    keys = [n + b for n, b in found]
    bounds = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
    spans = Spans(cu_queries=bounds[0], cu_keys=bounds[1], max_queries=max(queries), max_keys=max(keys))
    expected = [b + i for n, b in zip(queries, before, strict=True) for i in range(n)]
    assert spans.positions(sum(queries)).tolist() == expected
