#!/usr/bin/env bash
# From a clone to a rising reward: install, train a tiny Qwen3-MoE in FP8 with GRPO, write a report.
# Usage: scripts/quickstart.sh [--set section.field=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
name=quickstart
n=1; while [ -e "runs/$name" ]; do n=$((n + 1)); name=quickstart-$n; done
exec .venv/bin/e2e-fp8 train configs/quickstart.yaml --set run.name="$name" "$@"
