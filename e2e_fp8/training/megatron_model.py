"""What policy, reference and critic share: a Megatron-Core model with its optimizer, on the CPU or on a GPU through one code path."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, ConfigError
from e2e_fp8.layout import ShardedParameter, megatron_shards
from e2e_fp8.megatron_names import QKV_ORDER
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.training import optimizer_state, pipeline
from e2e_fp8.training.context_parallel import ContextParallel
from e2e_fp8.training.ground import Ground
from e2e_fp8.training.microbatches import all_ranks, broadcast_record, even_out, sum_over
from e2e_fp8.training.model import build_model, build_optimizer, check_supported, uses_sequence_parallel
from e2e_fp8.training.packing import packed_layout, pad_packed, to_device
from e2e_fp8.training.parallel import (
    Parameter,
    context_group,
    initialize_parallel_state,
    rank_parameters,
    world_size,
)
from e2e_fp8.types import PackedBatch, ReplayCounts, StepReport


def select_ground(cfg: Config) -> Ground:
    """The ground that ``run.backend`` asks for.

    Raises:
        ConfigError: ``cuda`` is asked for and torch sees no GPU.
    """
    backend = cfg.run.backend
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("run.backend is cuda, but torch sees no GPU. Use run.backend=cpu or install the GPU stack.")
        from e2e_fp8.training.cuda_ground import CudaGround

        return CudaGround(cfg)
    from e2e_fp8.training.cpu_ground import CpuGround

    return CpuGround()


class MegatronModel[Readout](ABC):
    """Megatron-Core training of one model; ``Readout`` is what a loss function sees of a forward pass. Weights are zero until loaded.

    Raises:
        ConfigError: the configuration asks for something the trainer does not do, or a linear would run in another precision.
    """

    value_head = False
    """Whether the output is a value for each token, not logits."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.plan = QuantizationPlan.from_config(cfg)
        check_supported(cfg)
        self.grid = RankGrid.of(cfg.training.parallel, world_size())
        self.ground = select_ground(cfg)
        self._choices = choices_of(cfg.numerics)
        self.policy_version = 0
        with self.ground.scope():
            initialize_parallel_state(self.grid, self.ground)
            self.rank = dist.get_rank()
            self.context = self._context_parallel()
            self.ground.prepare()
            self.chunks, self._wrapped = build_model(cfg, self.ground, value_head=self.value_head)
            self.router_replays = self._router_replays()
            self.layout = self.layout_of(self.rank)
            self._parameters = rank_parameters(self.chunks, self.layout)
            self.ground.configure_precision([p for p in self._parameters if p.in_linear], self.plan)
            self._optimizer = build_optimizer(cfg, self.ground, self._wrapped)
            self._masters = optimizer_state.master_shards(self._optimizer, self._parameters)

    @abstractmethod
    def _read(self, output: torch.Tensor, batch: PackedBatch) -> Readout:
        """What a loss function sees, from the last stage's output ``[1, T, ...]``, T padded and this rank's share."""

    def _context_parallel(self) -> ContextParallel | None:
        """This rank's place among those that divide a micro-batch's tokens; None when each has them all."""
        place = self.grid.place(self.rank)
        size = self.grid.context
        return None if size == 1 else ContextParallel(rank=place.context, size=size, group=context_group())

    def _whole(self, values_T: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Rows of all tokens of ``batch``, without padding, from those of this rank's share."""
        whole = values_T if self.context is None else self.context.whole(values_T.contiguous())
        return whole[: batch.token_ids.numel()]

    def _router_replays(self) -> Any | None:
        """The routers as ``training.router_replay`` wants them; None when it is disabled."""
        replay = self.cfg.training.router_replay
        if not replay.enabled:
            return None
        from e2e_fp8.training.router_replay import RouterReplays

        return RouterReplays(self.chunks, sequence_parallel=uses_sequence_parallel(self.cfg), weights_and_order=replay.needs_gate_weights)

    def layout_of(self, rank: int) -> list[ShardedParameter]:
        """What any rank of this job holds of each Hugging Face tensor."""
        return megatron_shards(
            to_hf_config(self.cfg.model, None),
            self.grid.layout,
            rank,
            qkv_order=QKV_ORDER,
            spec=self.ground.spec,
            fp8=self.is_fp8_module,
        )

    def is_fp8_module(self, hf_module: str) -> bool:
        """Whether the trainer holds the weight of this Hugging Face linear module in block FP8."""
        return self.plan.training_fp8 and self.plan.is_fp8(hf_module)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.ground.device

    @property
    def model(self) -> Any:
        """Megatron's GPTModel: this rank's only chunk of layers, or the first under virtual pipelining."""
        return self.chunks[0]

    # Weights ---------------------------------------------------------------------------------------------------------

    def _load(self, weight_of: Callable[[Parameter], torch.Tensor]) -> None:
        """Set the FP32 masters to ``weight_of`` this rank's parameters, exactly, and the model parameters from them. Collective.

        Raises:
            CheckpointError: a weight is NaN, or has another size.
        """
        with self.ground.scope(), torch.no_grad():
            values = {s.name: s.of(weight_of(s.parameter)) for s in self._masters}
            optimizer_state.write_masters(self._masters, values)
            self._sync_parameters()
            for shard in self._masters:
                if not torch.equal(shard.master.detach().cpu(), values[shard.name].cpu()):
                    raise CheckpointError(
                        f"The FP32 master of {shard.name} differs from the loaded weight (is it NaN?). Check the checkpoint."
                    )

    def _sync_parameters(self) -> None:
        optimizer_state.sync_parameters(self._optimizer, self._wrapped)
        self.ground.after_parameter_sync()

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(codes float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)])`` of an FP8 parameter, as the forward uses them."""
        return self.ground.fp8_weight(parameter)

    def named_local_weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """``(megatron_name, tensor, scale_inv)`` of this rank: FP8 codes with their scales, or the BF16 parameter and None.

        Names carry the layer and expert numbers of the whole model; tensors are the rank's shares of it, in the trainer's own
        memory: copy what must outlive the next optimizer step.
        """
        for parameter in self._parameters:
            if self.ground.is_fp8(parameter.weight):
                codes, scale_inv = self.ground.fp8_weight(parameter.weight)
                yield parameter.name, codes.detach(), scale_inv.detach()
            else:
                yield parameter.name, parameter.weight.detach(), None

    def weight_addresses(self) -> list[int]:
        """First byte of everything that :meth:`named_local_weights` gives, in its order: the same while those views hold."""
        fp8, found = self.ground.is_fp8, []
        for parameter in self._parameters:
            weight = parameter.weight
            found += self.ground.fp8_addresses(weight) if fp8(weight) else (weight.data_ptr(),)
        return found

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(megatron_name, FP32 master in the shape of this rank's parameter)``.

        Views of the optimizer's memory, or gathered (then collective) where data parallelism divides the masters.
        """
        return optimizer_state.whole_masters(self._masters, self._parameters)

    def named_high_precision_weights(self) -> Iterator[tuple[str, torch.Tensor, None]]:
        """``(megatron_name, BF16 tensor, None)``: every master rounded to BF16, which is what the FP8 codes are quantized from."""
        for name, master in self.named_masters():
            yield name, master.to(torch.bfloat16), None

    # Forward ---------------------------------------------------------------------------------------------------------

    def _forward(self, wrapped: Any, batch: PackedBatch) -> torch.Tensor:
        """Output of one chunk: logits ``[1, T, V]`` or values ``[1, T, 1]`` on the last stage, else hidden states.

        T is padded, and this rank's share.
        """
        ranks = self.grid.context * (self.grid.tensor if uses_sequence_parallel(self.cfg) else 1)
        padded = to_device(pad_packed(batch, self.ground.token_multiple * ranks), self.ground.device)
        if self.context is None:
            params, positions_T = packed_layout(padded.cu_seqlens)
        else:
            params, positions_T = self.context.layout(padded.cu_seqlens)
            padded = self.context.share(padded)
        self.chunks[self._wrapped.index(wrapped)].rotary_pos_emb.positions_T = positions_T
        with self.router_replays.replaying(padded) if self.router_replays is not None else nullcontext():
            return wrapped(padded.token_ids[None], positions_T[None], None, packed_seq_params=params)

    def take_replay_counts(self) -> ReplayCounts | None:
        """What router replay changed in this rank's layers since the last call; None when it is disabled."""
        return None if self.router_replays is None else self.router_replays.take_counts()

    def _per_token(
        self, batches: Sequence[PackedBatch], read: Callable[[torch.Tensor, PackedBatch], torch.Tensor], rows: int
    ) -> list[torch.Tensor]:
        """``read(output, micro-batch)``, float32 ``[rows, T]``, of each micro-batch; no gradient, on the engine's device.

        Each data-parallel rank brings its own micro-batches; tensor and pipeline ranks bring the same. Collective.
        """
        self._refuse_interleaving()
        evened = even_out(batches)
        with self.ground.scope(), torch.no_grad():
            if self.grid.pipeline > 1:
                found = pipeline.per_token(self._wrapped, evened, self._forward, read, rows)
            else:
                found = [read(self._forward(self._wrapped[0], batch), batch) for batch in evened]
        return found[: len(batches)]

    def _refuse_interleaving(self) -> None:
        if self.grid.virtual_pipeline > 1:
            raise ConfigError(
                f"training.parallel.virtual_pipeline is {self.grid.virtual_pipeline}: weights can be loaded and exported so, but running "
                "the interleaved schedule is not implemented. Set it to 1."
            )

    # Update ----------------------------------------------------------------------------------------------------------

    def set_learning_rate(self, learning_rate: float) -> None:
        """Learning rate of all parameter groups from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: Callable[[Readout, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]],
        denominator: float,
    ) -> StepReport:
        """Gradient of (sum of the micro-batches' loss sums) / ``denominator``, clip, one optimizer step, parameter sync. Collective.

        Each data-parallel rank brings its own micro-batches (tensor and pipeline ranks the same); sums run over all of them and
        ``denominator`` is that of all of them. Metrics are the metric sums and the loss sum (``loss``) over ``denominator``. A step
        with a non-finite gradient is skipped: weights, optimizer state and ``policy_version`` stay as they are.

        Raises:
            ValueError: no micro-batch on any rank, or a denominator that is not positive and finite.
        """
        self._refuse_interleaving()
        evened = even_out(batches)
        if not evened or not (math.isfinite(denominator) and denominator > 0):
            raise ValueError(f"A training step needs micro-batches and a positive denominator, not {len(evened)} and {denominator}.")
        with self.ground.scope():
            for wrapped in self._wrapped:
                wrapped.zero_grad_buffer()
                wrapped.set_is_first_microbatch()
            self._optimizer.zero_grad()
            sums = self._accumulate_gradients(evened, loss_fn, denominator)
            metrics = {name: value / denominator for name, value in sums.items()}
            if not self._gradients_finite():
                self._optimizer.zero_grad()
                return StepReport(metrics=metrics, grad_norm=math.nan, skipped=True)
            applied, grad_norm, _ = self._optimizer.step()
            if not applied:
                return StepReport(metrics=metrics, grad_norm=float(grad_norm or math.nan), skipped=True)
            self.ground.after_parameter_sync()
        self.policy_version += 1
        return StepReport(metrics=metrics, grad_norm=float(grad_norm), skipped=False)

    def _accumulate_gradients(self, batches: Sequence[PackedBatch], loss_fn: Any, denominator: float) -> dict[str, float]:
        """Gradients of all micro-batches of all ranks; returns the metric sums over them."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, float]]:
            loss_sum, metric_sums = loss_fn(self._read(output, batch), to_device(batch, self.ground.device))
            return loss_sum / denominator, {k: float(v.detach()) for k, v in {"loss": loss_sum, **metric_sums}.items()}

        if self.grid.pipeline > 1:
            records = pipeline.forward_backward(self._wrapped, batches, self._forward, loss)
        else:
            records = []
            for batch in batches:
                value, sums = loss(self._forward(self._wrapped[0], batch), batch)
                value.backward()
                records.append(sums)
        finalize_model_grads(self._wrapped, None)
        totals = {name: sum(record[name] for record in records) for name in (records[0] if records else ())}
        if self.grid.pipeline > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            totals = broadcast_record(totals, last, parallel_state.get_pipeline_model_parallel_group())
        return sum_over(totals, parallel_state.get_data_parallel_group())

    def _gradients_finite(self) -> bool:
        buffers = [b for wrapped in self._wrapped for b in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]
        finite = all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in buffers)
        return finite if self.grid.world == 1 else all_ranks(finite)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nested dict of CPU tensors and numbers: masters, Adam state, RNG, ``policy_version``; enough for a bit-exact resume.

        Of several ranks, each returns its own shares, to be loaded by the same rank of the same parallel sizes.
        """
        with self.ground.scope(), torch.no_grad():
            state = optimizer_state.export_state(self._optimizer, self._masters)
            rng = {name: value.cpu().clone() for name, value in self.ground.rng_state().items()}
        return {**state, "rng": rng, "policy_version": self.policy_version}

    def load_state_dict(self, state: dict[str, Any], *, weights_only: bool = False) -> None:
        """Inverse of ``state_dict``.

        With ``weights_only``, Adam's state and the generators stay as they are, and the state may come from the other ground.

        Raises:
            CheckpointError: an entry is missing or belongs to another model.
        """
        missing = {"parameters", "group_steps", "rng", "policy_version"} - state.keys()
        if missing:
            raise CheckpointError(f"The trainer state lacks {sorted(missing)}. Use another checkpoint.")
        with self.ground.scope(), torch.no_grad():
            if weights_only:
                optimizer_state.import_masters(self._masters, state)
            else:
                optimizer_state.import_state(self._optimizer, self._masters, state)
                self.ground.set_rng_state(state["rng"])
            self._sync_parameters()
        self.policy_version = int(state["policy_version"])
