"""The parity chain on real engines, dense and then a mixture of experts in one process; what it found, for the tests to judge.

Usage: ``python alignment_process.py OUT.json``.
"""

import json
import sys
import tempfile
from pathlib import Path

from e2e_fp8.alignment.chain import Chain, ChainEngine, chain_config, packed
from e2e_fp8.config.load import load_config
from e2e_fp8.orchestration.environment import prepare
from e2e_fp8.orchestration.session import Session, load_task_for, write_model_dir
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


def observe(config: str, scratch: Path) -> dict:
    """Links before and after training at a temperature, and with one fault in the engine."""
    overrides = ["numerics.alignment=bitwise", "rollout.temperature=0.8", "run.backend=cpu"]
    cfg = chain_config(prepare(load_config(ROOT / "configs" / config, overrides)))
    task, model_dir = load_task_for(cfg), scratch / config / "model"
    write_model_dir(cfg, task, model_dir)
    trainer = MegatronEngine(cfg)
    engine = ChainEngine(cfg, model_dir, task.tokenizer.eos_token_id, task.tokenizer.decode)
    session = Session(cfg=cfg, task=task, trainer=trainer, model_dir=model_dir, rollout=engine)
    session.sync()
    found = {"start": chain_of(session, seed=0)}
    train(session, 3)
    found["stale"] = Chain(trainer, engine, cfg, seed=1).bytes().record()
    session.sync()
    found["trained"] = chain_of(session, seed=1)
    found["fault"] = disturbed(session, "model.layers.1.self_attn.q_norm", "variance_epsilon", 1e-2)
    session.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {config: observe(config, Path(folder)) for config in ("quickstart_dense.yaml", "quickstart.yaml")}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
