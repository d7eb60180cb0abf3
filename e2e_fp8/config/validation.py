"""Rules that span fields, checked when a configuration is parsed. Torch-free.

Module names are Hugging Face's. The size rule mirrors the block layout: one FP32 ``weight_scale_inv`` per 128x128 tile, so a
weight, and every part of a weight that one engine fuses and the other does not, has to own whole tiles.
"""

import difflib
import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from e2e_fp8.config.alignment import check_alignment
from e2e_fp8.config.alignment_explain import check_alignment_gates
from e2e_fp8.config.beside import fp8_models
from e2e_fp8.config.layout_rule import check_layout
from e2e_fp8.config.objective_rules import check_calibration, check_correction, check_objective
from e2e_fp8.config.old_log_probs_rule import check_old_log_probs
from e2e_fp8.config.replay_rule import check_router_replay
from e2e_fp8.errors import ConfigError
from e2e_fp8.layout.tiles import TILE as BLOCK
from e2e_fp8.rank_grid import divided_sizes

if TYPE_CHECKING:
    from e2e_fp8.config.model import ModelConfig
    from e2e_fp8.config.root import Config
    from e2e_fp8.config.task import TaskConfig

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
BUILT_IN_REWARDS = ("verifier", "math", "code", "judge", "reward_model")
MAX_USER_REWARDS = 8
_CALLABLE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def check_cross_fields(cfg: "Config") -> None:
    """Raise ConfigError naming the fields, the rule and the remedy for the first rule that ``cfg`` breaks."""
    for rule in (
        _check_parallel,
        _check_placement,
        _check_model,
        _check_precisions,
        check_alignment,
        check_alignment_gates,
        _check_high_precision,
        _check_tiles,
        _check_shares,
        _check_window,
        _check_minibatches,
        _check_transport,
        _check_task,
        check_objective,
        check_calibration,
        check_correction,
        check_router_replay,
        check_old_log_probs,
    ):
        rule(cfg)


def _check_parallel(cfg: "Config") -> None:
    parallel, model = cfg.training.parallel, cfg.model
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"training.parallel.virtual_pipeline is {parallel.virtual_pipeline}, but training.parallel.pipeline is 1: chunks of layers "
            "alternate between pipeline ranks, so set it to 1 or raise the pipeline size."
        )
    for name in ("expert", "expert_tensor"):
        if getattr(parallel, name) > 1 and not model.is_moe:
            raise ConfigError(
                f"training.parallel.{name} is {getattr(parallel, name)}, but {model.architecture} has no experts: set it to 1."
            )
    for field, value, divisor_field, divisor in divided_sizes(parallel, model):
        if value % divisor:
            raise ConfigError(
                f"model.{field} is {value}, which training.parallel.{divisor_field} = {divisor} does not divide: "
                "every rank holds an equal share, so change one of them."
            )


def _check_placement(cfg: "Config") -> None:
    placement, transport, size = cfg.rollout.placement, cfg.sync.transport, cfg.rollout.tensor_parallel
    if placement == "in_process" and size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel is {size}, but an engine in the trainer's process drives one device: "
            "set rollout.placement to server, or the size to 1."
        )
    experts = cfg.model.num_experts if cfg.model.is_moe else 0
    if cfg.rollout.expert_parallel and not 1 < size <= experts:
        raise ConfigError(
            f"rollout.expert_parallel is true, but rollout.tensor_parallel is {size} and the model has {experts} experts: whole experts "
            "are dealt out to two ranks or more, at least one to each. Set it to false, or change the size."
        )
    if placement == "in_process" and transport in ("ipc", "nccl", "ranks"):
        raise ConfigError(
            f"sync.transport is {transport}, but rollout.placement is in_process and {transport} connects two processes: set "
            "rollout.placement to server, or sync.transport to local."
        )
    if placement == "server" and transport in ("local", "shared"):
        raise ConfigError(
            f"sync.transport is {transport}, but rollout.placement is server and {transport} cannot leave the process: set sync.transport "
            "to ipc, nccl, ranks or disk."
        )
    if placement == "server" and cfg.rollout.sleep_level:
        raise ConfigError(
            f"rollout.sleep_level is {cfg.rollout.sleep_level}, but rollout.placement is server, and only the in-process engine sleeps "
            "between generation and sync: set it to 0."
        )
    for name in ("server_url", "server_devices"):
        if placement == "in_process" and getattr(cfg.rollout, name) is not None:
            raise ConfigError(f"rollout.{name} is set, but rollout.placement is in_process: set placement to server, or remove the field.")


def _check_model(cfg: "Config") -> None:
    m = cfg.model
    if m.num_attention_heads % m.num_key_value_heads:
        raise ConfigError(
            f"model.num_attention_heads is {m.num_attention_heads} and model.num_key_value_heads is {m.num_key_value_heads}: "
            "each key-value head serves the same number of query heads, so make the first a multiple of the second."
        )
    if m.head_dim % 2:
        raise ConfigError(f"model.head_dim is {m.head_dim}: the rotary embedding turns pairs of channels, so make it even.")
    if m.is_moe and m.num_experts_per_tok > m.num_experts:
        raise ConfigError(
            f"model.num_experts_per_tok is {m.num_experts_per_tok}, but there are only {m.num_experts} experts: "
            "lower it or raise model.num_experts."
        )


def _check_precisions(cfg: "Config") -> None:
    n = cfg.numerics
    if n.training_precision == "fp8" and n.rollout_precision == "bf16":
        raise ConfigError(
            "numerics.training_precision is fp8 and numerics.rollout_precision is bf16: a BF16 engine cannot serve the trainer's FP8 "
            "bytes, so set rollout_precision to fp8 as well, or training_precision to bf16."
        )
    if n.router_precision != "mixed" and not cfg.model.is_moe:
        raise ConfigError(
            f"numerics.router_precision is {n.router_precision}, but {cfg.model.architecture} has no router: remove the field, or use "
            "model.architecture=qwen3_moe."
        )


def uses_fp8(cfg: "Config") -> bool:
    """Whether the engine, or a model of the trainer, runs its linear layers in FP8."""
    return cfg.numerics.rollout_precision == "fp8" or bool(fp8_models(cfg))


def linear_modules(model: "ModelConfig", *, layers: int | None = None, experts: int | None = None) -> Iterator[tuple[str, int, int]]:
    """Yield ``(HF module name, out_features, in_features)`` of all linear modules; the counts may be cut, as layers repeat."""
    hidden, q_out, kv_out = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    for layer in range(model.num_hidden_layers if layers is None else layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj", q_out, hidden
        yield f"{prefix}.self_attn.k_proj", kv_out, hidden
        yield f"{prefix}.self_attn.v_proj", kv_out, hidden
        yield f"{prefix}.self_attn.o_proj", hidden, q_out
        blocks = [(f"{prefix}.mlp", model.intermediate_size)]
        if model.is_moe:
            yield f"{prefix}.mlp.gate", model.num_experts, hidden
            count = model.num_experts if experts is None else experts
            blocks = [(f"{prefix}.mlp.experts.{e}", model.moe_intermediate_size) for e in range(count)]
        for block, width in blocks:
            yield f"{block}.gate_proj", width, hidden
            yield f"{block}.up_proj", width, hidden
            yield f"{block}.down_proj", hidden, width
    yield "lm_head", model.vocab_size, hidden


def _module_names(model: "ModelConfig") -> list[str]:
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    names = [name for name, _, _ in linear_modules(model)] + ["model.embed_tokens", "model.norm"]
    return names + [f"model.layers.{layer}.{norm}" for layer in range(model.num_hidden_layers) for norm in norms]


def _kept(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_high_precision(cfg: "Config") -> None:
    if not uses_fp8(cfg):
        return
    patterns, names = cfg.numerics.high_precision_modules, _module_names(cfg.model)
    defaults = type(cfg.numerics).model_fields["high_precision_modules"].default
    for pattern in patterns:
        if pattern not in defaults and not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=2, cutoff=0.5)
            hint = f" (close: {', '.join(close)})" if close else ""
            raise ConfigError(
                f"numerics.high_precision_modules: {pattern!r} matches no module{hint}: the whole Hugging Face name must match, "
                "so write for example '*.mlp.gate' or 'lm_head'."
            )
    _require_kept(cfg, names)
    _require_fused_agree(cfg, names)


def _require_kept(cfg: "Config", names: list[str]) -> None:
    reasons = {
        ".mlp.gate": "the router decides which experts run and its few rows do not fill a tile",
        "lm_head": "the logits are FP32 on both sides",
    }
    for name in names:
        for suffix, why in reasons.items():
            if name.endswith(suffix) and not _kept(name, cfg.numerics.high_precision_modules):
                raise ConfigError(
                    f"numerics.high_precision_modules leaves {name} to FP8, but {why}: "
                    f"add '{'*' if suffix[0] == '.' else ''}{suffix}' to the list."
                )


def _require_fused_agree(cfg: "Config", names: list[str]) -> None:
    patterns = cfg.numerics.high_precision_modules
    groups: dict[str, dict[str, bool]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for parts in _FUSED:
            if leaf in parts:
                groups.setdefault(f"{parent}.{'|'.join(parts)}", {})[name] = _kept(name, patterns)
        if ".mlp.experts." in name:
            groups.setdefault(f"{parent.rpartition('.')[0]}.*", {})[name] = _kept(name, patterns)
    for group, kept in groups.items():
        if len(set(kept.values())) > 1:
            high, low = (next(n for n, k in kept.items() if k is want) for want in (True, False))
            raise ConfigError(
                f"numerics.high_precision_modules keeps {high} but not {low}: "
                f"the engine runs {group} as one fused layer, so keep all or none of it."
            )


def _shortened(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_tiles(cfg: "Config") -> None:
    if not uses_fp8(cfg):
        return
    m, patterns = cfg.model, cfg.numerics.high_precision_modules
    fields = {
        ("hidden_size",): m.hidden_size,
        ("intermediate_size",) if not m.is_moe else ("moe_intermediate_size",): m.intermediate_size
        if not m.is_moe
        else m.moe_intermediate_size,
        ("num_attention_heads", "head_dim"): m.num_attention_heads * m.head_dim,
        ("num_key_value_heads", "head_dim"): m.num_key_value_heads * m.head_dim,
    }
    for names, size in fields.items():
        modules = [n for n, kind in _representatives(m) if not _kept(n, patterns) and kind & {*names} and size % BLOCK]
        if not modules:
            continue
        label = " x ".join(f"model.{name}" for name in names)
        raise ConfigError(
            f"{label} is {size}, not a multiple of {BLOCK}, so FP8 tiles of {_shortened(modules)} would be cut: use {_nearest(size)}, "
            "or add these modules to numerics.high_precision_modules, or set numerics.training_precision and rollout_precision to bf16."
        )


def _check_shares(cfg: "Config") -> None:
    """After the model's own sizes, those of each rank's share."""
    for one in ([cfg] if uses_fp8(cfg) else []) + fp8_models(cfg):
        check_layout(one, lambda module: not _kept(module, cfg.numerics.high_precision_modules))


def _representatives(model: "ModelConfig") -> Iterator[tuple[str, set[str]]]:
    """``(module, size fields it depends on)`` for every FP8 candidate of every layer, experts cut to the first."""
    width = "moe_intermediate_size" if model.is_moe else "intermediate_size"
    depends = {
        "q_proj": {"hidden_size", "num_attention_heads"},
        "k_proj": {"hidden_size", "num_key_value_heads"},
        "v_proj": {"hidden_size", "num_key_value_heads"},
        "o_proj": {"hidden_size", "num_attention_heads"},
        "gate_proj": {"hidden_size", width},
        "up_proj": {"hidden_size", width},
        "down_proj": {"hidden_size", width},
    }
    for name, _, _ in linear_modules(model, experts=1):
        leaf = name.rpartition(".")[2]
        if leaf in depends:
            yield name, depends[leaf]


def _nearest(size: int) -> str:
    below, above = size // BLOCK * BLOCK, math.ceil(size / BLOCK) * BLOCK
    return f"{below} or {above}" if below else str(above)


def _check_window(cfg: "Config") -> None:
    r, m, t = cfg.rollout, cfg.model, cfg.training
    if r.max_response_tokens >= r.max_model_len:
        raise ConfigError(
            f"rollout.max_response_tokens is {r.max_response_tokens} and rollout.max_model_len is {r.max_model_len}: the window holds "
            "prompt and response together, so lower the first or raise the second."
        )
    if r.max_model_len > m.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_model_len is {r.max_model_len}, but model.max_position_embeddings is {m.max_position_embeddings}: the engine "
            "cannot see further than the model, so lower the first or raise the second."
        )
    if r.max_model_len > t.max_tokens_per_microbatch:
        raise ConfigError(
            f"rollout.max_model_len is {r.max_model_len}, but training.max_tokens_per_microbatch is {t.max_tokens_per_microbatch}: a "
            "sequence is never split over micro-batches, so raise the second or lower the first."
        )
    for name in ("max_num_seqs", "max_model_len"):
        if r.max_num_batched_tokens is not None and r.max_num_batched_tokens < getattr(r, name):
            raise ConfigError(
                f"rollout.max_num_batched_tokens is {r.max_num_batched_tokens}, but rollout.{name} is {getattr(r, name)}: an engine step "
                "holds a token of every sequence, and a whole window, so raise the first or lower the second."
            )


def _check_minibatches(cfg: "Config") -> None:
    if cfg.training.minibatches_per_step > cfg.rollout.prompts_per_step:
        raise ConfigError(
            f"training.minibatches_per_step is {cfg.training.minibatches_per_step}, but a step has only {cfg.rollout.prompts_per_step} "
            "prompts (rollout.prompts_per_step): a group is never split, so lower the first or raise the second."
        )


def _check_transport(cfg: "Config") -> None:
    training, rollout = cfg.numerics.training_precision, cfg.numerics.rollout_precision
    if cfg.sync.transport == "ranks" and training != rollout:
        raise ConfigError(
            f"sync.transport is ranks, but numerics.training_precision is {training} and rollout_precision {rollout}: trainer ranks send "
            "their own bytes, and these are of one precision. Use sync.transport=nccl, or make the two equal."
        )
    if cfg.sync.transport == "shared" and training != rollout:
        raise ConfigError(
            f"sync.transport is shared, but numerics.training_precision is {training} and rollout_precision {rollout}: the two sides can "
            "only be one storage in one precision. Use sync.transport=local."
        )


def _check_task(cfg: "Config") -> None:
    t = cfg.task
    if t.kind == "file" and not t.path:
        raise ConfigError("task.kind is file, but task.path is not set: give the JSONL or parquet file with the prompts.")
    if t.kind == "reasoning_gym" and t.path:
        raise ConfigError(f"task.path is {t.path!r}, but task.kind is reasoning_gym: set task.kind to file, or remove the path.")
    if t.kind == "file" and t.params:
        raise ConfigError("task.params is set, but task.kind is file: these are arguments of reasoning-gym data sets, so remove them.")
    _check_mixture(t)
    _check_rewards(t)
    _check_tools(cfg)


def _check_tools(cfg: "Config") -> None:
    names = cfg.task.tools.names
    for name in names:
        if name != "calculator" and not _CALLABLE.match(name):
            raise ConfigError(f"task.tools.names has {name!r}, but must be calculator or an import path: write package.module:function.")
    if names and not any("</tool>".endswith(text) for text in cfg.rollout.stop):
        raise ConfigError("task.tools.names is set, but nothing stops the engine at a call: add '</tool>' to rollout.stop.")


def _check_mixture(t: "TaskConfig") -> None:
    names = [*t.mixture] or [t.name]
    c = t.curriculum
    if t.kind == "file" and (t.mixture or c.levels):
        raise ConfigError("task.mixture or task.curriculum.levels is set, but task.kind is file: both are of reasoning-gym data sets.")
    if t.mixture and t.params:
        raise ConfigError("task.params is set beside task.mixture: give the parameters of each data set in task.mixture_params.")
    if any(not (weight > 0 and math.isfinite(weight)) for weight in t.mixture.values()):
        raise ConfigError(f"task.mixture is {t.mixture}: shares must be positive numbers.")
    unknown = sorted({*t.mixture_params} - {*t.mixture} | {*c.levels} - {*names})
    if unknown:
        raise ConfigError(f"task.mixture_params or task.curriculum.levels names {', '.join(unknown)}, which the task does not draw from.")
    if any(not levels for levels in c.levels.values()):
        raise ConfigError("task.curriculum.levels has a data set with an empty list: give at least one level, or leave the data set out.")
    if c.lower_below >= c.raise_above:
        raise ConfigError(
            f"task.curriculum.lower_below is {c.lower_below} and raise_above {c.raise_above}: the first must be below the second."
        )


def _check_rewards(t: "TaskConfig") -> None:
    names = [*t.reward_weights] or [t.reward]
    for name in names:
        if name not in BUILT_IN_REWARDS and not _CALLABLE.match(name):
            raise ConfigError(
                f"task.{'reward_weights has' if t.reward_weights else 'reward is'} {name!r}, but must be {', '.join(BUILT_IN_REWARDS)} or "
                "an import path: write package.module:function."
            )
    if sum(name not in BUILT_IN_REWARDS for name in names) > MAX_USER_REWARDS:
        raise ConfigError(f"task.reward_weights has more than {MAX_USER_REWARDS} import paths: combine some in one function.")
    if any(not math.isfinite(weight) for weight in t.reward_weights.values()):
        raise ConfigError(f"task.reward_weights is {t.reward_weights}: weights must be finite numbers.")
    model = t.reward_model
    if "reward_model" in names and (not model.url or not model.model):
        raise ConfigError("the reward reward_model needs task.reward_model.url and model: give the server and the name of its model.")
    if not model.smallest < model.largest or not math.isfinite(model.factor):
        raise ConfigError(
            f"task.reward_model.smallest is {model.smallest}, largest {model.largest} and factor {model.factor}: the first must be below "
            "the second, and the factor finite."
        )
    if "judge" in names and (not t.judge.url or not t.judge.model):
        raise ConfigError("the reward judge needs task.judge.url and task.judge.model: give the endpoint and the name of its model.")
