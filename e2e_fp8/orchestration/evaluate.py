"""Held-out evaluation: avg@k and pass@k at the sampling temperature, with fixed seeds so that runs compare."""

from pathlib import Path
from typing import Any

from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.data_order import generation_seed
from e2e_fp8.orchestration.ranks.shares import on_one_rank
from e2e_fp8.orchestration.run_folder import load_run_config
from e2e_fp8.orchestration.session import Session, open_session
from e2e_fp8.tasks.pass_at_k import held_out_record
from e2e_fp8.tasks.scoring import Scores
from e2e_fp8.types import Prompt, Sample

EVALUATION_STEP = -2
"""Pseudo step whose seed evaluation uses: the same samples are drawn for the same weights at any step."""


def held_out_samples(session: Session, samples_per_prompt: int) -> tuple[list[Sample], Scores]:
    """Sample every held-out prompt and score it."""
    seed = generation_seed(session.cfg.run.seed, EVALUATION_STEP)
    samples = session.generate(session.task.held_out, group_size=samples_per_prompt, seed=seed)
    return samples, session.task.score_all([(s.prompt, s.response_text) for s in samples])


def held_out_metrics(session: Session, samples_per_prompt: int) -> dict[str, float]:
    """``reward/held_out``, its standard error and ``pass_at_k/*`` of the engine's current weights."""
    _, scores = held_out_samples(session, samples_per_prompt)
    return _metrics(scores, samples_per_prompt, session.cfg)


def _metrics(scores: Scores, samples_per_prompt: int, cfg: Config) -> dict[str, float]:
    record = held_out_record(scores.rewards, samples_per_prompt, cfg.run.eval_pass_reward)
    return record | ({"reward/held_out_timeouts": float(scores.timeouts)} if scores.timeouts else {})


def evaluate(run_dir: Path | None, cfg: Config | None, samples_per_prompt: int) -> dict[str, Any]:
    """Evaluate a run's newest checkpoint, or a configuration's starting weights; ``cfg`` overrides the run's own configuration.

    Returns:
        ``reward/held_out`` (avg@k), its standard error, ``pass_at_k/*``, ``prompts``, ``samples_per_prompt``, ``policy_version`` and a few
        ``examples``.
    """
    if cfg is None:
        assert run_dir is not None, "give a run folder or a configuration"
        cfg = load_run_config(run_dir)
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        session = open_session(on_one_rank(cfg) if run_dir else cfg, Path(scratch) / "model")
        try:
            if run_dir is not None:
                session.load_weights(CheckpointStore(run_dir / "checkpoints", keep=cfg.run.keep_checkpoints))
            session.sync()
            samples, scores = held_out_samples(session, samples_per_prompt)
        finally:
            session.close()
    return {
        **_metrics(scores, samples_per_prompt, cfg),
        "prompts": len(session.task.held_out),
        "samples_per_prompt": samples_per_prompt,
        "policy_version": session.trainer.policy_version,
        "examples": [example_record(s.prompt, s, r) for s, r in zip(samples[:5], scores.rewards[:5], strict=True)],
    }


def example_record(prompt: Prompt, sample: Sample, reward: float) -> dict[str, Any]:
    """One sample in readable form."""
    return {"prompt": prompt.text, "response": sample.response_text, "answer": prompt.answer, "reward": reward}
