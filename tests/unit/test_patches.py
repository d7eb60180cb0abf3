"""The patch registry: only reviewed sources are replaced, and the CPU scope restores what it changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from e2e_fp8 import patching
from e2e_fp8.errors import ConfigError
from megatron_patches.cpu_device import NullStream, megatron_on_cpu
from megatron_patches.registry import CPU_PATCHES


@pytest.fixture
def unpatched():
    for patch in CPU_PATCHES:
        patching.revert(patch)
    yield
    patching.apply_all(CPU_PATCHES)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("patch", CPU_PATCHES, ids=lambda p: p.name)
def test_registered_patch_applies_once_and_reverts(patch):
    with pytest.raises(ConfigError, match=patch.name):
        patching.verify_live(patch)
    assert patching.apply_once(patch)
    assert not patching.apply_once(patch)
    patching.verify_live(patch)
    patching.revert(patch)
    with pytest.raises(ConfigError, match="not in effect"):
        patching.verify_live(patch)


@pytest.mark.usefixtures("unpatched")
def test_changed_source_or_version_is_refused():
    patch = CPU_PATCHES[0]
    with pytest.raises(ConfigError, match=r"moe_splits_to_host.*0\.19\.2"):
        patching.apply_once(replace(patch, source_sha256="0" * 64))
    with pytest.raises(ConfigError, match=r"0\.18\.0.*0\.19\.2 is installed"):
        patching.apply_once(replace(patch, versions=("0.18.0",)))


@pytest.mark.parametrize("path", ["Node.__repr__", "ScalarNode"])
def test_methods_and_classes_can_be_replaced(path):
    import importlib.metadata

    import yaml.nodes

    owner, name = (yaml.nodes.Node, "__repr__") if "." in path else (yaml.nodes, path)
    original = getattr(owner, name)
    patch = replace(
        CPU_PATCHES[0],
        name=path,
        target=f"yaml.nodes:{path}",
        also_bound_in=(),
        distribution="PyYAML",
        versions=(importlib.metadata.version("PyYAML"),),
        source_sha256=patching.source_sha256(original),
        replacement=lambda *args: "replaced",
    )
    assert patching.apply_once(patch)
    patching.verify_live(patch)
    assert getattr(owner, name) is patch.replacement
    patching.revert(patch)
    assert getattr(owner, name) is original


@pytest.mark.usefixtures("unpatched")
def test_split_sizes_become_numpy_only_when_patched():
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.tensor([3, 5])
    assert torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    patching.apply_once(CPU_PATCHES[0])
    moved = token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True)
    assert isinstance(moved, np.ndarray)
    assert moved.tolist() == [3, 5]
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_every_patch_says_why_and_until_when():
    for patch in CPU_PATCHES:
        assert all((patch.reason, patch.upstream, patch.remove_when, patch.versions))


def test_cuda_names_mean_the_cpu_inside_the_scope_only():
    original = torch.cuda.current_device
    with megatron_on_cpu():
        with megatron_on_cpu():
            assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1.0], device=torch.cuda.current_device()).type() == "torch.cuda.FloatTensor"
        value = torch.ones(2, dtype=torch.bfloat16)
        assert value.cuda() is value
        assert value.type() == "torch.cuda.BFloat16Tensor"
        assert value.to("cuda").device.type == "cpu"
        assert value.to(torch.float64).dtype == torch.float64
        assert torch.cuda.current_stream() == NullStream()
    assert torch.cuda.current_device is original
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_scope_restores_after_an_error():
    original = torch.cuda.Stream

    def fail() -> None:
        with megatron_on_cpu():
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.cuda.Stream is original
    with megatron_on_cpu():
        assert torch.cuda.Stream is NullStream
