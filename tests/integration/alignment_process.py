"""The parity chain on one trainer and one engine, and what it found, for the tests to judge.

Usage: ``python alignment_process.py CONFIG_NAME OUT.json [cpu|cuda [SECTION.FIELD=VALUE ...]]``. vLLM allows one engine in a process.
"""

import json
import sys
import tempfile
from pathlib import Path

from e2e_fp8.alignment.chain import Chain, ChainEngine, chain_config, packed
from e2e_fp8.config.alignment import CAUSES, choices_at
from e2e_fp8.config.load import load_config
from e2e_fp8.orchestration.environment import prepare
from e2e_fp8.orchestration.session import Session, load_task_for, write_model_dir
from e2e_fp8.rollout.live_operators import live_operators
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.update.loss_fn import supervised_loss_fn

ROOT = Path(__file__).resolve().parents[2]
SECRET = 20


def chain_of(session: Session, seed: int) -> list[dict]:
    """All links as JSON values."""
    return [link.record() for link in Chain(session.trainer, session.rollout, session.cfg, seed=seed).links()]


def train(session: Session, steps: int) -> None:
    """A few optimizer steps, so that weights are no longer the initial ones."""
    batch = packed([list(range(3, 3 + SECRET)), list(range(40, 20, -1))])
    batch.loss_mask[:] = 1
    session.trainer.set_learning_rate(3e-3)
    for _ in range(steps):
        session.trainer.train_step([batch], supervised_loss_fn(), float(batch.loss_mask.sum()))


def disturbed(session: Session, module: str, attribute: str, value: float) -> dict:
    """The module-by-module link while one number of one module of the engine is another."""

    def change(model) -> float:
        target = model.get_submodule(module)
        before = getattr(target, attribute)
        setattr(target, attribute, value)
        return before

    llm = session.rollout._llm
    before = llm.apply_model(change)[0]
    link = Chain(session.trainer, session.rollout, session.cfg, seed=1).modules().record()
    value = before
    llm.apply_model(change)
    return link


def with_native(session: Session, cause: str) -> dict:
    """The module-by-module link while the engine alone has its own operator for one cause."""
    session.rollout.set_alignment(choices_at("bitwise") | {cause: "native"})
    link = Chain(session.trainer, session.rollout, session.cfg, seed=1).modules().record()
    session.rollout.set_alignment(choices_at("bitwise"))
    return link


def live(session: Session) -> dict:
    """What the engine's worker says of its operators."""
    llm = session.rollout._llm
    return llm.apply_model(lambda model: live_operators(model, llm.llm_engine.vllm_config, session.trainer.device))[0]


def observe(config: str, scratch: Path, backend: str, settings: list[str]) -> dict:
    """Links at the start, after training, with one fault in the engine, with single causes open, and at the end again."""
    overrides = ["numerics.alignment=bitwise", "rollout.temperature=0.8", f"run.backend={backend}", *settings]
    cfg = chain_config(prepare(load_config(ROOT / "configs" / config, overrides)))
    task, model_dir = load_task_for(cfg), scratch / "model"
    write_model_dir(cfg, task, model_dir)
    trainer = MegatronEngine(cfg)
    engine = ChainEngine(cfg, model_dir, task.tokenizer.eos_token_id, task.tokenizer.decode)
    session = Session(cfg=cfg, task=task, trainer=trainer, model_dir=model_dir, rollout=engine)
    session.sync()
    found = {"start": chain_of(session, seed=0), "live": live(session)}
    train(session, 3)
    found["stale"] = Chain(trainer, engine, cfg, seed=1).bytes().record()
    session.sync()
    found["fault"] = disturbed(session, "model.layers.1.self_attn.q_norm", "variance_epsilon", 1e-2)
    causes = [name for name, cause in CAUSES.items() if cfg.model.is_moe or not cause.moe_only]
    found["open"] = {cause: with_native(session, cause) for cause in causes}
    session.rollout.set_alignment(choices_at("fast"))
    found["live_native"] = live(session)
    session.rollout.set_alignment(choices_at("bitwise"))
    found["trained"] = chain_of(session, seed=1)
    session.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        backend = sys.argv[3] if len(sys.argv) > 3 else "cpu"
        Path(sys.argv[2]).write_text(json.dumps(observe(sys.argv[1], Path(folder), backend, sys.argv[4:])))


if __name__ == "__main__":
    main()
