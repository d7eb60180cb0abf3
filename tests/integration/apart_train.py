"""``e2e-fp8`` whose server is a host of its own for NCCL, see gpus.py: trainer and engine may then share a GPU."""

import sys

from e2e_fp8.cli.main import main
from e2e_fp8.rollout import server_engine

start = server_engine.ServerProcess
server_engine.ServerProcess = lambda flags, environ, *rest, **options: start(flags, environ | {"NCCL_HOSTID": "rollout"}, *rest, **options)
sys.exit(main())
