"""Where every row and column of a model lies: Hugging Face checkpoint, Megatron-Core rank, vLLM rank. Pure Python, no torch."""

from e2e_fp8.layout.engine import engine_shards
from e2e_fp8.layout.families import HfTensor, hf_tensors, ignored_prefixes, model_shape
from e2e_fp8.layout.megatron import VALUE_HEAD, megatron_shards, value_model_shards
from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
from e2e_fp8.layout.shards import Part, ShardedParameter

__all__ = [
    "VALUE_HEAD",
    "EngineParallel",
    "HfTensor",
    "MegatronParallel",
    "Part",
    "ShardedParameter",
    "engine_shards",
    "hf_tensors",
    "ignored_prefixes",
    "megatron_shards",
    "model_shape",
    "value_model_shards",
]
