#!/usr/bin/env python3
"""For people with Megatron launch scripts: ``torchrun --nproc-per-node 1 scripts/train_megatron.py CONFIG.yaml [--set a.b=c]``.

torchrun's RANK, WORLD_SIZE and MASTER_* are used as given; otherwise this is ``e2e-fp8 train``.
"""

import sys

from e2e_fp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
