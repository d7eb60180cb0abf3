"""A Hugging Face checkpoint on disk: sharded safetensors, index file, config.json. Stock vLLM serves the block-FP8 form."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from e2e_fp8.errors import CheckpointError
from e2e_fp8.types import ExportedTensor


def write_hf_checkpoint(
    out: Path,
    tensors: Iterable[ExportedTensor],
    hf_config: dict[str, Any],
    *,
    max_shard_bytes: int = 4 << 30,
    tokenizer_dir: Path | None = None,
) -> int:
    """Write ``out`` atomically (a temporary sibling, then a rename); returns the bytes of tensor data.

    Raises:
        CheckpointError: ``out`` exists and is not empty, or the disk is full.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} exists and is not empty; give a new folder or remove it.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        total = _write_shards(partial, tensors, max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        if tokenizer_dir is not None:
            for name in (
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "generation_config.json",
                "chat_template.jinja",
            ):
                if (tokenizer_dir / name).exists():
                    shutil.copy(tokenizer_dir / name, partial / name)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"could not write the checkpoint {out}: {reason}; free space or choose another folder.") from error
    return total


def _write_shards(folder: Path, tensors: Iterable[ExportedTensor], max_shard_bytes: int) -> int:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        if pending:
            save_file(pending, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append(list(pending))
            pending, pending_bytes = {}, 0

    for entry in tensors:
        size = entry.tensor.numel() * entry.tensor.element_size()
        if pending_bytes + size > max_shard_bytes:
            flush()
        pending[entry.name] = entry.tensor.detach().cpu().contiguous()
        pending_bytes += size
        total += size
    flush()
    weight_map = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"shard-{index}.safetensors", folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
    return total
