"""FP32 masters and Adam state of Megatron's distributed optimizer, by parameter name.

One rank holds whole parameters for now; every access goes through the shard that Megatron attached to the model parameter
(``main_param``), so the names and the flat FP32 layout stay valid for several ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch

from e2e_fp8.errors import CheckpointError
from e2e_fp8.megatron_names import neutral_name


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers under a ChainedOptimizer (dense and expert parameters have one each), or the optimizer itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return list(chained) if chained is not None else [optimizer]


def named_masters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """``(name, model parameter, flat FP32 master)`` of every parameter."""
    for name, parameter in model.named_parameters():
        master = getattr(parameter, "main_param", None)
        if master is None or master.dtype != torch.float32 or master.numel() != parameter.numel():
            raise RuntimeError(f"The distributed optimizer keeps no whole FP32 master of {name}.")
        yield name, parameter, master


def write_masters(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Overwrite every FP32 master; the model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the names or sizes are not exactly the model's.
    """
    masters = {name: master for name, _, master in named_masters(model)}
    missing, extra = sorted(masters.keys() - values.keys()), sorted(values.keys() - masters.keys())
    if missing or extra:
        raise CheckpointError(
            f"Saved weights do not fit the trainer: missing {missing[:4]} ({len(missing)}), unknown {extra[:4]} ({len(extra)})."
        )
    for name, master in masters.items():
        if values[name].numel() != master.numel():
            raise CheckpointError(f"Saved weight {name} has {values[name].numel()} elements, but the trainer's has {master.numel()}.")
        master.data.copy_(values[name].reshape(-1))


def sync_parameters(optimizer: Any, ddp: Any) -> None:
    """Masters -> BF16 or FP8 model parameters, as after an optimizer step."""
    for leaf in leaf_optimizers(optimizer):
        leaf._copy_main_params_to_model_params()
    ddp.start_param_sync(force_sync=True)


def export_state(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Copies on the CPU: per parameter the master and whatever Adam keeps; per parameter group a step count if it keeps one.

    Parameters go by the local spec's names on both grounds.
    """
    inner_of = _inner_optimizers(optimizer)
    parameters: dict[str, dict[str, torch.Tensor]] = {}
    for name, _, master in named_masters(model):
        kept = inner_of[id(master)].state.get(master, {})
        entry = {"master": master}
        entry.update({key: value for key, value in kept.items() if torch.is_tensor(value)})
        parameters[neutral_name(name)] = {key: value.detach().to("cpu", copy=True) for key, value in entry.items()}
    return {"parameters": parameters, "group_steps": _group_steps(optimizer)}


def _inner_optimizers(optimizer: Any) -> dict[int, Any]:
    """Adam of each master, by the master's id."""
    adams = [leaf.optimizer for leaf in leaf_optimizers(optimizer)]
    return {id(master): adam for adam in adams for group in adam.param_groups for master in group["params"]}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for leaf in leaf_optimizers(optimizer) for group in leaf.optimizer.param_groups]


def _group_steps(optimizer: Any) -> list[int]:
    """Step count of each parameter group (Transformer Engine's Adam keeps it there), -1 where the group has none."""
    return [int(group.get("step", -1)) for group in _groups(optimizer)]


def import_masters(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """The FP32 masters of ``export_state`` alone, also from the other ground; the model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the state belongs to another model.
    """
    masters: dict[str, torch.Tensor] = {name: entry["master"] for name, entry in state["parameters"].items()}
    own: dict[str, str] = {neutral_name(name): name for name, _, _ in named_masters(model)}
    write_masters(model, {own.get(name, name): master for name, master in masters.items()})


def import_state(optimizer: Any, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Inverse of ``export_state``; the model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the state belongs to another model or optimizer.
    """
    groups, steps = _groups(optimizer), state["group_steps"]
    if len(groups) != len(steps):
        raise CheckpointError(f"The checkpoint has {len(steps)} optimizer groups, the trainer {len(groups)}.")
    import_masters(model, state)
    inner_of = _inner_optimizers(optimizer)
    for name, _, master in named_masters(model):
        entry = {key: value for key, value in state["parameters"][neutral_name(name)].items() if key != "master"}
        inner = inner_of[id(master)]
        if not entry:
            inner.state.pop(master, None)
            continue
        # Adam's own step tensors live on the CPU; moments live with the master.
        inner.state[master] = {key: value.clone() if key == "step" else value.to(master.device, copy=True) for key, value in entry.items()}
    for group, step in zip(groups, steps, strict=True):
        if step >= 0:
            group["step"] = step
        else:
            group.pop("step", None)
