#!/usr/bin/env bash
# Rewrite the pinned requirement files from their .in files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"
compile=(../.venv/bin/uv pip compile -q --python-version 3.12 --no-annotate --no-header --no-emit-index-url)
"${compile[@]}" cpu.in --override overrides.txt -o cpu.txt
"${compile[@]}" dev.in -o dev.txt
