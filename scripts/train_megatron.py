#!/usr/bin/env python3
"""For people with Megatron launch scripts: ``torchrun --nproc-per-node N scripts/train_megatron.py CONFIG.yaml [--set a.b=c]``.

torchrun's RANK, WORLD_SIZE and MASTER_* are used as given; otherwise this is ``e2e-fp8 train``. docs/ranks.md says what works on
several ranks.
"""

import sys

from e2e_fp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
