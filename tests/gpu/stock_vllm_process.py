"""Stock vLLM on an exported block-FP8 checkpoint, without this package's plugin: ``python stock_vllm_process.py CHECKPOINT``.

Prints one JSON object: tensors of the running model compared with the checkpoint's files byte by byte, and the greedy completions of
``CHECKPOINT/prompts.json``, each prompt alone in its batch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from e2e_fp8.rollout.engine_layout import engine_layout, read_hf_config

STOCK_ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What a user of stock vLLM sets; no variable of this package."""
STOCK_ARGS: dict[str, Any] = {
    "max_model_len": 128,
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.02,
    "enforce_eager": True,
    "moe_backend": "deep_gemm",
}
"""Keyword arguments of ``vllm.LLM`` besides the model; the HTTP server is started with the same as flags."""
MAX_TOKENS = 8


def main(checkpoint: Path) -> None:
    """Load, compare, generate."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(checkpoint), **STOCK_ARGS)
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
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    # One call for each prompt: the shapes of a batch choose kernels, and the server gets the prompts one by one.
    prompts = json.loads((checkpoint / "prompts.json").read_text())
    answers = [llm.generate({"prompt_token_ids": ids}, greedy)[0].outputs[0] for ids in prompts]
    result = {
        "tensors": len(files),
        "different": different,
        "texts": [a.text for a in answers],
        "ids": [list(a.token_ids) for a in answers],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ |= STOCK_ENVIRONMENT
    main(Path(sys.argv[1]))
