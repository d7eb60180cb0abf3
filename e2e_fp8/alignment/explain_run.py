"""``e2e-fp8 align explain``: start, bring the weights to where RL is, sample, measure."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.alignment.divergence import by_position, first_positions
from e2e_fp8.alignment.explain import ExplainEngine, Explainer, Explanation
from e2e_fp8.alignment.what_if import WhatIf
from e2e_fp8.config.alignment_explain import BASELINE, TOTAL, violations
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, writing
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.data_order import generation_seed, prompts_of_step
from e2e_fp8.orchestration.environment import seed_generators
from e2e_fp8.orchestration.session import Session, load_task_for, write_model_dir
from e2e_fp8.orchestration.warm_start import warm_start
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import Sample


def explain(cfg: Config, run_dir: Path | None, folder: Path, *, prompts: int) -> dict[str, Any]:
    """The JSON record of one explanation; ``cfg`` is from e2e_fp8.config.alignment_explain.explain_config.

    The weights are those of the newest checkpoint of ``run_dir``, or without it those with which RL would begin: the starting weights
    after the warm start. ``folder`` is scratch.

    Raises:
        CheckpointError: ``run_dir`` has no whole checkpoint.
    """
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    task = load_task_for(cfg)
    write_model_dir(cfg, task, folder / "model")
    trainer = MegatronEngine(cfg)
    seed_generators(cfg.run.seed)
    session = Session(cfg=cfg, task=task, trainer=trainer, model_dir=folder / "model")
    try:
        if run_dir is not None:
            session.load_weights(CheckpointStore(run_dir / "checkpoints", keep=cfg.run.keep_checkpoints))
        else:
            warm_start(session, 0, lambda step, record: None)
        session.rollout = ExplainEngine(cfg, folder / "model", task.tokenizer.eos_token_id, task.tokenizer.decode)
        session.sync()
        explainer = Explainer(session, sampled(session, prompts))
        found = explainer.explain()
        WhatIf(explainer).add(found)
    finally:
        session.close()
    return record_of(found, cfg, explainer.samples)


def sampled(session: Session, prompts: int) -> list[Sample]:
    """Groups of the first prompts of the run's order, with rewards."""
    cfg = session.cfg
    chosen = prompts_of_step(session.task.train, 0, prompts, cfg.run.seed)
    samples = session.generate(chosen, group_size=cfg.rollout.group_size, seed=generation_seed(cfg.run.seed, 0))
    rewards = session.task.score_all([(s.prompt, s.response_text) for s in samples]).rewards
    if not any(len(s.response_token_ids) for s in samples):
        raise ConfigError("The engine sampled no token for any prompt: raise rollout.max_response_tokens.")
    return [replace(s, reward=reward) for s, reward in zip(samples, rewards, strict=True)]


def record_of(found: Explanation, cfg: Config, samples: list[Sample]) -> dict[str, Any]:
    """As JSON values, with the gates judged."""
    firsts = first_positions(found.trainer.log_probs, found.engine.log_probs)
    differing = [m for m in found.modules if m.first_row is not None]
    measured = {row.name: row.metrics for row in found.rows}
    # a cause that the configuration shares is what the baseline has
    closed = {name: measured[BASELINE] for name in closed_causes(cfg, measured)}
    return {
        "alignment": cfg.numerics.alignment,
        "backend": cfg.run.backend,
        "samples": len(samples),
        "tokens": sum(len(row) for row in found.engine.log_probs),
        "seed": cfg.run.seed,
        "policy_version": samples[0].policy_version,
        "baseline_is_zero": measured[BASELINE]["abs_max"] == 0.0,
        "sampled_again_abs_max": found.sampled_again,
        "rows": [asdict(row) for row in found.rows],
        "sum_of_causes": sum(row.metrics["mismatch_kl"] for row in found.rows if row.kind == "cause"),
        "total": measured[TOTAL]["mismatch_kl"],
        "first_module": asdict(differing[0]) if differing else None,
        "modules": [asdict(module) for module in found.modules],
        "hidden_modules": found.hidden_modules,
        "positions": by_position(found.trainer.log_probs, found.engine.log_probs),
        "first_position": {
            "earliest": min((p for p in firsts if p is not None), default=None),
            "responses_that_differ": sum(p is not None for p in firsts),
            "responses": len(firsts),
        },
        "not_measured": found.not_measured,
        "failed": found.failed,
        "gates": cfg.numerics.alignment_gates,
        "violations": violations(cfg.numerics.alignment_gates, closed | measured, found.not_measured),
    }


def closed_causes(cfg: Config, measured: dict[str, Any]) -> list[str]:
    """Causes of this model without a row, because the configuration shares their operator."""
    from e2e_fp8.config.alignment import CAUSES

    return [n for n, c in CAUSES.items() if n not in measured and (cfg.model.is_moe or not c.moe_only)]


def write(record: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """``explain.json`` and ``explain.png`` in ``out``."""
    from e2e_fp8.alignment.explain_plot import draw

    paths = out / "explain.json", out / "explain.png"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(record, indent=2) + "\n")
        draw(record, paths[1])
    return paths
