"""The frozen reference policy in its own precision, on real engines: BF16 beside an FP8 trainer, FP8 beside a BF16 one."""

from pathlib import Path

import pytest
import torch
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.load import parse_config
from e2e_fp8.errors import ConfigError
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.engine import MegatronEngine

LENGTHS = [9, 17, 5, 12]


def session_of(architecture: str, training: str, reference: str | None) -> Session:
    """After two steps, so that the masters are no BF16 numbers."""
    cfg, generator = small_config(architecture, training), fresh_generator()
    objective = cfg.objective.model_copy(update={"kl_coef": 0.1, "reference_precision": reference})
    engine = MegatronEngine(cfg)
    engine.set_learning_rate(5e-3)
    for _ in range(2):
        batch = random_batch(LENGTHS, generator)
        engine.train_step([batch], nll, trained_tokens([batch]))
    return Session(cfg=cfg.model_copy(update={"objective": objective}), task=None, trainer=engine, model_dir=Path())  # type: ignore[arg-type]


def stats(engine: MegatronEngine | None) -> torch.Tensor:
    assert engine is not None
    return engine.token_stats([random_batch([23, 8], torch.Generator().manual_seed(11))])[0].log_probs


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("training", "reference"), [("fp8", None), ("fp8", "bf16"), ("bf16", "fp8"), ("bf16", None)])
def test_it_has_the_trainers_masters_in_its_own_precision_and_stays(architecture, training, reference):
    session = session_of(architecture, training, reference)
    session.make_reference()
    expected = MegatronEngine(small_config(architecture, reference or training))
    expected.load_state_dict(session.trainer.state_dict(), weights_only=True)
    before = stats(session.reference)
    assert torch.equal(before, stats(expected))
    assert torch.equal(before, stats(session.trainer)) == (reference is None)
    batch = random_batch(LENGTHS, fresh_generator())
    session.trainer.train_step([batch], nll, trained_tokens([batch]))
    assert torch.equal(stats(session.reference), before)


def test_a_precision_without_a_reference_is_refused():
    with pytest.raises(ConfigError, match=r"objective.reference_precision is bf16, but objective.kl_coef is 0"):
        parse_config({"objective": {"reference_precision": "bf16"}})


def test_an_fp8_reference_beside_bf16_engines_needs_whole_tiles():
    sizes = {
        "model": {"architecture": "qwen3", "hidden_size": 192},
        "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"},
    }
    parse_config(sizes | {"objective": {"kl_coef": 0.1}})
    with pytest.raises(ConfigError, match=r"model.hidden_size is 192, not a multiple of 128"):
        parse_config(sizes | {"objective": {"kl_coef": 0.1, "reference_precision": "fp8"}})
