"""Stock vLLM on an exported block-FP8 checkpoint, without this package's plugin: ``python stock_vllm_process.py CHECKPOINT``.

Prints one JSON object: tensors of the running model compared with the checkpoint's files byte by byte, and a greedy completion.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_PLUGINS": "", "VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}

import torch
from safetensors import safe_open

from e2e_fp8.rollout.engine_layout import engine_layout, read_hf_config


def main(checkpoint: Path) -> None:
    """Load, compare, generate."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(checkpoint), max_model_len=128, gpu_memory_utilization=0.1, enforce_eager=True, moe_backend="deep_gemm")
    parameters = llm.apply_model(lambda model: dict(model.named_parameters()))[0]
    files = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is not a mapping)
    different = [
        slot.name
        for slot in engine_layout(read_hf_config(checkpoint))
        if not torch.equal(slot.view(parameters).cpu().contiguous().view(torch.uint8), files[slot.name].view(torch.uint8))
    ]
    prompts = json.loads((checkpoint / "prompts.json").read_text())
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0.0, max_tokens=8))
    print(json.dumps({"tensors": len(files), "different": different, "texts": [o.outputs[0].text for o in outputs]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
