"""Checkpoints of the ``disk`` transport: a servable Hugging Face folder for each policy version."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from e2e_fp8.export.hf_checkpoint import write_hf_checkpoint
from e2e_fp8.sync.channels import VERSION_KEY
from e2e_fp8.types import ExportedTensor


def checkpoint_writer(model_dir: Path) -> Callable[[Path, Mapping[str, torch.Tensor], int], None]:
    """A function that writes (folder, HF name -> tensor, policy version) with the config.json and tokenizer of ``model_dir``.

    vLLM starts from such a folder as it is; config.json names the version under ``e2e_fp8_policy_version``.
    """

    def write(folder: Path, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        hf_config = json.loads((model_dir / "config.json").read_text()) | {VERSION_KEY: policy_version}
        entries = (ExportedTensor(name=name, tensor=tensor) for name, tensor in tensors.items())
        write_hf_checkpoint(folder, entries, hf_config, tokenizer_dir=model_dir)

    return write
