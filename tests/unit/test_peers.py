"""Formulas beside verl's on random batches, where a developer has verl."""

import pytest

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("seed", range(5))
def test_agreement_where_none_is_to_differ(seed):
    pytest.importorskip("verl")
    from tools.compare_with_peers import TOLERANCE, comparisons

    different = {c.name: c.difference for c in comparisons(seed) if not c.reason and c.difference > TOLERANCE}
    assert different == {}


def test_every_listed_difference_is_real():
    """A reason that has gone, because the peer changed, must leave the table in docs/formulas.md."""
    pytest.importorskip("verl")
    from tools.compare_with_peers import TOLERANCE, comparisons

    listed: dict[str, float] = {}
    for seed in range(5):
        for c in comparisons(seed):
            if c.reason:
                listed[c.name] = max(listed.get(c.name, 0.0), c.difference)
    assert [name for name, difference in listed.items() if difference <= TOLERANCE] == []
