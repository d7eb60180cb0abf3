"""What each module of a running model computes, under names that trainer and engine share.

Values are rows of tokens, in the order in which the model saw them. Names of a layer are ``layers.I.MODULE``. The rows of experts are
brought into one order on both sides: by token, then by expert.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LAYER_MODULES = (
    "residual_in",
    "input_norm",
    "qkv",
    "q_norm",
    "k_norm",
    "q_rotary",
    "k_rotary",
    "attention",
    "o_proj",
    "residual_mid",
    "post_attention_norm",
    "router_logits",
    "router_weights",
    "gate_up",
    "activation",
    "down",
    "mlp",
)
"""Of one layer, in the order of a forward pass; a dense model lacks the router's."""


def module_order(layers: int) -> list[str]:
    """All names in the order of a forward pass."""
    inner = [f"layers.{layer}.{name}" for layer in range(layers) for name in LAYER_MODULES]
    return ["embedding", *inner, "residual_out", "final_norm", "logits"]


class Recorder:
    """Collects rows of each name over one or more forward passes; with ``only``, those of one module of every layer."""

    def __init__(self, only: str | None = None) -> None:
        self._only = only
        self._parts: dict[str, list[torch.Tensor]] = {}
        self.token_ids: list[list[int]] = []
        """Input of each forward pass."""

    def add(self, name: str, value: torch.Tensor, rows: int | None = None) -> None:
        """Keep a copy of ``value`` on the CPU as ``[rows, -1]`` (all leading axes are tokens unless ``rows`` says how many there are)."""
        if self._only is not None and name.rpartition(".")[2] != self._only:
            return
        copy = value.detach().to("cpu", copy=True)
        self._parts.setdefault(name, []).append(copy.reshape(copy.shape[0] if rows is None else rows, -1))

    def rows(self) -> dict[str, torch.Tensor]:
        """Name -> ``[T, C]`` of all passes."""
        return {name: torch.cat(parts) for name, parts in self._parts.items()}


class _Hooks:
    """Registered hooks and replaced attributes, undone together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def after(self, module: torch.nn.Module, act: Callable[[Any, Any], None]) -> None:
        """``act(args, output)`` after each call of ``module``."""
        self._undo.append(module.register_forward_hook(lambda _, args, output: act(args, output)).remove)

    def before(self, module: torch.nn.Module, act: Callable[[Any], None]) -> None:
        """``act(args)`` before each call."""
        self._undo.append(module.register_forward_pre_hook(lambda _, args: act(args)).remove)

    def method(self, owner: Any, name: str, act: Callable[[Any], None]) -> None:
        """``act(result)`` after each call of the method ``name`` of one object."""
        inner = getattr(owner, name)
        held = owner.__dict__.get(name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            act(result)
            return result

        owner.__dict__[name] = wrapper

        def restore() -> None:
            if held is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = held

        self._undo.append(restore)

    def value(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute for a while."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def remove(self) -> None:
        """Undo everything, last first."""
        while self._undo:
            self._undo.pop()()


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def watch_engine(model: Any, recorder: Recorder) -> Iterator[Recorder]:
    """Record a live vLLM Qwen3 or Qwen3-MoE inside the block. Logits have one row for each sampled token."""
    hooks = _Hooks()
    try:
        inner = model.model
        hooks.before(inner.embed_tokens, lambda args: recorder.token_ids.append(args[0].tolist()))
        hooks.after(inner.embed_tokens, lambda args, out: recorder.add("embedding", out))
        for index, layer in enumerate(inner.layers):
            _watch_engine_layer(hooks, layer, f"layers.{index}.", recorder)
        hooks.after(inner.norm, lambda args, out: _norm_with_residual(recorder, "residual_out", "final_norm", args, out))
        hooks.after(model.logits_processor, lambda args, out: recorder.add("logits", out))
        yield recorder
    finally:
        hooks.remove()


def _norm_with_residual(recorder: Recorder, residual: str, norm: str, args: Any, out: Any) -> None:
    recorder.add(residual, out[1] if isinstance(out, tuple) else args[0])
    recorder.add(norm, _first(out))


def _watch_engine_layer(hooks: _Hooks, layer: Any, prefix: str, recorder: Recorder) -> None:
    def keep(module: torch.nn.Module, name: str) -> None:
        hooks.after(module, lambda args, out: recorder.add(prefix + name, _first(out)))

    attention, mlp = layer.self_attn, layer.mlp
    for module, residual, name in (
        (layer.input_layernorm, "residual_in", "input_norm"),
        (layer.post_attention_layernorm, "residual_mid", "post_attention_norm"),
    ):
        hooks.after(module, lambda args, out, r=residual, n=name: _norm_with_residual(recorder, prefix + r, prefix + n, args, out))
    for module, name in ((attention.qkv_proj, "qkv"), (attention.q_norm, "q_norm"), (attention.k_norm, "k_norm")):
        keep(module, name)

    def rotated(args: Any) -> None:
        # vLLM's layers share one rotary module, so its results are read where attention receives them.
        recorder.add(prefix + "q_rotary", args[0])
        recorder.add(prefix + "k_rotary", args[1])

    hooks.before(attention.attn, rotated)
    for module, name in ((attention.attn, "attention"), (attention.o_proj, "o_proj"), (mlp, "mlp")):
        keep(module, name)
    if not hasattr(mlp, "experts"):
        for module, name in ((mlp.gate_up_proj, "gate_up"), (mlp.act_fn, "activation"), (mlp.down_proj, "down")):
            keep(module, name)
        return
    keep(mlp.gate, "router_logits")
    # vLLM's own experts on a GPU show nothing of their inside
    operators, count = getattr(mlp.experts.routed_experts.quant_method, "operators", None), mlp.n_routed_experts
    if operators is not None:
        hooks.value(operators, "observe", lambda values: _expert_rows(recorder, prefix, values, count))


def _expert_rows(recorder: Recorder, prefix: str, values: dict[str, torch.Tensor], experts: int) -> None:
    """``values`` of one call of a layer's experts, whose rows are sorted by expert."""
    ids = values["ids"].long()
    tokens, top_k = ids.shape
    if "weights" in values:
        weights = values["weights"]
        recorder.add(prefix + "router_weights", weights.new_zeros(tokens, experts).scatter(1, ids, weights))
    by_token = (ids.reshape(-1).argsort(stable=True) // top_k).argsort(stable=True)
    for name in ("gate_up", "activation", "down"):
        recorder.add(prefix + name, values[name][by_token], tokens)


@contextmanager
def watch_trainer(model: Any, recorder: Recorder) -> Iterator[Recorder]:
    """Record a Megatron GPTModel inside the block. Logits have one row for each token, padding included (last, on a GPU).

    Norms that Transformer Engine runs inside a linear layer, and its own experts, show nothing.
    """
    hooks = _Hooks()
    try:
        hooks.after(model.embedding.word_embeddings, lambda args, out: recorder.add("embedding", out[0]))
        for index, layer in enumerate(model.decoder.layers):
            _watch_trainer_layer(hooks, layer, f"layers.{index}.", recorder)

        def final(args: Any, out: Any) -> None:
            recorder.add("residual_out", args[0])
            recorder.add("final_norm", out)

        hooks.after(model.decoder.final_layernorm, final)
        hooks.after(model.output_layer, lambda args, out: recorder.add("logits", _first(out)))
        yield recorder
    finally:
        hooks.remove()


def _watch_trainer_layer(hooks: _Hooks, layer: Any, prefix: str, recorder: Recorder) -> None:
    def keep(module: torch.nn.Module, name: str) -> None:
        hooks.after(module, lambda args, out: recorder.add(prefix + name, _first(out)))

    def norm(module: torch.nn.Module, residual: str, name: str) -> None:
        if not hasattr(module, "weight"):
            return

        def act(args: Any, out: Any) -> None:
            recorder.add(prefix + residual, args[0])
            recorder.add(prefix + name, out)

        hooks.after(module, act)

    attention, mlp = layer.self_attention, layer.mlp
    norm(layer.input_layernorm, "residual_in", "input_norm")
    norm(layer.pre_mlp_layernorm, "residual_mid", "post_attention_norm")
    for module, name in (
        (attention.linear_qkv, "qkv"),
        (attention.q_layernorm, "q_norm"),
        (attention.k_layernorm, "k_norm"),
        (attention.core_attention.query_rotary, "q_rotary"),
        (attention.core_attention.key_rotary, "k_rotary"),
        (attention.core_attention, "attention"),
        (attention.linear_proj, "o_proj"),
        (mlp, "mlp"),
    ):
        keep(module, name)
    if hasattr(mlp, "experts"):
        _watch_trainer_experts(hooks, mlp, prefix, recorder)
        return
    keep(mlp.linear_fc1, "gate_up")
    hooks.after(mlp.linear_fc2, lambda args, out: recorder.add(prefix + "activation", args[0]))
    keep(mlp.linear_fc2, "down")


def _watch_trainer_experts(hooks: _Hooks, mlp: Any, prefix: str, recorder: Recorder) -> None:
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("gate_up", "activation", "down")}
    routing: dict[str, torch.Tensor] = {}
    experts = mlp.config.num_moe_experts

    def chosen(result: Any) -> None:
        weights, ids = result
        if ids.dtype == torch.bool:
            routing["map"], dense = ids, weights
        else:
            routing["map"] = torch.zeros(ids.shape[0], experts, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
            dense = torch.zeros(ids.shape[0], experts, device=ids.device).scatter(1, ids, weights.detach())
        recorder.add(prefix + "router_weights", dense)

    def logits(result: torch.Tensor) -> None:
        recorder.add(prefix + "router_logits", result.reshape(-1, experts))

    def finish(args: Any, out: Any) -> None:
        tokens = routing["map"].shape[0]
        by_token = routing["map"].t().nonzero()[:, 1].argsort(stable=True)
        for name, values in parts.items():
            recorder.add(prefix + name, torch.cat(values)[by_token], tokens)
            values.clear()

    if hasattr(mlp, "choose"):
        hooks.method(mlp, "choose", chosen)
        hooks.method(mlp, "router_logits", logits)
    else:
        hooks.after(mlp.router, lambda args, out: chosen(out))
        hooks.method(mlp.router, "gating", logits)
    if not hasattr(mlp.experts, "local_experts"):
        if hasattr(mlp, "observe"):
            hooks.value(mlp, "observe", lambda values: _expert_rows(recorder, prefix, values, experts))
        return
    for expert in mlp.experts.local_experts:
        hooks.after(expert.linear_fc1, lambda args, out: parts["gate_up"].append(out[0].detach()))
        hooks.after(expert.linear_fc2, lambda args, out: parts["activation"].append(args[0].detach()))
        hooks.after(expert.linear_fc2, lambda args, out: parts["down"].append(out[0].detach()))
    hooks.after(mlp, finish)
