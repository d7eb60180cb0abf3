"""CheckpointStore: exact round trips, and real faults: SIGKILL, a full file system, damaged files."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e_fp8.errors import CheckpointError
from e2e_fp8.orchestration.checkpoint import CheckpointStore

DTYPES = [
    torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def assert_same(a, b, path="state"):
    """Same types, same order of keys, same bytes (NaN payloads included)."""
    assert type(a) is type(b) or (isinstance(a, torch.nn.Parameter) and type(b) is torch.Tensor), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        assert [type(k) for k in a] == [type(k) for k in b], path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key!r}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.detach().contiguous().view(-1).view(torch.uint8).tolist() == b.view(-1).view(torch.uint8).tolist(), path
    elif isinstance(a, float) and a != a:
        assert b != b, path
    else:
        assert a == b, path


def random_bytes_tensor(dtype, shape, generator):
    """Every bit pattern may occur, NaNs and subnormals included (bool: 0 and 1)."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


keys = st.one_of(st.text(alphabet=st.sampled_from("ab/~$[]()0127.é"), max_size=6), st.integers(-3, 40))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
tensors = st.builds(
    lambda dtype, shape, seed: random_bytes_tensor(dtype, shape, torch.Generator().manual_seed(seed)),
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 2**31),
)  # fmt: skip
trees = st.recursive(
    scalars | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=2).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state=st.dictionaries(keys, trees, max_size=4))
def test_round_trip_is_exact(state, tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("c"), keep=1)
    store.save(3, state)
    assert_same(state, store.load(3))


@pytest.mark.parametrize("key_pair", [("a/b", "a~1b"), (1, "1"), (1, "(1)"), ("~0", "~"), ("$tensor", "$dict"), ("", "/")])
def test_colliding_keys_stay_apart(tmp_path, key_pair):
    state = {key_pair[0]: torch.tensor([1.0]), key_pair[1]: torch.tensor([2.0]), "n": {key_pair[0]: {key_pair[1]: torch.tensor([3.0])}}}
    store = CheckpointStore(tmp_path, keep=1)
    store.save(0, state)
    assert_same(state, store.load(0))


def test_views_ties_and_parameters(tmp_path):
    base = torch.randn(6, 4)
    state = {"w": torch.nn.Parameter(base), "tied": base, "t": base.t(), "slice": base[1:3, ::2], "scalar": torch.tensor(7)}
    store = CheckpointStore(tmp_path, keep=1)
    store.save(0, state)
    loaded = store.load(0)
    assert_same(state, loaded)
    loaded["tied"].zero_()
    assert_same(base, loaded["w"])


def test_optimizer_state_dict_survives(tmp_path):
    layer = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    layer(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
    loaded = store.load(1)
    assert_same(optimizer.state_dict(), loaded["optimizer"])
    torch.optim.AdamW(layer.parameters()).load_state_dict(loaded["optimizer"])


def test_large_states_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr("e2e_fp8.orchestration.checkpoint_files.SHARD_BYTES", 100)
    state = {f"t{i}": torch.randn(n) for i, n in enumerate([10, 15, 3, 40, 1, 0])}
    folder = CheckpointStore(tmp_path, keep=1).save(0, state)
    assert len(list(folder.glob("tensors-*.safetensors"))) == 4
    assert_same(state, CheckpointStore(tmp_path, keep=1).load(0))


def test_folder_holds_no_pickle(tmp_path):
    folder = CheckpointStore(tmp_path, keep=1).save(0, {"a": torch.zeros(2), "b": 1})
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "state.json", "tensors-00000.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000000"]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "object"),
        ({1.5: 1}, "1.5"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(3).to_sparse(), "plain"),
        (b"x", "bytes"),
    ],
)
def test_unsupported_value_names_its_key(tmp_path, value, word):
    with pytest.raises(TypeError, match="state/outer/inner") as caught:
        CheckpointStore(tmp_path, keep=1).save(0, {"outer": {"inner": value}})
    assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_keep_and_latest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (0, 5, 9, 12):
        store.save(step, {"step": step})
        assert store.latest() == step
    assert store.steps() == [9, 12]
    assert store.load(9) == {"step": 9}


def test_saving_an_earlier_step_drops_the_abandoned_later_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(20, {"x": "old"})
    store.save(15, {"x": "new"})
    assert store.latest() == 15
    assert store.steps() == [15]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(4, {"x": torch.zeros(3)})
    store.save(4, {"x": torch.ones(3)})
    assert_same({"x": torch.ones(3)}, store.load(4))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def test_a_checkpoint_moved_aside_still_counts(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.save(4, {"x": 1})
    folder.rename(folder.with_name(folder.name + ".replaced"))
    assert store.latest() == 4
    assert store.load(4) == {"x": 1}


def damage_truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, Path.unlink])
@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json", "manifest.json"])
def test_damage_is_found_and_older_good_one_named(tmp_path, damage, name, caplog):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.full((64,), float(step)), "step": step})
    damage(tmp_path / "step_00000002" / name)
    damage(tmp_path / "step_00000003" / name)
    with pytest.raises(CheckpointError) as caught:
        store.load(3)
    assert name in str(caught.value)
    assert "next older good checkpoint is step 1" in str(caught.value)
    assert store.latest() == 1
    assert "step 3 is passed over" in caplog.text
    assert name in caplog.text
    assert_same({"w": torch.full((64,), 1.0), "step": 1}, store.load(1))


def test_flip_of_any_byte_of_the_manifest_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(7, {"w": torch.arange(9)}) / "manifest.json"
    good = path.read_bytes()
    inside = [i for i in range(len(good)) if good[i : i + 1].strip()]  # not the white space between tokens
    for position in inside:
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            store.load(7)
    path.write_bytes(good)
    assert_same({"w": torch.arange(9)}, store.load(7))


def test_load_latest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="no checkpoint under"):
        store.load_latest()
    store.save(1, {"x": 1})
    damage_flip(store.save(2, {"x": 2}) / "state.json")
    assert store.load_latest() == {"x": 1}


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    damage_flip(store.save(1, {"a": torch.zeros(8)}) / "tensors-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"No checkpoint under .* is whole"):
        store.latest()
    with pytest.raises(CheckpointError, match="no older good checkpoint"):
        store.load(1)


def test_missing_step_and_unusable_root(tmp_path):
    with pytest.raises(CheckpointError, match=r"step_00000005/manifest.json cannot be read \(No such file"):
        CheckpointStore(tmp_path, keep=1).load(5)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        CheckpointStore(tmp_path / "file" / "sub", keep=1)


KILLED = """
    import sys, torch
    from pathlib import Path
    from e2e_fp8.orchestration.checkpoint import CheckpointStore
    torch.set_num_threads(1)
    store = CheckpointStore(Path(sys.argv[1]), keep=2)
    step = 0
    while True:
        store.save(step, {"w": torch.full((4_000_000,), float(step)), "step": step})
        step += 1
"""


def test_kill_9_in_the_middle_of_a_save(tmp_path):
    """SIGSTOP proves the save is under way (temporary folder with bytes in it) before SIGKILL ends it."""
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.002)
            if not (tmp_path / "step_00000002").exists():
                continue
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            partial = list(tmp_path.glob(".tmp-step_*/tensors-*.safetensors"))
            if partial and not list(tmp_path.glob(".tmp-step_*/manifest.json")):
                break
            os.kill(child.pid, signal.SIGCONT)
    finally:
        child.kill()
        child.wait()
    assert partial[0].exists()
    store = CheckpointStore(tmp_path, keep=2)
    step = store.latest()
    assert step is not None
    assert step >= 1
    assert_same({"w": torch.full((4_000_000,), float(step)), "step": step}, store.load(step))
    store.save(step + 1, {"step": step + 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{step:08d}", f"step_{step + 1:08d}"]


FULL = """
    import json, resource, shutil, subprocess, sys, torch
    from pathlib import Path
    from e2e_fp8.errors import CheckpointError
    from e2e_fp8.orchestration.checkpoint import CheckpointStore
    torch.set_num_threads(1)

    def contents(root):
        return sorted((str(p), p.read_bytes() if p.is_file() else None) for p in root.rglob("*"))

    for index, (kind, numbers, fits, reason) in enumerate(json.loads(sys.argv[2])):
        root = Path(sys.argv[1]) / str(index)
        root.mkdir()
        if kind != "limit":
            subprocess.run(["mount", "-t", "tmpfs", "-o", kind, "none", str(root)], check=True)
        store = CheckpointStore(root, keep=2)
        store.save(1, {"w": torch.ones(1000)})
        before = contents(root)
        assert (shutil.disk_usage(root).free >= 4 * numbers) == fits, "the case does not test what it says"
        if kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            store.save(2, {"w": torch.ones(numbers), "x": 1})
        except CheckpointError as error:
            print(error)
        else:
            raise AssertionError("the save succeeded")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert contents(root) == before
        assert store.latest() == 1 and torch.equal(store.load(1)["w"], torch.ones(1000))
"""

LIMIT_CASE = ("limit", 100_000, True, "the file size limit is reached")
TMPFS_CASES = [
    ("size=1m", 1_000_000, False, "the disk is full"),  # refused before the first byte
    ("size=64k,nr_inodes=100", 12_000, True, "the disk is full"),  # the tensors fit, the files after them do not
    ("size=8m,nr_inodes=7", 1_000, True, "the disk is full"),  # bytes are free, inodes are not
]


def test_full_disk(tmp_path):
    """Real small file systems in a private mount namespace, and a real file size limit, which needs no privilege."""
    can_mount = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    cases = [LIMIT_CASE, *TMPFS_CASES] if can_mount else [LIMIT_CASE]
    command = [*(["unshare", "-m"] if can_mount else []), sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path), json.dumps(cases)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    messages = result.stdout.strip().splitlines()
    for index, ((_, numbers, _, reason), message) in enumerate(zip(cases, messages, strict=True)):
        assert reason in message
        assert f"needs {4 * numbers} bytes" in message
        assert "bytes are free" in message
        assert str(tmp_path / str(index) / "step_00000002") in message


def test_manifest_is_readable_json(tmp_path):
    folder = CheckpointStore(tmp_path, keep=1).save(2, {"w": torch.zeros(1)})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 2
    assert manifest["files"]["state.json"]["bytes"] == (folder / "state.json").stat().st_size
