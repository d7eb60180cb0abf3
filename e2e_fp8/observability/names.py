"""Every metric a run may write, in one table. A sink refuses a name that is not here, so a typo cannot open a second series.

Names under ``rollout_corr/``, ``training/`` and ``critic/`` are verl's, so that curves of the two can be laid over each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from e2e_fp8.config.correction import REJECTION_OPTIONS

PHASES: tuple[str, ...] = (
    "rollout",
    "reward",
    "old_log_probs",
    "audit",
    "reference",
    "values",
    "shadow_pass",
    "update_critic",
    "update",
    "sync",
    "receipt",
    "eval",
    "checkpoint",
)
"""Phases of a step, in the order in which they happen."""

OPERANDS: tuple[str, ...] = ("weights", "activations", "gradients")
TILE_STATISTICS = {
    "saturated": "Codes at the largest magnitude, of all elements",
    "subnormal": "Non-zero elements with a subnormal code",
    "zero": "All-zero tiles, of all tiles",
    "flushed": "Non-zero elements whose code is zero",
    "out_of_e4m3_range": "Tiles with a non-zero element that E4M3 would flush at the tile's amax",
}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What a name means and what its number counts."""

    description: str
    unit: str


def _table(unit: str, **descriptions: str) -> dict[str, Metric]:
    return {name: Metric(description=text, unit=unit) for name, text in descriptions.items()}


def _prefixed(prefix: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def _pass_metric(k: int) -> Metric:
    text = f"Held-out prompts solved by at least one of {k} samples, unbiased estimate" if k > 1 else "Held-out responses that pass"
    return Metric(description=text, unit="fraction")


_RUN = {
    **_table("", step="Warm-start and RL steps done so far, in one count, from 1", policy_version="Optimizer steps in the weights"),
    **_prefixed("staleness", _table("steps", max="Optimizer steps between the weights of the oldest sample and the trainer's")),
    **_table("", phase="0 in the supervised warm start, 1 in reinforcement learning"),
    **_table("s", time="Time since the start of the run, earlier sessions of a resumed run included"),
    **_prefixed("time", _table("s", **{phase: f"Time of the step's {phase} phase" for phase in PHASES})),
}
PASS_AT_K: tuple[int, ...] = tuple(2**i for i in range(11))
"""The k of which pass@k is reported."""
REWARD_PARTS = {
    "verifier": "the task's own verifier",
    "math": "math-verify",
    "code": "unit tests",
    "judge": "a language model",
    "reward_model": "a served reward model",
    **{f"user_{i}": f"user function {i} in the order of task.reward_weights" for i in range(1, 9)},
}
_REWARD = {
    **_prefixed("reward/part", _table("", **{name: f"Mean of the reward by {text}, unweighted" for name, text in REWARD_PARTS.items()})),
    **_prefixed("reward", _table("responses", timeouts="Responses of the step whose rewards ran out of time and count as 0")),
    **_prefixed("reward", _table("", mean="Mean reward of the step's samples", std="Standard deviation of the rewards")),
    **_prefixed("reward", _table("", held_out="Mean reward on the held-out prompts (avg@k)")),
    **_prefixed("reward", _table("", held_out_stderr="Standard error of reward/held_out over prompts")),
    **_prefixed("reward", _table("responses", held_out_timeouts="Held-out responses whose rewards ran out of time and count as 0")),
    **_prefixed("reward", _table("", overlong_penalty="Mean soft punishment of long responses")),
    **_prefixed("curriculum", _table("", level_mean="Mean difficulty level of the data sets that the step drew from, 0 the easiest")),
    **_prefixed("curriculum", _table("fraction", success_rate="Responses of the step at task.curriculum.pass_reward or above")),
    **_prefixed("pass_at_k", {str(k): _pass_metric(k) for k in PASS_AT_K}),
    **_prefixed("response_length", _table("tokens", mean="Mean response length", max="Longest response")),
    **_prefixed("advantages", _table("", long_to_short="Mean |advantage| of responses longer than the median over that of the others")),
    **_prefixed("response", _table("responses", count="Responses sampled in the step")),
    **_prefixed("response", _table("fraction", truncated_fraction="Responses cut off at the length limit")),
    **_prefixed("groups", _table("groups", degenerate="Groups with equal rewards: no learning signal", total="Groups sampled in the step")),
    **_prefixed("groups", _table("groups", surplus="Groups sampled beyond those wanted", missing="Groups wanted and not found")),
    **_prefixed("groups", _table("rounds", rounds="Rollout rounds of dynamic sampling")),
}
_UPDATE = {
    **_table(
        "", loss="Loss over its aggregation's denominator", grad_norm="Global gradient norm before clipping", learning_rate="Learning rate"
    ),
    **_table("nats", entropy="Mean entropy of the predictive distribution", kl_ref="KL estimate to the frozen reference policy"),
    **_table("steps", skipped_steps="Optimizer steps skipped: non-finite gradients, or nothing left to train on"),
    **_prefixed("clip_fraction", _table("fraction", low="Tokens clipped at 1 - clip_low", high="Tokens clipped at 1 + clip_high")),
    **_prefixed("clip_fraction", _table("fraction", dual="Tokens with A < 0 and a ratio above the dual clip")),
    **_prefixed("ratio", _table("", mean="Mean importance ratio of current to old policy")),
    **_prefixed("clip_calibration", _table("", clip_low="Lower clip range in use", clip_high="Upper clip range in use")),
    **_prefixed(
        "clip_calibration", _table("passes", passes="Shadow passes of the step", refused="Of them with a ratio that is not finite")
    ),
    **_prefixed(
        "clip_calibration",
        _table(
            "fraction",
            high_precision="Tokens (GSPO: sequences) with A < 0 that the BF16 ratio clips at the configured clip_low",
            fp8_configured="The same of the FP8 ratio",
            fp8_calibrated="The same of the FP8 ratio at the clip_low in use from then on",
        ),
    ),
    **_prefixed("sft", _table("nats", loss="Cross-entropy per answer token in the warm start")),
    **_prefixed("sft", _table("", step="Warm-start step, from 1")),
}
_CRITIC = _prefixed(
    "critic",
    {
        **_table("", vf_loss="Value loss per response token", grad_norm="The critic's gradient norm before clipping"),
        **_table("", vpred_mean="Mean value during the critic's update", lr="The critic's learning rate"),
        **_table("fraction", vf_clipfrac="Tokens whose clipped value error is the larger one"),
        **_table("fraction", vf_explained_var="1 - var(returns - values) / var(returns) over response tokens, before the update"),
        **_table("steps", skipped_steps="Optimizer steps of the critic skipped: non-finite gradients"),
        **{
            f"{name}/{statistic}": Metric(description=f"{text}, {statistic}", unit="")
            for name, text in {
                "values": "Values of response tokens before the update",
                "returns": "Returns of response tokens (advantage before whitening plus value)",
                "advantages": "Advantages of response tokens as the policy's loss has them",
                "rewards": "Rewards of responses after shaping",
            }.items()
            for statistic in ("mean", "max", "min")
        },
    },
)
_AUDIT = _prefixed(
    "old_log_probs",
    {
        **_table(
            "sequences",
            audited_sequences="Sequences whose engine log-probs the trainer computed anew (training.old_log_probs rollout)",
            audit_failures="Of them, those with a log-prob of other bits",
        ),
        **_table("", recomputed="1 when the audit failed, so that the whole batch was computed"),
        **_table(
            "s",
            seconds_saved="Tokens not computed, at the lower of this audit's and the last whole pass's seconds a token, minus the audit",
        ),
    },
)
_MISMATCH = {
    **_table("nats", mismatch_kl="Mean of r - log r - 1, r = p_train / p_rollout, over response tokens (k3)"),
    **_prefixed(
        "train_rollout_logprob_abs_diff",
        _table("nats", mean="Mean |log p_train - log p_rollout| over response tokens", max="Largest |log p_train - log p_rollout|"),
    ),
    **_prefixed(
        "training",
        _table(
            "",
            rollout_probs_diff_mean="Mean |p_train - p_rollout|",
            rollout_probs_diff_max="Largest |p_train - p_rollout|",
            rollout_probs_diff_std="Standard deviation of |p_train - p_rollout|",
            rollout_probs_diff_valid="1 where the differences could be computed",
            rollout_actor_probs_pearson_corr="Pearson correlation of p_train and p_rollout",
        ),
    ),
}
_REJECTION_STATISTICS = {
    "mean": ("Mean statistic (a ratio for k1)", ""),
    "std": ("Standard deviation of the statistic", ""),
    "max": ("Largest statistic", ""),
    "min": ("Smallest statistic", ""),
    "fraction_high": ("Share above the upper bound", "fraction"),
    "fraction_low": ("Share below the lower bound", "fraction"),
}
_ROLLOUT_CORR = _prefixed(
    "rollout_corr",
    {
        **_table("nats", kl="Mean of log p_rollout - log p_train", k3_kl="k3 estimate of KL(rollout, train)"),
        **_table("nats", training_log_ppl="Mean negative log-prob under the trainer", rollout_log_ppl="The same under the engine"),
        **_table("nats", log_ppl_diff="Mean per-sequence difference of log perplexity", log_ppl_abs_diff="Its mean magnitude"),
        **_table("nats", log_ppl_diff_max="Largest such difference", log_ppl_diff_min="Smallest such difference"),
        **_table(
            "", training_ppl="Perplexity under the trainer", rollout_ppl="Perplexity under the engine", ppl_ratio="Mean ratio of the two"
        ),
        **_table("", chi2_token="chi-square divergence per token", chi2_seq="chi-square divergence per sequence"),
        **_table(
            "", rollout_is_mean="Mean of p_train / p_rollout before truncation", rollout_is_std="Standard deviation of p_train / p_rollout"
        ),
        **_table("", rollout_is_min="Smallest p_train / p_rollout", rollout_is_max="Largest p_train / p_rollout"),
        **_table("fraction", rollout_is_eff_sample_size="Effective sample size of the weights over their count"),
        **_table(
            "fraction",
            rollout_is_ratio_fraction_high="Weights above the threshold",
            rollout_is_ratio_fraction_low="Weights below its inverse",
        ),
        **_table("", rollout_is_seq_mean="Mean per-sequence weight", rollout_is_seq_std="Standard deviation of the per-sequence weights"),
        **_table("", rollout_is_seq_min="Smallest per-sequence weight", rollout_is_seq_max="Largest per-sequence weight"),
        **_table("", rollout_is_seq_max_deviation="Largest distance of a per-sequence weight from 1"),
        **_table("fraction", rollout_is_seq_fraction_high="Sequences whose weight is above the threshold"),
        **_table("fraction", rollout_is_seq_fraction_low="Sequences whose weight is below its inverse"),
        **_table(
            "fraction", rollout_rs_masked_fraction="Tokens rejected", rollout_rs_seq_masked_fraction="Sequences with a rejected token"
        ),
        **_table("fraction", rollout_is_oob_ratio="Tokens whose weight a bound changed"),
        **_table("", rollout_is_batch_norm_factor="Mean weight that batch normalisation divided by"),
        **{
            f"rollout_rs_{option}_{name}": Metric(description=f"{text} of the rejection {option}", unit=unit)
            for option in REJECTION_OPTIONS
            for name, (text, unit) in _REJECTION_STATISTICS.items()
        },
    },
)
REPLAY_LAYERS = 256
"""Layers of which router replay may be reported one by one."""
_CHANGED = "Replayed expert choices that the trainer's router would not have made"
_REPLAY = _prefixed(
    "router_replay",
    {
        **_table("fraction", coverage="Response tokens whose own and all earlier routing was replayed, in every layer"),
        **_table(
            "tokens",
            uncovered_tokens="Response tokens of which that does not hold",
            masked_tokens="Of them, those that were left out of the loss",
            uncovered_prompt_tokens="Prompt tokens without recorded routing",
            uncovered_tool_tokens="Tokens of tool results without recorded routing",
            last_tokens="Last tokens of responses: the engine never forwards them, nothing is predicted from them",
            prefix_cache_tokens="Prompt tokens whose routing was recorded when the prefix cache took them in",
        ),
        **_table(
            "samples",
            partial_samples="Samples of which some routing is missing",
            missing_samples="Samples without any routing",
            preempted_samples="Samples whose keys and values the engine computed anew, with a routing of their own, after a preemption",
        ),
        **_table("fraction", changed_ids=_CHANGED),
        **_table("fraction", **{f"changed_ids/layer_{layer}": f"{_CHANGED}, layer {layer}" for layer in range(REPLAY_LAYERS)}),
    },
)
_COST = {
    **_prefixed(
        "tokens",
        _table("tokens", rollout="Tokens sampled in the step", train="Packed tokens, prompts included", trained="Tokens in the loss"),
    ),
    **_prefixed("rollout", _table("tokens/s", tokens_per_s="Sampling speed")),
    **_prefixed("rollout", _table("fraction", prefix_cache_hit_rate="Prompt tokens that the engine found in its prefix cache")),
    **_prefixed("train", _table("tokens/s", tokens_per_s="Training speed of the update phase")),
    **_prefixed("sync", _table("bytes", bytes="Bytes delivered to the engine")),
    **_prefixed("sync", _table("s", seconds="Time of the delivery", answer_seconds="Rest of the call, until the engine generates")),
    **_prefixed("sync", _table("", armed="1 when the server waited for it (sync.arm): its time is that of the copies")),
    **_prefixed("receipt", _table("", passed="1 when the engine's bytes equal the trainer's", tensors="Tensors compared")),
    **_prefixed("receipt", _table("fraction", share_of_sync="Time that the receipt was waited for over the time of the delivery")),
    **_prefixed("receipt", _table("s", seconds="From the delivery until bytes were compared, waited for or not")),
    **_prefixed("receipt", _table("GB/s", gb_per_s="Bytes of both sides over the time of the receipt")),
}
_MEMORY = _prefixed(
    "memory",
    {
        **_table("fraction", host_used_fraction="Host memory in use, or of the cgroup's limit where that is nearer"),
        **_table("fraction", device_used_fraction="Memory of the trainer's device in use, by whomever"),
        **_table("GiB", trainer_host_gib="Resident memory of the trainer's process, an engine in it included"),
        **_table("GiB", trainer_device_gib="Device memory that torch has allocated in the trainer's process"),
        **_table("GiB", engine_host_gib="Resident memory of the processes of the run's own server"),
        **_table("", trainer_imbalance="Most loaded trainer rank's memory over the mean of the ranks"),
        **_table("", engine_imbalance="The same of the server's ranks, host memory"),
    },
)
_TILES = {
    f"tiles/{operand}/{name}": Metric(description=f"{text} ({operand})", unit="fraction")
    for operand in OPERANDS
    for name, text in TILE_STATISTICS.items()
} | _prefixed(
    "tiles/moe_fc1_gradients",
    _table(
        "fraction",
        out_of_e4m3_range="Non-zero tiles of the gradients at fc1's output that leave E4M3's range, mean over the MoE layers",
        out_of_e4m3_range_worst="The same of the layer with the most",
    ),
)

METRICS: dict[str, Metric] = _RUN | _REWARD | _UPDATE | _CRITIC | _AUDIT | _MISMATCH | _ROLLOUT_CORR | _REPLAY | _COST | _MEMORY | _TILES


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError naming every metric that is not in METRICS."""
    unknown = sorted(set(names) - METRICS.keys())
    if unknown:
        raise ValueError(f"unknown metric {', '.join(unknown)}: add it to e2e_fp8/observability/names.py")
