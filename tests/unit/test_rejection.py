"""Importance weights of every kind, rejection masks, and their way into a batch, against the scalar reference."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.correction import REJECTION_OPTIONS, CorrectionConfig, RejectionRule, preset_values
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.correction.apply import correct, joined_boundaries
from e2e_fp8.correction.importance import importance_weights, log_ratio
from e2e_fp8.correction.rejection import rejection_mask
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.observability.names import check_names
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.aggregation import loss_denominator
from e2e_fp8.update.loss_fn import make_loss_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import correction_reference as reference

INF, NAN = math.inf, math.nan
FINITE = st.sampled_from([0.0, -1.0]) | st.floats(-3, 0) | st.floats(-40, 0)
TRAINED = st.tuples(FINITE, FINITE, st.just(1))
ENDLESS = st.tuples(st.sampled_from([-INF, -1.0]), st.sampled_from([-INF, -1.0]), st.just(1))
SILENT = st.tuples(st.sampled_from([NAN, INF, -INF, -1.0]), st.sampled_from([NAN, INF, -INF, -1.0]), st.just(0))
ROWS = st.lists(st.lists(TRAINED | SILENT, min_size=1, max_size=5), min_size=1, max_size=4)
ENDLESS_ROWS = st.lists(st.lists(TRAINED | ENDLESS | SILENT, min_size=1, max_size=4), min_size=1, max_size=3)
BOUNDS = st.sampled_from([(0.5, 5.0), (0.999, 1.001), (0.25, 0.5), (1.5, 2.0)])


def packed(rows: list[list[tuple[float, float, int]]]) -> tuple[torch.Tensor, Sequences]:
    train, rollout, mask = (torch.tensor([t[i] for r in rows for t in r], dtype=torch.float64) for i in range(3))
    return log_ratio(train, rollout, mask), Sequences.of(mask, torch.tensor([0, *[len(r) for r in rows]]).cumsum(0))


def flat(rows: list[list]) -> list:
    return [x for row in rows for x in row]


def make_batch(rows: list[list[tuple[float, float, int]]]) -> PackedBatch:
    old, rollout, mask = (torch.tensor([t[i] for r in rows for t in r], dtype=torch.float32) for i in range(3))
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    return PackedBatch(
        token_ids=zeros,
        position_ids=zeros,
        cu_seqlens=torch.tensor([0, *[len(r) for r in rows]], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        targets=zeros,
        loss_mask=mask,
        advantages=torch.ones(len(mask)),
        rollout_log_probs=rollout,
        old_log_probs=old,
    )


def corrected(rows: list[list[tuple[float, float, int]]], **fields) -> tuple[PackedBatch, dict[str, float]]:
    batch = make_batch(rows)
    batches, metrics = correct([batch], [batch.old_log_probs], CorrectionConfig(**fields))
    check_names(metrics)
    return batches[0], metrics


@settings(deadline=None)
@given(rows=ROWS, level=st.sampled_from(["token", "sequence"]), mode=st.sampled_from(["truncate", "clip", "mask"]), bounds=BOUNDS)
def test_weights_match_the_scalar_formula(rows, level, mode, bounds):
    d, sequences = packed(rows)
    result = importance_weights(d, sequences, level=level, mode=mode, low=bounds[0], high=bounds[1])
    expected = flat(reference.importance(rows, level, mode, *bounds))
    assert result.weights.tolist() == pytest.approx(expected, rel=1e-9)
    assert not result.weights.requires_grad


@settings(deadline=None)
@given(rows=ENDLESS_ROWS, option=st.sampled_from(REJECTION_OPTIONS), bounds=BOUNDS)
def test_rejections_match_the_scalar_formula(rows, option, bounds):
    d, sequences = packed(rows)
    rule = RejectionRule(option=option, low=bounds[0], high=bounds[1])
    result = rejection_mask(d, sequences, [rule])
    assert result.keep.tolist() == flat(reference.kept(rows, option, *bounds))
    check_names(result.metrics)


@settings(deadline=None)
@given(rows=ENDLESS_ROWS, options=st.lists(st.sampled_from(REJECTION_OPTIONS), min_size=1, max_size=3, unique=True), veto=st.booleans())
def test_a_chain_keeps_what_every_rule_keeps(rows, options, veto):
    d, sequences = packed(rows)
    result = rejection_mask(
        d, sequences, [RejectionRule(option=o, low=0.5, high=2.0) for o in options], veto_threshold=1e-4 if veto else None
    )
    expected = [all(parts) for parts in zip(*(flat(reference.kept(rows, o, 0.5, 2.0)) for o in options), strict=True)]
    if veto:
        out = reference.vetoed(rows, 1e-4)
        expected = [
            k and not (out[i] and m) for k, (i, m) in zip(expected, ((i, t[2]) for i, r in enumerate(rows) for t in r), strict=True)
        ]
    assert result.keep.tolist() == expected


def test_k1_bounds_are_those_of_the_ratio_unlike_verl_6377():
    """verl compares -log r with the logarithms of the bounds: 0.6_1.4 keeps the ratio 1.5 and rejects 0.65 (its pull request 6377)."""
    ratios = [0.55, 0.65, 1.0, 1.35, 1.5]
    for option in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        rows = [[(math.log(r), 0.0, 1)] for r in ratios]
        batch, metrics = corrected(rows, rollout_is=None, rollout_rs=option, rollout_rs_threshold="0.6_1.4")
        assert batch.keep_mask.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
        assert metrics[f"rollout_corr/rollout_rs_{option}_fraction_high"] == 0.2
        assert metrics[f"rollout_corr/rollout_rs_{option}_fraction_low"] == 0.2
        assert metrics[f"rollout_corr/rollout_rs_{option}_max"] == pytest.approx(1.5)
        inverted = [-math.log(r) for r in ratios]
        assert [math.log(0.6) <= k1 <= math.log(1.4) for k1 in inverted] == [False, False, True, True, True], "what verl keeps"


def test_everything_rejected_leaves_a_zero_denominator_and_no_crash_as_in_verl_3984():
    """verl 3984: an empty mask fails an assertion there. Here the loss is 0, its denominator 0, and the step is skipped."""
    rows = [[(-5.0, -1.0, 1), (-5.0, -1.0, 1)], [(-9.0, -1.0, 1)]]
    batch, metrics = corrected(rows, rollout_rs="seq_mean_k3", rollout_rs_threshold=1e-3)
    assert batch.keep_mask.tolist() == [0.0] * 3
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert loss_denominator([batch], mode) == 0.0
        log_probs = torch.zeros(3, requires_grad=True)
        stats = TokenStats(log_probs=log_probs, entropy=torch.zeros(3))
        loss, _ = make_loss_fn(ObjectiveConfig(loss_agg_mode=mode), CorrectionConfig())(stats, batch)
        loss.backward()
        assert loss.item() == 0.0
        assert log_probs.grad.tolist() == [0.0] * 3


def test_rejected_tokens_leave_the_denominator_and_masked_weights_do_not():
    rows = [[(-1.0, -1.0, 1), (-1.0, -4.0, 1), (NAN, NAN, 0)]]
    icepop, _ = corrected(rows, preset="decoupled_token_icepop")
    assert icepop.importance_weights.tolist() == [1.0, 0.0, 1.0]
    assert icepop.keep_mask is None
    assert loss_denominator([icepop], "token-mean") == 2.0
    rejected, _ = corrected(rows, rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.5_5.0")
    assert rejected.importance_weights is None
    assert rejected.keep_mask.tolist() == [1.0, 0.0, 1.0]
    assert loss_denominator([rejected], "token-mean") == 1.0


def test_sequence_mask_tis_is_a_geometric_mask_and_a_token_weight_without_a_bound():
    rows = [[(-1.0, -1.0005, 1), (-1.0, -0.9995, 1)], [(-1.0, -4.0, 1), (-4.0, -1.0, 1)], [(-1.0, -1.5, 1)]]
    batch, _ = corrected(rows, rollout_is_threshold=None, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")
    assert batch.keep_mask.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert batch.importance_weights.tolist() == pytest.approx([math.exp(5e-4), math.exp(-5e-4), math.exp(3), math.exp(-3), math.exp(0.5)])


def test_mis_masks_a_sequence_above_its_bound_and_tis_truncates_it():
    rows = [[(-1.0, -1.5, 1), (-1.0, -1.5, 1)], [(-1.0, -1.2, 1)]]
    masked, _ = corrected(rows, rollout_is="sequence", rollout_is_mode="mask")
    truncated, _ = corrected(rows, rollout_is="sequence")
    assert masked.importance_weights.tolist() == pytest.approx([0.0, 0.0, math.exp(0.2)])
    assert truncated.importance_weights.tolist() == pytest.approx([2.0, 2.0, math.exp(0.2)])


@settings(deadline=None, max_examples=40)
@given(rows=ROWS, level=st.sampled_from(["token", "sequence"]))
def test_batch_normalisation_makes_the_mean_one(rows, level):
    batch, metrics = corrected(rows, rollout_is=level, rollout_is_batch_normalize=True)
    plain, _ = corrected(rows, rollout_is=level)
    sequences = Sequences.of(batch.loss_mask, batch.cu_seqlens)
    if not bool(sequences.trained.any()):
        assert batch.importance_weights.tolist() == plain.importance_weights.tolist()
        return
    weights = batch.importance_weights.double()
    mean = weights[sequences.trained].mean() if level == "token" else sequences.mean(weights)[sequences.lengths > 0].mean()
    assert float(mean) == pytest.approx(1.0, rel=1e-5)
    factor = metrics["rollout_corr/rollout_is_batch_norm_factor"]
    assert (weights[sequences.trained] * factor).tolist() == pytest.approx(plain.importance_weights[sequences.trained].tolist(), rel=1e-5)
    assert batch.importance_weights[~sequences.trained].tolist() == [1.0] * int((~sequences.trained).sum())


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.lists(TRAINED, min_size=1, max_size=4), min_size=2, max_size=5), cut=st.integers(1, 4))
def test_correction_does_not_depend_on_the_micro_batches(rows, cut):
    cfg = CorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="seq_max_k3", rollout_rs_threshold=0.5)
    whole, parts = [make_batch(rows)], [make_batch(r) for r in (rows[:cut], rows[cut:]) if r]
    one, metrics = correct(whole, [b.old_log_probs for b in whole], cfg)
    many, metrics_of_parts = correct(parts, [b.old_log_probs for b in parts], cfg)
    assert torch.equal(torch.cat([b.importance_weights for b in many]), one[0].importance_weights)
    assert torch.equal(torch.cat([b.keep_mask for b in many]), one[0].keep_mask)
    assert metrics_of_parts == metrics
    assert joined_boundaries(parts).tolist() == whole[0].cu_seqlens.tolist()


def test_bypass_against_itself_corrects_nothing_and_no_correction_touches_nothing():
    batch = make_batch([[(-1.0, -1.0, 1), (-2.0, -2.0, 1)]])
    batches, metrics = correct([batch], [batch.rollout_log_probs], CorrectionConfig(preset="bypass_pg_geo_rs_seq_tis"))
    assert batches[0].importance_weights.tolist() == [1.0, 1.0]
    assert batches[0].keep_mask.tolist() == [1.0, 1.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    untouched, none = correct([batch], [batch.old_log_probs], CorrectionConfig(preset="disabled"))
    assert untouched[0] is batch
    assert none == {}


@pytest.mark.parametrize("name", CorrectionConfig.model_fields["preset"].annotation.__args__[0].__args__)
def test_every_preset_runs_on_a_batch(name):
    rows = [[(-1.0, -1.1, 1), (-2.0, -1.7, 1)], [(-1.0, -1.0005, 1), (NAN, NAN, 0)], [(-0.5, -3.0, 1)]]
    batch, _ = corrected(rows, preset=name)
    values = preset_values(name)
    assert (batch.importance_weights is not None) == (values["rollout_is"] is not None)
    assert (batch.keep_mask is not None) == (values["rollout_rs"] is not None)
    stats = TokenStats(log_probs=torch.full((5,), -1.0, requires_grad=True), entropy=torch.zeros(5))
    loss, _ = make_loss_fn(ObjectiveConfig(), CorrectionConfig(preset=name))(stats, replace(batch, old_log_probs=batch.rollout_log_probs))
    loss.backward()
    assert math.isfinite(loss.item())


def test_misuse_is_refused():
    d, sequences = packed([[(-1.0, -1.0, 1)]])
    with pytest.raises(ValueError, match="bounds must be positive and in order"):
        importance_weights(d, sequences, level="token", mode="clip", low=2.0, high=1.0)
    with pytest.raises(ValueError, match="unknown level"):
        importance_weights(d, sequences, level="word", mode="clip")
    with pytest.raises(ValueError, match="cu_seqlens ends at 2, not at 3"):
        Sequences.of(torch.ones(3), torch.tensor([0, 2]))
