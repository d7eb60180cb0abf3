"""Name lists of vLLM's own model classes, as they are installed: one table for each configuration in tests/data/hf_configs.

Usage: ``python tests/unit/golden_names_process.py [--write | --to FOLDER]``. ``--write`` replaces tests/data/golden_names. Nothing of
e2e_fp8 is asked: vLLM builds each whole model without memory (torch's meta device), the class says which tensors of a checkpoint a
fused parameter takes. Layers that are alike are one line: layers, parameter (``*`` is the layer), dtype, shape on one rank, the
checkpoint's tensors in the order in which they are stacked (``{0-7}``: experts).
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm_models import SWITCHES, allow_latent_attention, building, vllm_config

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden_names"
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_KV_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""vLLM's own placeholders beside the attention; deleted once a model is loaded."""
HEADER = ("layers", "parameter", "dtype", "shape", "checkpoint")


def fp8_config(path: Path) -> dict[str, Any]:
    """A model's config.json with block FP8, its routers left out."""
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"] if config["model_type"] == "qwen3_moe" else 0
    return config | {"quantization_config": _FP8 | {"modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(layers)]}}


def build(config: dict[str, Any]) -> torch.nn.Module:
    """vLLM's model of ``config`` on one rank, on the meta device."""
    from vllm.model_executor.model_loader.utils import initialize_model

    of_model, rendezvous = vllm_config(config), Path(tempfile.mkdtemp()) / "rendezvous"
    with building(of_model, 1, 0, f"file://{rendezvous}"), torch.device("meta"):
        return initialize_model(of_model)


def checkpoint_names(model: Any) -> dict[str, str]:
    """Parameter of the model to the checkpoint's tensors that it takes, joined by spaces."""
    packed: dict[str, list[str]] = dict(model.packed_modules_mapping)
    found = {}
    for module_name, module in model.named_modules():
        parent, _, last = module_name.rpartition(".")
        for leaf, _ in module.named_parameters(recurse=False):
            if last == "routed_experts" and leaf.startswith(("w13_", "w2_")):
                names = _expert_names(module.get_expert_mapping(), f"{parent}.{leaf}")
            else:
                names = [f"{parent}.{part}.{leaf}".lstrip(".") for part in packed.get(last, [last])]
            found[f"{module_name}.{leaf}"] = " ".join(names)
    return found


def _expert_names(mapping: list[tuple[str, str, int, str]], parameter: str) -> list[str]:
    """Of each shard of ``parameter`` the name for all experts, in the order of the shards (w1, w3)."""
    taken = sorted((shard, expert, tensor, part) for part, tensor, expert, shard in mapping if part in parameter)
    last = taken[-1][1]
    firsts = [(tensor, part) for _, expert, tensor, part in taken if expert == 0]
    return [parameter.replace(part, tensor.replace(".0.", f".{{0-{last}}}.", 1)) for tensor, part in firsts]


def table(model: torch.nn.Module) -> str:
    """The golden table of one model, sorted by layer, then name."""
    from_checkpoint = checkpoint_names(model)
    alike: dict[tuple[str, ...], list[int]] = {}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in _KV_CACHE_SCALES:
            continue
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        prefix = f"model.layers.{layer}."
        shown = name.replace(prefix, "model.layers.*.", 1) if layer else name
        tensors = " ".join(text.removeprefix(prefix) if layer else text for text in from_checkpoint[name].split())
        row = (shown, str(parameter.dtype).removeprefix("torch."), "x".join(map(str, parameter.shape)), tensors)
        alike.setdefault(row, []).append(int(layer) if layer else -1)
    rows = sorted((layers, row) for row, layers in alike.items())
    return "\n".join("\t".join(row) for row in (HEADER, *((_span(layers), *row) for layers, row in rows))) + "\n"


def _span(layers: list[int]) -> str:
    if layers == [-1]:
        return ""
    assert layers == list(range(layers[0], layers[-1] + 1)), "layers that are alike follow each other"
    return f"{layers[0]}-{layers[-1]}"


def main(folder: Path) -> None:
    os.environ.update(SWITCHES, VLLM_DIST_IDENT="golden-names", HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    allow_latent_attention()
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((DATA / "hf_configs").glob("*.json")):
        (folder / f"{path.stem}.tsv").write_text(table(build(fp8_config(path))))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        main(GOLDEN)
    elif sys.argv[1:2] == ["--to"]:
        main(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
