"""Which parameters can be views of the trainer's memory: decided from addresses, checked by writing through one side."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.rollout.engine_layout import TensorSlot
from e2e_fp8.rollout.shared import plan_sharing

E4M3 = torch.float8_e4m3fn


def slot(name: str, rows: int, columns: int, *, expert: int | None = None, row: int = 0) -> TensorSlot:
    return TensorSlot(name=name, shape=(rows, columns), dtype=E4M3, parameter="p", expert=expert, row=row, fp8=True)


def storage(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def stacked(experts: int, parts: list[int], columns: int, lead: int):
    """Slots of E x [parts], and tensors of one block that begins ``lead`` bytes into a storage."""
    rows = sum(parts)
    block = storage(lead + experts * rows * columns)[lead:].view(experts, rows, columns)
    slots, tensors = [], {}
    for expert in range(experts):
        row = 0
        for index, count in enumerate(parts):
            slots.append(slot(f"e{expert}.{index}", count, columns, expert=expert, row=row))
            tensors[slots[-1].name] = block[expert, row : row + count]
            row += count
    return slots, tensors, block


@settings(deadline=None, max_examples=40)
@given(
    experts=st.integers(1, 5),
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    columns=st.integers(1, 9),
    lead=st.integers(0, 64),
)
def test_a_block_in_order_is_one_storage(experts, parts, columns, lead):
    slots, tensors, block = stacked(experts, parts, columns, lead)
    sharing = plan_sharing(slots, tensors, {"p": storage(experts, sum(parts), columns)})
    assert sharing.reasons == {}
    view = sharing.views["p"]
    assert view.shape == block.shape
    for index, s in enumerate(slots):
        tensors[s.name].view(torch.uint8).fill_(index + 1)
        assert torch.equal(s.view({"p": view}).view(torch.uint8), torch.full(s.shape, index + 1, dtype=torch.uint8))
    assert sharing.copied_slots(slots) == []


@settings(deadline=None, max_examples=20)
@given(experts=st.integers(2, 5), first=st.integers(0, 4), second=st.integers(0, 4))
def test_two_experts_in_each_others_place_are_not_shared(experts, first, second):
    slots, tensors, _ = stacked(experts, [2, 3], 4, 0)
    a, b = f"e{first % experts}.0", f"e{second % experts}.0"
    tensors[a], tensors[b] = tensors[b], tensors[a]
    sharing = plan_sharing(slots, tensors, {"p": storage(experts, 5, 4)})
    assert bool(sharing.views) == (a == b)
    if a != b:
        assert "does not follow" in sharing.reasons["p"]
        assert sharing.copied_slots(slots) == slots


@pytest.mark.parametrize(
    ("tensors", "parameter", "reason"),
    [
        ({"a": storage(2, 4), "b": storage(2, 4)}, storage(4, 4), "does not follow"),
        ({"a": storage(4, 4)[:2], "b": storage(4, 4)[2:]}, storage(4, 4), "does not follow"),
        ({"a": storage(2, 8)[:, :4], "b": storage(2, 8)[:, :4]}, storage(4, 4), "are padded in the trainer"),
        ({"a": storage(2, 4), "b": storage(2, 4)}, storage(64, 4), "pads it"),
        ({"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}, storage(4, 4), "torch.float32"),
    ],
)
def test_what_cannot_be_shared_has_a_reason(tensors, parameter, reason):
    sharing = plan_sharing([slot("a", 2, 4), slot("b", 2, 4, row=2)], tensors, {"p": parameter})
    assert sharing.views == {}
    assert reason in sharing.reasons["p"]


def test_a_parameter_that_vllm_lacks_is_named():
    assert plan_sharing([slot("a", 2, 4)], {"a": storage(2, 4)}, {}).reasons == {"p": "vLLM has no such parameter"}
