#!/usr/bin/env bash
# Install what is missing, then lint, check types and imports, and run the CPU tests.
# Usage: scripts/test.sh [pytest arguments]; E2E_FP8_TEST_WORKERS=1 for one process instead of two, each of one thread
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
export TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/python tools/check_config_docs.py
.venv/bin/pyright
exec .venv/bin/python -m pytest -q -n "${E2E_FP8_TEST_WORKERS:-2}" --dist loadfile --durations 25 "$@"
