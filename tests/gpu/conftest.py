"""What all processes of GPU tests have in common."""

import os

# Ranks that are hosts of their own, see integration/gpus.py, have to find each other on the same interface.
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
