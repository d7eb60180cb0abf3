"""FP32 masters and Adam state of Megatron's distributed optimizer, by parameter name.

The optimizer divides the flat masters of a rank's parameters over its data-parallel group, without regard to parameter borders:
a rank holds a range of some masters and nothing of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.errors import CheckpointError
from e2e_fp8.megatron_names import neutral_name
from e2e_fp8.training.parallel import Parameter, data_group


@dataclass(frozen=True, kw_only=True)
class MasterShard:
    """This rank's range of one FP32 master."""

    parameter: Parameter
    master: torch.Tensor
    """Flat float32, the elements ``start .. stop`` of the parameter."""
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The parameter's name in the whole model."""
        return self.parameter.name

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same range of a tensor in the parameter's shape, flat."""
        return whole.reshape(-1)[self.start : self.stop]


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers under a ChainedOptimizer (dense and expert parameters have one each), or the optimizer itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return list(chained) if chained is not None else [optimizer]


def master_shards(optimizer: Any, parameters: Sequence[Parameter]) -> list[MasterShard]:
    """This rank's masters, in the order of ``parameters``.

    Raises:
        RuntimeError: a parameter has no FP32 master on any rank of its data-parallel group.
    """
    ranges: dict[int, tuple[int, int]] = {}
    own_masters: dict[int, torch.Tensor] = {}
    for leaf in leaf_optimizers(optimizer):
        # an FP32 parameter is its own master: the optimizer holds views of it
        for models, shards in zip(leaf.model_fp32_groups, leaf.shard_fp32_groups, strict=True):
            own_masters.update({id(model): shard for model, shard in zip(models, shards, strict=True)})
        for weight in leaf.model_param_gbuf_map:
            span = leaf._get_model_param_range_map(weight)["param"]
            ranges[id(weight)] = (span.start, span.end)
    found = []
    for parameter in parameters:
        start, stop = ranges.get(id(parameter.weight), (0, 0))
        if start == stop and data_group(parameter.weight).size() > 1:
            continue
        master = own_masters.get(id(parameter.weight), getattr(parameter.weight, "main_param", None))
        if master is None or master.dtype != torch.float32 or not 0 < master.numel() == stop - start:
            raise RuntimeError(f"The distributed optimizer keeps no FP32 master of {parameter.name}.")
        found.append(MasterShard(parameter=parameter, master=master, start=start, stop=stop))
    return found


def whole_masters(shards: Sequence[MasterShard], parameters: Sequence[Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, FP32 master in the parameter's shape)``; views where this rank holds all of it, else gathered.

    Collective over the data-parallel groups.
    """
    shard_of = {shard.name: shard for shard in shards}
    for parameter in parameters:
        shard, weight, group = shard_of.get(parameter.name), parameter.weight, data_group(parameter.weight)
        if group.size() == 1:
            assert shard is not None
            yield parameter.name, shard.master.detach().view(weight.shape)
            continue
        # Ranges are disjoint, so adding integers puts the bits together exactly, signs of zero included.
        bits = torch.zeros(weight.numel(), dtype=torch.int32, device=weight.device)
        if shard is not None:
            bits[shard.start : shard.stop] = shard.master.detach().view(torch.int32)
        dist.all_reduce(bits, group=group)
        yield parameter.name, bits.view(torch.float32).view(weight.shape)


def write_masters(shards: Sequence[MasterShard], values: Mapping[str, torch.Tensor]) -> None:
    """Overwrite this rank's FP32 masters from flat tensors of the same ranges; model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the names or sizes are not exactly the rank's.
    """
    masters = {shard.name: shard.master for shard in shards}
    missing, extra = sorted(masters.keys() - values.keys()), sorted(values.keys() - masters.keys())
    if missing or extra:
        raise CheckpointError(
            f"Saved weights do not fit the trainer: missing {missing[:4]} ({len(missing)}), unknown {extra[:4]} ({len(extra)})."
        )
    for name, master in masters.items():
        if values[name].numel() != master.numel():
            raise CheckpointError(f"Saved weight {name} has {values[name].numel()} elements, but the trainer's has {master.numel()}.")
        master.data.copy_(values[name].reshape(-1))


def sync_parameters(optimizer: Any, wrapped: Sequence[Any]) -> None:
    """Masters -> BF16 or FP8 model parameters on every rank, as after an optimizer step."""
    for leaf in leaf_optimizers(optimizer):
        leaf._copy_main_params_to_model_params()
    for ddp in wrapped:
        ddp.start_param_sync(force_sync=True)


def export_state(optimizer: Any, shards: Sequence[MasterShard]) -> dict[str, Any]:
    """Copies on the CPU: per parameter the master, whatever Adam keeps and which elements of it this rank has (``spans``, first and
    one past the last); per parameter group a step count if it keeps one.

    Parameters go by the local spec's names on both grounds. Of several data-parallel ranks, each exports its own ranges.
    """
    inner_of = _inner_optimizers(optimizer)
    parameters: dict[str, dict[str, torch.Tensor]] = {}
    spans: dict[str, list[int]] = {}
    for shard in shards:
        kept = inner_of[id(shard.master)].state.get(shard.master, {})
        entry = {"master": shard.master}
        entry.update({key: value for key, value in kept.items() if torch.is_tensor(value)})
        parameters[neutral_name(shard.name)] = {key: value.detach().to("cpu", copy=True) for key, value in entry.items()}
        spans[neutral_name(shard.name)] = [shard.start, shard.stop]
    return {"parameters": parameters, "spans": spans, "group_steps": _group_steps(optimizer)}


def _inner_optimizers(optimizer: Any) -> dict[int, Any]:
    """Adam of each master, by the master's id."""
    adams = [leaf.optimizer for leaf in leaf_optimizers(optimizer)]
    return {id(master): adam for adam in adams for group in adam.param_groups for master in group["params"]}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for leaf in leaf_optimizers(optimizer) for group in leaf.optimizer.param_groups]


def _group_steps(optimizer: Any) -> list[int]:
    """Step count of each parameter group (Transformer Engine's Adam keeps it there), -1 where the group has none."""
    return [int(group.get("step", -1)) for group in _groups(optimizer)]


def import_masters(shards: Sequence[MasterShard], state: dict[str, Any]) -> None:
    """The FP32 masters of ``export_state`` alone, also from the other ground; the model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the state belongs to another model.
    """
    masters: dict[str, torch.Tensor] = {name: entry["master"] for name, entry in state["parameters"].items()}
    own: dict[str, str] = {neutral_name(shard.name): shard.name for shard in shards}
    write_masters(shards, {own.get(name, name): master for name, master in masters.items()})


def import_state(optimizer: Any, shards: Sequence[MasterShard], state: dict[str, Any]) -> None:
    """Inverse of ``export_state``; the model parameters follow with ``sync_parameters``.

    Raises:
        CheckpointError: the state belongs to another model or optimizer.
    """
    groups, steps = _groups(optimizer), state["group_steps"]
    if len(groups) != len(steps):
        raise CheckpointError(f"The checkpoint has {len(steps)} optimizer groups, the trainer {len(groups)}.")
    import_masters(shards, state)
    inner_of = _inner_optimizers(optimizer)
    for shard in shards:
        entry = {key: value for key, value in state["parameters"][neutral_name(shard.name)].items() if key != "master"}
        master, inner = shard.master, inner_of[id(shard.master)]
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
