#!/usr/bin/env python3
"""Time and memory of planning DeepSeek-V3 between 256 training ranks and 256 rollout ranks, every copy of every rank listed.

    benchmarks/layout_plan.py CONFIG.json

CONFIG.json is the model's; tests/data/hf_configs has it. Prints one JSON object. Needs no GPU, no weights and no torch.
"""

import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import check

TRAIN = MegatronParallel(tensor=8, pipeline=4, expert=8, expert_tensor=1, data=8, first_stage_layers=15, last_stage_layers=16)
ROLLOUT = EngineParallel(tensor=8, data=32, expert=True)


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Processor seconds, peak memory of this process in GiB, verdicts, and what the copies move."""
    start = time.process_time()
    plan = Plan.from_config(config, TRAIN, ROLLOUT)
    verdicts = Counter(one.verdict for one in check(plan))
    copies = moved = most = 0
    for rank in range(ROLLOUT.world_size):
        into = 0
        for copy in plan.copies(rank):
            copies += 1
            into += copy.nbytes
        moved, most = moved + into, max(most, into)
    return {
        "training_ranks": TRAIN.world_size,
        "rollout_ranks": ROLLOUT.world_size,
        "seconds": time.process_time() - start,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "verdicts": dict(verdicts),
        "copies": copies,
        "bytes": moved,
        "most_bytes_into_a_rank": most,
        "counted_without_listing": plan.totals(),
        "imports_torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text())), indent=2))
