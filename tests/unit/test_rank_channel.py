"""Orders between ranks: what is packed comes out bit for bit."""

from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, UserError
from e2e_fp8.orchestration.ranks.channel import _error_class, _packed, _unpacked, batch_tensors, batches_from, refusal
from e2e_fp8.orchestration.ranks.loss_recipe import PolicyLoss, SupervisedLoss, loss_from_json
from e2e_fp8.training.microbatches import empty_batch

DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.bool)


@given(shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6), seed=st.integers(0, 2**31))
def test_orders_arrive_as_they_were_told(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype, shape in shapes:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensors.append(raw.view(dtype).reshape(shape))
    order = {"do": "x", "rate": 0.1 + seed, "text": "ä\n", "nested": [[1, None], {"a": True}]}
    heard, found = _unpacked(_packed(order, tensors))
    assert heard == order
    for ours, theirs in zip(found, tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_micro_batches_keep_which_fields_they_have():
    bare, full = empty_batch(), empty_batch()
    object.__setattr__(bare, "ref_log_probs", None)
    object.__setattr__(full, "keep_mask", torch.tensor([0.5]))
    back = batches_from(*batch_tensors([bare, full]))
    for ours, theirs in zip(back, (bare, full), strict=True):
        for field in fields(theirs):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            assert (left is None) == (right is None), field.name
            assert left is None or torch.equal(left, right)


def test_losses_are_named_by_what_they_are_made_of():
    cfg = Config.model_validate({"objective": {"clip_low": 0.1, "kl_coef": 0.3}, "correction": {"preset": "decoupled_token_is"}})
    loss = PolicyLoss(objective=cfg.objective, correction=cfg.correction, max_response_tokens=7)
    assert loss_from_json(loss.to_json()) == loss
    assert loss_from_json(SupervisedLoss().to_json()) == SupervisedLoss()


def test_a_refusal_keeps_its_class():
    answer = refusal(CheckpointError("no space"))
    assert answer == {"error": "no space", "kind": "CheckpointError"}
    assert _error_class("CheckpointError") is CheckpointError
    assert _error_class("Unknown") is UserError
