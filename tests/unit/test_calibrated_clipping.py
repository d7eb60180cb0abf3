"""Calibrated clipping on ratios whose right answer is known."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.update.calibrated_clipping import calibrated_clip


def normal_quantiles(count: int, sigma: float) -> torch.Tensor:
    """exp of the ``count`` mid-quantiles of N(0, sigma), ascending."""
    normal = NormalDist(0.0, sigma)
    return torch.tensor([normal.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64).exp()


def test_the_bound_moves_to_the_known_quantile_of_a_wider_distribution():
    """Log ratios N(0, 0.1) in BF16 and N(0, 0.3) in FP8: the bound's logarithm must grow three times as well."""
    shadow, fp8 = normal_quantiles(20_000, 0.1), normal_quantiles(20_000, 0.3)
    shuffled = fp8[torch.randperm(20_000, generator=torch.Generator().manual_seed(1))]
    result = calibrated_clip(shadow, shuffled, -torch.ones(20_000), torch.ones(20_000), clip_low=0.1, clip_high=0.14)
    bound = math.log(1 - 0.1)
    assert 1 - result.clip_low == pytest.approx(math.exp(3 * bound), rel=1e-4)
    assert result.fraction == pytest.approx(NormalDist(0, 0.1).cdf(bound), abs=1e-4)
    assert result.fraction_before == pytest.approx(NormalDist(0, 0.3).cdf(bound), abs=1e-4)
    assert float((fp8 < 1 - result.clip_low).double().mean()) == result.fraction
    assert result.clip_high / result.clip_low == pytest.approx(1.4)


@settings(deadline=None, max_examples=100)
@given(
    pairs=st.lists(
        st.tuples(st.floats(0.01, 5), st.floats(0.01, 5), st.sampled_from([-1.0, 0.0, 1.0]), st.booleans()), min_size=1, max_size=30
    ),
    clip_low=st.floats(0.01, 0.9),
)
def test_the_same_number_of_tokens_is_clipped_unless_ratios_tie_or_pass_one(pairs, clip_low):
    shadow, fp8, advantages, mask = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in range(4))
    result = calibrated_clip(shadow, fp8, advantages, mask, clip_low=clip_low, clip_high=0.3)
    chosen = (mask > 0) & (advantages < 0)
    if not bool(chosen.any()):
        assert (result.clip_low, result.clip_high) == (clip_low, 0.3)
        assert math.isnan(result.fraction)
        return
    wanted = int((shadow[chosen] < 1 - clip_low).sum())
    ordered = fp8[chosen].sort().values
    distinct = wanted in (0, len(ordered)) or ordered[wanted - 1] < ordered[wanted] - 1e-9
    # beyond ratio 1 nothing counts as clipped below
    if distinct and (wanted == 0 or ordered[wanted - 1] < 1 - 1e-5):
        assert int((fp8[chosen] < 1 - result.clip_low - 1e-12).sum()) == wanted
    assert 0 < result.clip_low < 1


@given(seed=st.integers(0, 1000))
def test_equal_precisions_leave_the_bounds_exactly_as_they_are(seed):
    ratio = torch.rand(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    result = calibrated_clip(ratio, ratio, -torch.ones(50), torch.ones(50), clip_low=0.2, clip_high=0.28)
    assert result.clip_low == pytest.approx(0.2, rel=1e-15)
    assert result.clip_high == pytest.approx(0.28, rel=1e-15)
    assert result.fraction == result.fraction_before


def test_positive_advantages_and_masked_tokens_do_not_enter():
    ratio = torch.tensor([0.5, 0.9, 0.1, 0.2])
    advantages, mask = torch.tensor([-1.0, -1.0, 1.0, -1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    result = calibrated_clip(ratio, torch.tensor([0.4, 0.7, 9.0, math.nan]), advantages, mask, clip_low=0.2, clip_high=0.2)
    assert result.fraction == 0.5
    assert 1 - result.clip_low == pytest.approx(0.55)


def test_misuse_is_refused():
    one = torch.ones(2)
    with pytest.raises(ValueError, match="equal shapes"):
        calibrated_clip(one, torch.ones(3), one, one, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="not finite"):
        calibrated_clip(one, torch.tensor([1.0, math.nan]), -one, one, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="ranges must be positive"):
        calibrated_clip(one, one, -one, one, clip_low=0.0, clip_high=0.2)
