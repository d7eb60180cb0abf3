"""The table of causes, and what a configuration may ask of it."""

import contextlib

import pytest

from e2e_fp8.config.alignment import CAUSES, choices_at, choices_of
from e2e_fp8.config.load import parse_config
from e2e_fp8.errors import ConfigError
from e2e_fp8.orchestration.environment import check_alignment_on_cuda, check_log_softmax_rows


def config(numerics=None, **sections):
    return parse_config({"model": {"architecture": "qwen3_moe", "num_key_value_heads": 2}, "numerics": numerics or {}, **sections})


def test_fast_is_every_sides_own_operators():
    assert set(choices_of(config().numerics).values()) == {"native"}


def test_bitwise_leaves_nothing_that_depends_on_the_batch():
    for name, choice in choices_at("bitwise").items():
        assert CAUSES[name].choices[choice].row_invariant, name
    for name, choice in choices_at("aligned").items():
        assert choice in ("native", choices_at("bitwise")[name]), name


def test_overrides_switch_single_causes():
    one_back = choices_of(config({"alignment": "bitwise", "alignment_overrides": {"swiglu": "native"}}).numerics)
    assert one_back == choices_at("bitwise") | {"swiglu": "native"}
    one_only = choices_of(config({"alignment_overrides": {"head": "shared"}}).numerics)
    assert one_only == choices_at("fast") | {"head": "shared"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({"swigloo": "native"}, ("swigloo", "swiglu")), ({"swiglu": "fused"}, ("alignment_overrides.swiglu", "'fused'", "native, shared"))],
)
def test_unknown_causes_and_choices_are_refused(overrides, words):
    with pytest.raises(ConfigError) as refused:
        config({"alignment_overrides": overrides})
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("level", ["aligned", "bitwise"])
def test_partial_sums_of_ranks_are_refused(level):
    with pytest.raises(ConfigError, match=r"training\.parallel\.tensor is 2"):
        config({"alignment": level}, training={"parallel": {"tensor": 2}})
    config({"alignment": "fast"}, training={"parallel": {"tensor": 2}})


@pytest.mark.parametrize("level", ["aligned", "bitwise"])
@pytest.mark.parametrize("field", ["expert", "pipeline"])
def test_ranks_that_compute_whole_rows_are_not(level, field):
    assert getattr(config({"alignment": level}, training={"parallel": {field: 2}}).training.parallel, field) == 2


def test_bitwise_needs_fp8_on_both_sides():
    with pytest.raises(ConfigError, match="training_precision is bf16"):
        config({"alignment": "bitwise", "training_precision": "bf16"})


@pytest.mark.parametrize(("head_dim", "fits"), [(32, True), (64, True), (80, False), (96, False), (104, True), (128, True), (256, False)])
def test_the_shared_attention_of_a_gpu_needs_heads_whose_keys_are_cut_alike(head_dim, fits):
    model = {"architecture": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": head_dim}
    cfg, native = (
        parse_config({"model": model, "numerics": {"alignment": "bitwise", "alignment_overrides": overrides}})
        for overrides in ({}, {"attention": "native"})
    )
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=rf"model\.head_dim is {head_dim}"):
        check_alignment_on_cuda(cfg)
    check_alignment_on_cuda(native)


@pytest.mark.parametrize(("field", "value"), [("moe_backend", "triton")])
def test_aligned_on_a_gpu_needs_the_trainers_kernels(field, value):
    with pytest.raises(ConfigError, match=rf"rollout\.{field}"):
        check_alignment_on_cuda(config({"alignment": "aligned"}, rollout={field: value}))
    check_alignment_on_cuda(config(rollout={field: value}))
    check_alignment_on_cuda(config({"alignment": "aligned"}))


@pytest.mark.parametrize(("size", "refused"), [(1022, False), (1026, True), (1028, False), (151_936, False)])
def test_bitwise_on_a_gpu_needs_rows_of_logits_of_whole_16_bytes(size, refused):
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 1026") if refused else contextlib.nullcontext():
        check_log_softmax_rows(size)
