"""Buckets and manifests: what is packed comes out byte for byte, and nothing malformed is accepted."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.buckets import ALIGNMENT, UpdateManifest, UpdateStep, bucket_bytes, lying, pack, packing, plan_update, views

_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.uint8)


@st.composite
def tensor_sets(draw) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12))
    tensors = []
    for index, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(_DTYPES))
        raw = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tensors.append((f"t{index}", raw.view(dtype).view(shape)))
    return tensors


@given(tensor_sets(), st.integers(1, 4096))
def test_every_byte_arrives_and_buckets_keep_their_size(tensors, max_bytes):
    manifest = plan_update(tensors, policy_version=3, max_bytes=max_bytes)
    received = {}
    for bucket in manifest.buckets:
        buffer = torch.full((manifest.capacity,), 0xAA, dtype=torch.uint8)
        pack(bucket, dict(tensors), buffer)
        for spec, view in zip(bucket, views(bucket, buffer), strict=True):
            received[spec.name] = view.clone()
        assert len(bucket) == 1 or bucket_bytes(bucket) <= max_bytes
        assert all(spec.offset % ALIGNMENT == 0 for spec in bucket)
    assert list(received) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(received[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert manifest.num_bytes == sum(t.numel() * t.element_size() for _, t in tensors)


@given(tensor_sets())
def test_manifest_survives_json_and_its_digest_tells_changes(tensors):
    manifest = plan_update(tensors, policy_version=3, max_bytes=512)
    assert UpdateManifest.from_json(manifest.to_json()) == manifest
    assert plan_update(tensors, policy_version=4, max_bytes=512).digest != manifest.digest
    renamed = [("other", tensors[0][1]), *tensors[1:]]
    assert plan_update(renamed, policy_version=3, max_bytes=512).digest != manifest.digest


def test_a_view_of_a_larger_tensor_is_packed_as_what_it_shows():
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    manifest = plan_update([("part", whole[2:5, 1:3])], policy_version=0, max_bytes=1 << 20)
    buffer = torch.zeros(manifest.capacity, dtype=torch.uint8)
    pack(manifest.buckets[0], {"part": whole[2:5, 1:3]}, buffer)
    assert torch.equal(views(manifest.buckets[0], buffer)[0], whole[2:5, 1:3])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "malformed"),
        ('{"policy_version": 1}', "malformed"),
        ('{"policy_version": 1, "buckets": [[["a", "int64", [2], 0]]]}', "malformed"),
        ('{"policy_version": 1, "buckets": [[["a", "float32", [100], 0], ["b", "float32", [1], 256]]]}', "b has an impossible place"),
        ('{"policy_version": 1, "buckets": [[["a", "float32", [1], 4]]]}', "a has an impossible place"),
        ('{"policy_version": 1, "buckets": [[["a", "float32", [1], 0]], [["a", "float32", [1], 0]]]}', "a came twice"),
        ('{"policy_version": 1, "buckets": [[["a", "float32", [-1, -2], 0]]]}', "a has an impossible place"),
    ],
)
def test_malformed_manifests_are_refused(text, why):
    with pytest.raises(EngineError, match=f"nothing was written: .*{why}"):
        UpdateManifest.from_json(text)


def test_a_dtype_that_is_no_weight_is_refused_by_name():
    with pytest.raises(EngineError, match=r"nothing was written: steps is torch.int64"):
        plan_update([("steps", torch.zeros(2, dtype=torch.int64))], policy_version=1, max_bytes=10)


def test_manifest_is_plain_json():
    manifest = plan_update([("w", torch.zeros(2, 3, dtype=torch.bfloat16))], policy_version=5, max_bytes=10)
    assert json.loads(manifest.to_json()) == {"policy_version": 5, "buckets": [[["w", "bfloat16", [2, 3], 0]]]}


def test_tensors_of_one_engine_parameter_that_follow_each_other_are_one_message():
    """Query, key and value, gate and up; not what lies elsewhere, in another layer, or is no neighbour of its parameter."""
    block = torch.empty(20, 256, dtype=torch.uint8)
    rows = {
        "self_attn.q_proj": (0, 4),
        "self_attn.k_proj": (4, 6),
        "self_attn.v_proj": (6, 8),
        "mlp.gate_proj": (8, 12),
        "mlp.up_proj": (12, 16),
    }
    tensors = [(f"model.layers.0.{name}.weight", block[a:b]) for name, (a, b) in rows.items()]
    tensors += [("model.layers.1.mlp.gate_proj.weight", block[16:18]), ("model.layers.1.mlp.up_proj.weight", torch.empty(2, 256))]
    tensors += [("model.layers.0.self_attn.o_proj.weight", block[18:20])]
    manifest = plan_update(tensors, policy_version=0, max_bytes=1 << 20, alone_bytes=1)
    named = [[spec.name.removeprefix("model.layers.") for spec in bucket] for bucket in manifest.buckets]
    together = [[f"0.self_attn.{part}_proj.weight" for part in "qkv"], ["0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"]]
    alone = ["0.self_attn.o_proj.weight", "1.mlp.gate_proj.weight", "1.mlp.up_proj.weight"]
    assert sorted(named) == sorted([*together, *([name] for name in alone)])
    by_name = dict(tensors)
    assert all(lying(bucket, [by_name[spec.name] for spec in bucket]) is not None for bucket in manifest.buckets)


def test_scales_of_experts_are_packed_in_one_copy_whatever_order_they_come_in():
    """A few hundred bytes each, neighbours in memory: side by side in the bucket too, before what lies elsewhere."""
    block = torch.rand(64, 2, 3, 16)
    tensors = [
        (f"m.experts.{expert}.{part}_proj.weight_scale_inv", block[expert, row])
        for row, part in enumerate(("gate", "up"))
        for expert in range(64)
    ]
    tensors.insert(5, ("m.norm.weight", torch.rand(7, 3).t()))
    manifest = plan_update(tensors, policy_version=0, max_bytes=1 << 20, alone_bytes=1 << 16)
    (bucket,) = manifest.buckets
    buffer = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
    plan = packing(bucket, dict(tensors), buffer)
    assert plan.num_copies == 2
    plan.run()
    assert all(torch.equal(view, dict(tensors)[spec.name]) for spec, view in zip(bucket, views(bucket, buffer), strict=True))


def test_packed_buckets_come_between_those_that_leave_as_they_lie():
    """Packing takes the CPU and the device time: the wire has something to do before, and after."""
    tensors = [(f"layer.{index}.big", torch.rand(64, 64)) for index in range(6)]
    tensors += [(f"layer.{index}.small", torch.rand(8, 9)[:, :8]) for index in range(40)]
    manifest = plan_update(tensors, policy_version=0, max_bytes=1 << 12, alone_bytes=1 << 12)
    kinds = ["big" if all(spec.name.endswith("big") for spec in bucket) else "small" for bucket in manifest.buckets]
    assert kinds == ["big"] * 3 + ["small"] * kinds.count("small") + ["big"] * 3
    assert kinds.count("small") > 1
    assert {spec.name for spec in manifest.specs()} == {name for name, _ in tensors}


def test_a_bucket_is_as_large_as_its_last_tensor_reaches():
    tensors = [(str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate((1, 0, 17, 300, 5, 0))]
    manifest = plan_update(tensors, policy_version=0, max_bytes=64)
    for bucket in manifest.buckets:
        assert bucket_bytes(bucket) == max(spec.offset + spec.num_bytes for spec in bucket)
    assert bucket_bytes(()) == 0


def test_a_step_comes_back_as_it_was_sent_and_an_announced_one_is_whole():
    step = UpdateStep(layout="l", policy_version=3, channel="c", begin=True, update={"buckets": [0]}, finish=True)
    announced = replace(step, flags="f", turn=7, patience_s=60)
    for sent in (step, announced, replace(step, finish=False)):
        assert UpdateStep.from_json(json.dumps(sent.to_dict())) == sent
    for part in (replace(announced, begin=False), replace(announced, finish=False)):
        with pytest.raises(EngineError, match="An announced update is one step"):
            UpdateStep.from_json(json.dumps(part.to_dict()))
    with pytest.raises(EngineError, match="Generation cannot go on in a step that does not finish its update"):
        UpdateStep.from_json(json.dumps(replace(step, finish=False, resume=True).to_dict()))
    for patience_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(EngineError, match="would wait"):
            UpdateStep.from_json(json.dumps(replace(announced, patience_s=patience_s).to_dict()))
    for name, wrong in (("flags", None), ("turn", "7"), ("patience_s", "60"), ("begin", 1), ("later", 0)):
        with pytest.raises(EngineError, match="Malformed step"):
            UpdateStep.from_json(json.dumps(announced.to_dict() | {name: wrong}))
