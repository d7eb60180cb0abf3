"""Formulas beside those of other projects on random batches, where a developer has them (requirements/peers.txt)."""

import importlib

import pytest

from tools.compare_with_peers import PEERS, TOLERANCE

pytestmark = [pytest.mark.peer, pytest.mark.parametrize("peer", PEERS)]


@pytest.mark.parametrize("seed", range(5))
def test_agreement_where_none_is_to_differ(peer, seed):
    pytest.importorskip(peer)
    table = importlib.import_module(PEERS[peer]).comparisons(seed)
    assert {c.name: c.difference for c in table if not c.reason and c.difference > TOLERANCE} == {}


def test_every_listed_difference_is_real(peer):
    """A reason that has gone, because the peer changed, must leave the table in docs/formulas.md."""
    pytest.importorskip(peer)
    listed: dict[str, float] = {}
    for seed in range(5):
        for c in importlib.import_module(PEERS[peer]).comparisons(seed):
            if c.reason:
                listed[c.name] = max(listed.get(c.name, 0.0), c.difference)
    assert [name for name, difference in listed.items() if difference <= TOLERANCE] == []
