"""Prepared copies: bytes arrive whatever the views, neighbours become one, and a plan can be run again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from e2e_fp8.rollout.engine_layout import TensorSlot
from e2e_fp8.rollout.rank_layout import RankSlot
from e2e_fp8.rollout.weight_loading import InPlaceLoader, LiveParameters
from e2e_fp8.sync import copies
from e2e_fp8.sync.buckets import TensorSpec
from e2e_fp8.sync.copies import CopyPlan
from e2e_fp8.sync.engine_receipt import Part

_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@st.composite
def cut_blocks(draw):
    """Two blocks of one dtype, cut into the same rows, some of which are copied only by their first columns."""
    dtype = draw(st.sampled_from(_DTYPES))
    columns = draw(st.integers(1, 40))
    rows = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    widths = [draw(st.sampled_from([columns, columns, max(1, columns // 2)])) for _ in rows]
    order = draw(st.permutations(range(len(rows))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = sum(rows) * columns * dtype.itemsize
    blocks = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(-1, columns) for _ in range(2)]
    return *blocks, rows, widths, order


@settings(deadline=None)
@given(cut_blocks(), st.sampled_from([1, 64, 1 << 20]))
def test_every_byte_arrives_and_no_other_changes(case, large):
    target, source, rows, widths, order = case
    expected, pairs, start = target.clone(), [], 0
    for count, width in zip(rows, widths, strict=True):
        pairs.append((target[start : start + count, :width], source[start : start + count, :width]))
        for row in range(start, start + count):
            for column in range(width):
                expected[row, column] = source[row, column]
        start += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_LARGE_BYTES", large)
        plan = CopyPlan(pairs[index] for index in order)
    for _ in range(2):
        plan.run()
        assert raw(target) == raw(expected)
    if widths == [source.shape[1]] * len(rows):
        assert plan.num_copies <= 1


def test_a_plan_reads_what_lies_there_when_it_runs():
    target, source = torch.zeros(4, 64), torch.zeros(4, 64)
    plan = CopyPlan([(target[:2], source[:2]), (target[2:], source[2:])])
    assert plan.num_copies == 1
    source.fill_(3.0)
    plan.run()
    assert torch.equal(target, source)


def test_neighbours_in_one_memory_only_are_not_joined():
    target, apart = torch.zeros(4, 8), [torch.full((2, 8), 1.0), torch.full((2, 8), 2.0)]
    plan = CopyPlan([(target[:2], apart[0]), (target[2:], apart[1])])
    assert plan.num_copies == 2
    plan.run()
    assert target[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 6, bias=False)
        self.tied = self.inner


def slot(name: str, row: int, rows: int, start: int = 0) -> RankSlot:
    place = TensorSlot(name=name, shape=(rows, 8), dtype=torch.float32, parameter="inner.weight", row=row)
    return RankSlot(part=Part(name=name, start=(start, 0), shape=(rows, 8)), slot=place)


def test_live_parameters_are_the_models_and_a_replaced_one_is_noticed():
    model = Stacked()
    live = LiveParameters(model)
    assert list(live.named()) == [name for name, _ in model.named_parameters()] == ["inner.weight"]
    loader = InPlaceLoader(live, [slot("a", 0, 2), slot("b", 2, 4, start=4)])
    weights = {"a": torch.randn(2, 8), "b": torch.randn(8, 8)}
    for _ in range(2):
        loader.start()
        loader.load(weights, reusable=True)
        assert torch.equal(model.inner.weight.detach(), torch.cat([weights["a"], weights["b"][4:]]))
        weights["a"].normal_()
        model.inner.weight = nn.Parameter(torch.zeros(6, 8))
    spec = {"dtype": torch.float32, "offset": 0}
    loader.start()
    inside = loader.placed(TensorSpec(name="a", shape=(2, 8), **spec))
    assert inside is not None
    assert inside.data_ptr() == model.inner.weight.data_ptr()
    assert loader.placed(TensorSpec(name="b", shape=(8, 8), **spec)) is None
