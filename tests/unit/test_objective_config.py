"""Objectives and corrections in the configuration: defaults of each kind, presets, rules between fields, files."""

from pathlib import Path

import pytest

from e2e_fp8.config.correction import CorrectionConfig, preset_values
from e2e_fp8.config.critic import critic_config
from e2e_fp8.config.load import dump_config, load_config, parse_config
from e2e_fp8.config.objective import KIND_DEFAULTS, ObjectiveConfig
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted((CONFIGS / "objectives").glob("*.yaml"))
PRESETS = CorrectionConfig.model_fields["preset"].annotation.__args__[0].__args__


def refusal(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(sections)
    return str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_files_differ_from_the_quickstart_in_objective_and_correction_alone(path):
    cfg, base = load_config(path), load_config(CONFIGS / "quickstart.yaml")
    same = {name for name in Config.model_fields if getattr(cfg, name) == getattr(base, name)}
    assert set(Config.model_fields) - same <= {"objective", "correction", "run"}
    assert cfg.run.model_copy(update={"name": "quickstart"}) == base.run
    assert cfg.run.name == path.stem


def test_every_kind_has_a_file():
    assert {load_config(path).objective.kind for path in FILES} == set(KIND_DEFAULTS)


def test_files_load_back_from_their_dump(tmp_path):
    for path in FILES:
        cfg = load_config(path)
        (tmp_path / "dump.yaml").write_text(dump_config(cfg))
        assert load_config(tmp_path / "dump.yaml") == cfg


@pytest.mark.parametrize("kind", KIND_DEFAULTS)
def test_a_kind_fills_what_the_file_leaves_out_and_nothing_else(kind):
    objective, plain = ObjectiveConfig(kind=kind), ObjectiveConfig()
    for name in ObjectiveConfig.model_fields:
        if name != "kind":
            assert getattr(objective, name) == KIND_DEFAULTS[kind].get(name, getattr(plain, name))
    assert ObjectiveConfig(kind=kind, clip_high=0.5).clip_high == 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_fields_written_out(name):
    assert CorrectionConfig(preset=name).model_dump(exclude={"preset"}) == CorrectionConfig(**preset_values(name)).model_dump(
        exclude={"preset"}
    )


def test_a_preset_takes_other_thresholds_and_refuses_another_structure():
    correction = CorrectionConfig(preset="decoupled_geo_rs_token_tis", rollout_rs_threshold="0.99_1.02", rollout_is_threshold=3.0)
    assert (correction.rejections[0].low, correction.rejections[0].high, correction.is_bounds) == (0.99, 1.02, (0.0, 3.0))
    message = refusal(correction={"preset": "decoupled_k3_rs", "rollout_is": "token"})
    assert message == "correction.rollout_is is 'token', but correction.preset is decoupled_k3_rs and means None: remove one of the two."
    assert "bypass_mode is False, but correction.preset" in refusal(correction={"preset": "bypass_pg_is", "bypass_mode": False})
    assert "correction.preset is 'tis', but must be" in refusal(correction={"preset": "tis"})


def test_thresholds_are_read_as_verl_writes_them():
    assert CorrectionConfig(rollout_is_threshold="0.5_5.0").is_bounds == (0.5, 5.0)
    assert CorrectionConfig(rollout_is_threshold="0.5_5.0").is_mode == "mask"
    assert CorrectionConfig(rollout_is_threshold="2").is_bounds == (0.0, 2.0)
    assert CorrectionConfig(rollout_is_threshold="2").is_mode == "truncate"
    assert CorrectionConfig(rollout_is_threshold=None).is_bounds == (0.0, float("inf"))
    chain = CorrectionConfig(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.6_1.6,2.5").rejections
    assert [(r.option, r.low, r.high) for r in chain] == [("token_k1", 0.6, 1.6), ("seq_max_k2", 0.0, 2.5)]
    single = CorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.25).rejections[0]
    assert (single.low, single.high) == (0.8, 1.25)
    broadcast = CorrectionConfig(rollout_rs="seq_mean_k3, seq_max_k3", rollout_rs_threshold=0.01).rejections
    assert [r.high for r in broadcast] == [0.01, 0.01]


def test_names_of_earlier_run_folders_are_read():
    cfg = parse_config({"objective": {"name": "grpo"}, "correction": {"rollout_is_level": "token"}})
    assert (cfg.objective.kind, cfg.correction.rollout_is) == ("grpo", "token")
    assert parse_config({"correction": {"rollout_is_level": None}}).correction.rollout_is is None


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"rollout": {"group_size": 1}}, ("rollout.group_size is 1", "objective.advantage is group", "use 2 or more, or advantage gae")),
        ({"objective": {"critic": {"value_clip": 0.2}}}, ("objective.critic is set", "objective.advantage is group", "use gae")),
        ({"objective": {"kind": "dapo", "advantage": "gae"}}, ("objective.dynamic_sampling is true", "advantage is gae", "to false")),
        ({"objective": {"kind": "gspo", "advantage": "gae"}}, ("objective.kind is gspo", "use gspo_token")),
        ({"objective": {"advantage": "gae", "critic": {"gae_lambda": 1.1}}}, ("objective.critic.gae_lambda is 1.1", "at most 1")),
        ({"objective": {"advantage": "gae", "critic": {"value_clip": 0}}}, ("objective.critic.value_clip is 0", "greater than 0")),
        ({"objective": {"advantage": "gae", "critic": {"lambda": 1}}}, ("unknown field objective.critic.lambda", "gae_lambda")),
        (
            {
                "model": {"hidden_size": 96},
                "numerics": {"training_precision": "bf16", "rollout_precision": "bf16"},
                "objective": {"advantage": "gae", "critic": {"precision": "fp8"}},
            },
            ("model.hidden_size is 96", "not a multiple of 128"),
        ),
        ({"objective": {"kind": "gppo"}}, ("objective.kind is 'gppo'", "choose one")),
        ({"objective": {"kind": "sapo", "dual_clip": 3.0}}, ("objective.dual_clip is 3.0", "has no clipped ratio", "remove it")),
        ({"objective": {"dual_clip": 1.1}}, ("objective.dual_clip is 1.1", "above 1 + objective.clip_high = 1.28")),
        ({"objective": {"loss_norm_tokens": 8}}, ("objective.loss_norm_tokens is 8", "does not divide by it")),
        ({"objective": {"kind": "dr_grpo", "loss_norm_tokens": 0}}, ("objective.loss_norm_tokens is 0", "use 1 or more")),
        ({"objective": {"overlong_buffer_tokens": 16}}, ("objective.overlong_buffer_tokens is 16", "max_response_tokens is 16")),
        (
            {"objective": {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k3+"}},
            ("objective.kl_estimator is k3+", "no gradient goes", "use k3."),
        ),
        ({"correction": {"loss_type": "reinforce"}}, ("correction.loss_type is reinforce", "bypass_mode is false")),
        (
            {"correction": {"preset": "bypass_pg_is"}, "objective": {"kind": "gspo"}},
            ("correction.loss_type is reinforce", "objective.kind is gspo"),
        ),
        ({"correction": {"bypass_mode": True}}, ("correction.rollout_is is token", "already against the rollout policy")),
        ({"correction": {"rollout_is": None, "rollout_is_batch_normalize": True}}, ("rollout_is_batch_normalize is true", "unset it")),
        ({"correction": {"rollout_rs_threshold": 0.1}}, ("correction.rollout_rs_threshold is 0.1", "rollout_rs is null")),
        ({"correction": {"rollout_rs": "seq_mean_k3"}}, ("correction.rollout_rs_threshold is not set", "give a bound")),
        ({"correction": {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}}, ("seq_max_k1 is unknown", "token_k1")),
        ({"correction": {"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": 2}}, ("an option comes twice",)),
        ({"correction": {"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}}, ("has 3 bounds", "2 options")),
        ({"correction": {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"}}, ("is a divergence", "upper bound alone")),
        ({"correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}}, ("whose inverse is above it",)),
        ({"correction": {"rollout_is_threshold": "5.0_0.5"}}, ("rollout_is_threshold is '5.0_0.5'", "two growing ones")),
        ({"correction": {"rollout_is_threshold": 0}}, ("rollout_is_threshold is 0", "positive number")),
        ({"correction": {"rollout_is_threshold": "0.5_2", "rollout_is_mode": "truncate"}}, ("is truncate", "has a lower bound")),
        ({"correction": {"rollout_is_threshold": None, "rollout_is_mode": "clip"}}, ("is clip", "give a bound")),
        ({"correction": {"rollout_token_veto_threshold": 1.5}}, ("rollout_token_veto_threshold is 1.5", "between 0 and 1")),
    ],
)
def test_broken_rules_are_one_sentence_with_field_value_and_remedy(sections, parts):
    message = refusal(**sections)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_the_critic_takes_its_own_precision_and_everything_else_of_the_trainer():
    values = {
        "model": {"tie_word_embeddings": True},
        "objective": {"advantage": "gae", "critic": {"precision": "bf16", "learning_rate": 0.5}},
    }
    cfg = parse_config(values)
    critic = critic_config(cfg)
    assert (critic.numerics.training_precision, critic.training.learning_rate, critic.model.tie_word_embeddings) == ("bf16", 0.5, False)
    assert critic.training.parallel == cfg.training.parallel
    assert critic_config(parse_config({"objective": {"advantage": "gae"}})).numerics == cfg.numerics
    assert parse_config({"rollout": {"group_size": 1}, "objective": {"advantage": "gae"}}).rollout.group_size == 1
