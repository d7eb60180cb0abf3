"""Coordinates of ranks against counting through the grids, and the refusals."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import sharding_reference

from e2e_fp8.errors import ConfigError
from e2e_fp8.rank_grid import RankGrid

small = st.sampled_from([1, 2, 3, 4])


@given(tensor=small, context=small, pipeline=small, expert=small, expert_tensor=small, copies=st.integers(1, 3))
def test_places_are_those_of_counting(tensor, context, pipeline, expert, expert_tensor, copies):
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
    world = tensor * context * expert * expert_tensor * pipeline * copies
    grid = RankGrid(**sizes, world=world)
    for rank, expected in enumerate(sharding_reference.coordinates(world, sizes)):
        place = grid.place(rank)
        assert {name: getattr(place, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"tensor": 2, "world": 3}, "3 ranks, which is not a multiple of tensor x context x pipeline = 2"),
        ({"expert": 4, "world": 2}, "expert_tensor x expert x pipeline = 4 (training.parallel.expert_tensor 1, training.parallel.expert 4"),
    ],
)
def test_worlds_that_do_not_fit_are_refused(sizes, part):
    with pytest.raises(ConfigError) as caught:
        RankGrid(**sizes)
    assert part in str(caught.value)
