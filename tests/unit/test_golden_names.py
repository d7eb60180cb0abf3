"""The layout's names, dtypes and shapes of the real models against the kept lists, and the lists against vLLM as it is installed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_names_process import DATA, GOLDEN, HEADER, fp8_config

from e2e_fp8.layout import EngineParallel, engine_shards, hf_tensors
from e2e_fp8.layout.engine import scale_name

SCRIPT = Path(__file__).with_name("golden_names_process.py")
MODELS = sorted(path.stem for path in (DATA / "hf_configs").glob("*.json"))
Row = tuple[str, str, tuple[int, ...]]
"""Parameter, dtype, shape."""


def lines_of(model: str) -> Iterator[tuple[Row, list[list[str]]]]:
    """Every parameter of a kept list, layer by layer, and the checkpoint's tensors in it, a list for each expert."""
    header, *lines = (line.split("\t") for line in (GOLDEN / f"{model}.tsv").read_text().splitlines())
    assert tuple(header) == HEADER
    for layers, parameter, dtype, shape, checkpoint in lines:
        first, _, last = layers.partition("-")
        for layer in range(int(first), int(last) + 1) if layers else [None]:
            prefix = "" if layer is None else f"model.layers.{layer}."
            name = parameter.replace("model.layers.*.", prefix)
            tensors = [prefix + tensor for tensor in checkpoint.split()]
            experts = re.search(r"\{0-(\d+)\}", checkpoint)
            stacks = [[re.sub(r"\{.*\}", str(e), t) for t in tensors] for e in range(int(experts[1]) + 1)] if experts else [tensors]
            yield (name, dtype, tuple(map(int, shape.split("x")))), stacks


def planned(model: str) -> Iterator[tuple[Row, list[list[str]]]]:
    """The same out of the layout plan of one rank."""
    for shard in engine_shards(fp8_config(DATA / "hf_configs" / f"{model}.json"), EngineParallel(), 0):
        stacks: dict[int | None, list[str]] = {}
        for part in shard.parts:
            stacks.setdefault(part.expert, []).append(part.hf_name)
        yield (shard.name, shard.dtype, shard.shape), list(stacks.values())
        if shard.fp8:
            assert shard.scale_shape is not None
            names = [[scale_name(name) for name in stack] for stack in stacks.values()]
            yield (scale_name(shard.name), "float32", shard.scale_shape), names


def by_name(rows: Iterator[tuple[Row, list[list[str]]]]) -> dict[str, tuple[Row, list[list[str]]]]:
    listed = list(rows)
    found = {row[0]: (row, stacks) for row, stacks in listed}
    assert len(found) == len(listed)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_has_the_kept_names(model):
    assert by_name(planned(model)) == by_name(lines_of(model))


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_has_the_kept_names(model):
    ours = []
    for tensor in hf_tensors(fp8_config(DATA / "hf_configs" / f"{model}.json")):
        ours += [tensor.name, scale_name(tensor.name)] if tensor.fp8 else [tensor.name]
    assert sorted(ours) == sorted(name for _, stacks in lines_of(model) for stack in stacks for name in stack)


def test_every_family_is_kept():
    kept = {fp8_config(path)["model_type"] for path in (DATA / "hf_configs").glob("*.json")}
    assert kept == {"qwen2", "qwen3", "qwen3_moe", "llama", "deepseek_v3"}
    assert sorted(path.stem for path in GOLDEN.glob("*.tsv")) == MODELS


def test_the_kept_lists_are_those_of_vllms_classes(tmp_path):
    """``python tests/unit/golden_names_process.py --write`` renews them for another vLLM."""
    done = subprocess.run([sys.executable, SCRIPT, "--to", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for model in MODELS:
        assert (tmp_path / f"{model}.tsv").read_text() == (GOLDEN / f"{model}.tsv").read_text(), model
