"""What the real trainer's memory looks like to the ``nccl`` transport: which tensors leave it as one message, without packing."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from collections import defaultdict
from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.weight_sync import exported_tensors
from e2e_fp8.sync.buckets import _parameter_group, lying, plan_update
from e2e_fp8.training.engine import MegatronEngine

cfg = Config.model_validate({"model": {"architecture": sys.argv[1], "num_experts": 8}, "run": {"backend": "cuda"}})
tensors = {entry.name: entry.tensor for entry in exported_tensors(MegatronEngine(cfg), cfg)}
manifest = plan_update(list(tensors.items()), policy_version=0, max_bytes=1 << 40, alone_bytes=1)
bucket_of = {spec.name: bucket for bucket in manifest.buckets for spec in bucket}
groups = defaultdict(set)
for name, tensor in tensors.items():
    if _parameter_group(name) and tensor.element_size() == 1:
        groups[_parameter_group(name)].add(name)
parameters = sorted({group[1] for group in groups})
print(parameters, len(groups))
assert parameters == (["down", "gate_up", "qkv"] if cfg.model.is_moe else ["gate_up", "qkv"])
for group, names in groups.items():
    bucket = bucket_of[min(names)]
    assert {spec.name for spec in bucket} == names, group
    assert lying(bucket, [tensors[spec.name] for spec in bucket]) is not None, group
print("ok")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_codes_of_one_engine_parameter_leave_the_trainer_as_one_message(architecture):
    environment = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    result = subprocess.run([sys.executable, "-c", SCRIPT, architecture], env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "ok" in result.stdout
