#!/usr/bin/env bash
# Make .venv with Python 3.12 and the pinned CPU stack. Idempotent: a second call returns at once.
# Usage: scripts/setup.sh [dev]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
groups=(requirements/cpu.txt)
[ "${1:-}" = dev ] && groups+=(requirements/dev.txt)
stamp=.venv/installed-$(cat "${groups[@]}" | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

python=""
for candidate in "${PYTHON:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 python3; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=$candidate; break
  fi
done
if [ -z "$python" ]; then
  echo "Python 3.12 is needed (Megatron-Core requires it) and was not found. Install it with 'apt-get install python3.12 python3.12-venv'," >&2
  echo "'pyenv install 3.12' or 'conda create -n py312 python=3.12', or point PYTHON at one, then run this again." >&2
  exit 2
fi
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
if [ "$free_gib" -lt 9 ]; then
  echo "Installing needs about 9 GiB free here; $(pwd) has $free_gib GiB. Free some space and run this again." >&2
  exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "The CPU stack has wheels for Linux on x86-64 only; this is $(uname -sm)." >&2
  exit 2
fi
echo "Installing into .venv with $("$python" --version): torch 2.11, vLLM 0.26 (CPU build), Megatron-Core 0.19 and $(cat "${groups[@]}" | wc -l) packages in all."
echo "About 6 GB, one to three minutes with a fast package mirror."
started=$SECONDS
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
.venv/bin/python -m pip install -qq --disable-pip-version-check "$(grep '^uv==' requirements/setup.txt)"
args=(); for file in "${groups[@]}"; do args+=(-r "$file"); done
.venv/bin/uv pip install -q --python .venv/bin/python --no-deps "${args[@]}"
.venv/bin/uv pip install -q --python .venv/bin/python --no-deps -e .
touch "$stamp"
echo "Installed in $((SECONDS - started)) s."
