"""One engine rank of the ``ranks`` transport: where the rows that trainer ranks send are received, and what a receipt reads.

What vLLM keeps as a checkpoint does is received in its own parameters. What it keeps in another form (BF16 layers of the CPU
build) is received beside the model, in the shape of this rank's share, and brought in by vLLM's own loaders: these ask for a
whole tensor and read this rank's share of it, so the rest of it is zeros.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.layout import EngineParallel, MegatronParallel, ShardedParameter, engine_shards, hf_tensors
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.plan import Plan
from e2e_fp8.numerics.digest import tensor_digests
from e2e_fp8.rollout.engine_layout import fp8_modules
from e2e_fp8.rollout.weight_loading import Loader
from e2e_fp8.sync.buckets import DTYPES
from e2e_fp8.sync.engine_receipt import encode_digests
from e2e_fp8.sync.point_to_point import receive
from e2e_fp8.sync.process_group import PairGroup
from e2e_fp8.sync.rank_publisher import ready_note
from e2e_fp8.sync.reshard import check_parameters, places


class RankFiller:
    """This rank's end of one channel."""

    def __init__(
        self, parameters: Mapping[str, Any], hf_config: Mapping[str, Any], parallel: EngineParallel, rank: int, device: torch.device
    ) -> None:
        """Join the trainer's group. ``parameters`` are those of ``sync.rank_publisher``.

        Raises EngineError when they are malformed, LayoutError when the trainer's sizes do not fit the model.
        """
        try:
            train = MegatronParallel(**parameters["train"])
            host, port, size = str(parameters["host"]), int(parameters["port"]), int(parameters["size"])
            self._timeout_s, self._max_bytes = float(parameters["timeout_s"]), int(parameters["max_bytes"])
            order, spec = parameters["qkv_order"], parameters["spec"]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The trainer sent malformed parameters of the ranks transport ({error!r}); refused.") from error
        fp8 = fp8_modules(hf_config)
        self._plan = Plan.from_config(hf_config, train, parallel, qkv_order=order, spec=spec, fp8=fp8)
        self._shards = engine_shards(hf_config, parallel, rank, fp8=fp8)
        self._hf_shapes = {tensor.name: tensor.shape for tensor in hf_tensors(hf_config, fp8)}
        self._rank, self._device = rank, device
        self._beside: dict[str, torch.Tensor] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._group = PairGroup.join(host, port, train.world_size + rank, size, device=device, timeout_s=self._timeout_s)

    def look(self, live: Mapping[str, torch.Tensor], *, all_in_place: bool) -> None:
        """Find the memory of every parameter; call before an update takes the model apart.

        ``all_in_place``: whether vLLM keeps BF16 layers as the checkpoint does too. Raises LayoutError when a parameter is missing or
        has another shape than the layout says.
        """
        self._parameters = {}
        for shard in self._shards:
            if not (shard.fp8 or all_in_place):
                if shard.name not in self._beside:
                    self._beside[shard.name] = torch.zeros(shard.shape, dtype=DTYPES[shard.dtype], device=self._device)
                self._parameters[shard.name] = self._beside[shard.name]
                continue
            for name in (shard.name, scale_name(shard.name)) if shard.fp8 else (shard.name,):
                if name in live:
                    self._parameters[name] = live[name].detach()
        check_parameters(self._plan, self._rank, self._parameters)

    def fill(self, turn: int, policy_version: int, loader: Loader) -> None:
        """Receive everything and hand ``loader`` what lies beside the model; errors as of ``sync.point_to_point.receive``."""
        self._group.note(ready_note(turn, self._rank))
        receive(
            self._plan,
            self._rank,
            self._parameters,
            self._group,
            device=self._device,
            policy_version=policy_version,
            max_bytes=self._max_bytes,
        )
        for shard in self._shards:
            if shard.name in self._beside:
                for name, tensor in self._as_hf(shard):
                    loader.load({name: tensor}, reusable=False)

    def _as_hf(self, shard: ShardedParameter) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole HF tensors that hold this rank's share at its place."""
        held = self._beside[shard.name]
        for part in shard.parts:
            rows = (held if part.expert is None else held[part.expert])[part.row : part.row + part.rows[1] - part.rows[0]]
            whole = torch.zeros(self._hf_shapes[part.hf_name], dtype=held.dtype, device=held.device)
            whole[part.index] = rows
            yield part.hf_name, whole

    def receipt(self, live: Mapping[str, torch.Tensor], *, all_in_place: bool) -> str:
        """Digests of every piece of the plan in its order, weights before their scales, as ``encode_digests`` writes them.

        Read from the live parameters; from beside the model where vLLM repacks.
        """
        self.look(live, all_in_place=all_in_place)
        found = places(self._plan.copies(self._rank), self._parameters)
        return encode_digests(tensor_digests([t for piece in found for t in (piece.data, piece.scale_inv) if t is not None]))

    def close(self) -> None:
        """Leave the trainer's group."""
        self._group.abort()
        self._parameters, self._beside = {}, {}
