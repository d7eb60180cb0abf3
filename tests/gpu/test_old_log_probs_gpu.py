"""Old log-probs after an audit on a GPU: the same bytes as with a pass of the trainer, and what the pass costs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from test_loop_old_log_probs import check_audits, check_bytes, run_both

pytestmark = pytest.mark.gpu


def test_a_run_that_audits_is_the_run_that_recomputes(tmp_path):
    folders = run_both(tmp_path, "run.backend=cuda", "run.threads=0", "rollout.kv_cache_gib=2", "rollout.moe_backend=deep_gemm")
    check_bytes(folders)
    check_audits(folders)
