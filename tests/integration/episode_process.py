"""A policy that is taught to call the calculator, then sampled with it: ``episode_process.py OUT_DIR`` writes ``result.json``."""

import json
import sys
from pathlib import Path

import torch

from e2e_fp8.config.load import load_config
from e2e_fp8.orchestration.batching import pack_samples, response_values
from e2e_fp8.orchestration.session import open_session
from e2e_fp8.orchestration.warm_start import warm_start
from e2e_fp8.types import Sample

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def describe(sample: Sample) -> dict:
    """What the test judges."""
    return {
        "prompt": sample.prompt.token_ids,
        "response": sample.response_token_ids,
        "mask": sample.response_mask,
        "log_probs": sample.rollout_log_probs,
        "text": sample.response_text,
        "finish_reason": sample.finish_reason,
    }


def main(out: Path) -> None:
    """Warm start on calls, one sync, two equal generations, the trainer's log-probs of them."""
    rows = [{"prompt": f"result of {a}+{b}", "answer": f"<tool>calculator: {a}+{b}</tool>"} for a in range(10) for b in range(10)]
    (out / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = {"names": ["calculator"], "max_turns": 3}
    overrides = [
        f"task={json.dumps({'kind': 'file', 'path': str(out / 'd.jsonl'), 'held_out_size': 8, 'tools': tools})}",
        "training.warm_start.steps=30",
        "rollout.stop=['</tool>']",
        "rollout.max_response_tokens=32",
    ]
    session = open_session(load_config(CONFIG, overrides), out / "model")
    try:
        warm_start(session, 0, lambda step, record: None)
        session.sync()
        first, again = (session.generate(session.task.held_out, group_size=4, seed=11) for _ in range(2))
        batches = pack_samples(first, torch.ones(len(first)), max_tokens=4096, device="cpu")
        stats = session.trainer.token_stats(batches)
        tokenizer = session.task.tokenizer
        result = {
            "first": [describe(s) for s in first],
            "again": [describe(s) for s in again],
            "decoded": [tokenizer.decode(s.response_token_ids) for s in first],
            "trainer": [v.tolist() for v in response_values(batches, [s.log_probs for s in stats])],
            "longest": session.cfg.rollout.max_model_len,
        }
    finally:
        session.close()
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
