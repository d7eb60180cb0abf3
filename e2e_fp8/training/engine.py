"""The training engine: Megatron-Core on the CPU or on a GPU through one code path."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, ConfigError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.protocols import LossFn
from e2e_fp8.training import optimizer_state
from e2e_fp8.training.ground import Ground
from e2e_fp8.training.log_probs import token_stats_from_logits
from e2e_fp8.training.model import build_model, build_optimizer, check_supported, initialize_parallel_state
from e2e_fp8.training.packing import packed_layout, pad_packed, to_device
from e2e_fp8.training.weights import fused_weights, import_safetensors, initial_hf_weights
from e2e_fp8.types import PackedBatch, StepReport, TokenStats


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


class MegatronEngine:
    """Megatron-Core training of one policy (``e2e_fp8.protocols.TrainEngine`` without the export, which orchestration adds).

    A new engine holds the weights of ``model.hf_path``, or fresh ones from ``run.seed``.

    Raises:
        ConfigError: the configuration asks for something the trainer does not do, or a linear would run in another precision.
        CheckpointError: the weights of ``model.hf_path`` are damaged or do not fit.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.plan = QuantizationPlan.from_config(cfg)
        check_supported(cfg)
        self._check_alignment()
        self.ground = select_ground(cfg)
        self.policy_version = 0
        with self.ground.scope():
            initialize_parallel_state(self.ground)
            self.ground.prepare()
            self.model, self._ddp = build_model(cfg, self.ground)
            self.ground.configure_precision(self.model, self.plan)
            self._optimizer = build_optimizer(cfg, self.ground, self._ddp)
        source = cfg.model.hf_path
        self.load_hf_weights(initial_hf_weights(cfg.model, cfg.run.seed) if source is None else import_safetensors(source))

    def _check_alignment(self) -> None:
        problems = self.plan.misaligned(self.cfg.model) if self.plan.training_fp8 else []
        if problems:
            raise ConfigError(
                "FP8 training needs dimensions that are multiples of 128, but these modules have others: "
                f"{', '.join(problems[:3])} ({len(problems)} in all). Change the model section or use training_precision=bf16."
            )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.ground.device

    # Weights ---------------------------------------------------------------------------------------------------------

    def load_hf_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the FP32 masters to the given HF-named weights, exactly, and the model parameters from them.

        Raises:
            CheckpointError: names, shapes or dtypes do not fit the model.
        """
        names = [name for name, _ in self.model.named_parameters()]
        with self.ground.scope(), torch.no_grad():
            values = dict(fused_weights(names, tensors, self.cfg.model))
            optimizer_state.write_masters(self.model, values)
            self._sync_parameters()
            for name, _, master in optimizer_state.named_masters(self.model):
                if not torch.equal(master.detach().cpu(), values[name].reshape(-1).cpu()):
                    raise CheckpointError(f"The FP32 master of {name} differs from the loaded weight (is it NaN?). Check the checkpoint.")

    def _sync_parameters(self) -> None:
        optimizer_state.sync_parameters(self._optimizer, self._ddp)
        self.ground.after_parameter_sync(self.model)

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(codes float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)])`` of an FP8 parameter, as the forward uses them."""
        return self.ground.fp8_weight(parameter)

    def named_local_weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """``(megatron_name, tensor, scale_inv)``: FP8 codes with their scales, or the BF16 parameter and None.

        The tensors are the trainer's own memory; copy what must outlive the next optimizer step.
        """
        for name, parameter in self.model.named_parameters():
            if self.ground.is_fp8(parameter):
                codes, scale_inv = self.ground.fp8_weight(parameter)
                yield name, codes.detach(), scale_inv.detach()
            else:
                yield name, parameter.detach(), None

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(megatron_name, FP32 master in the parameter's shape)``, views of the optimizer's memory."""
        for name, parameter, master in optimizer_state.named_masters(self.model):
            yield name, master.detach().view(parameter.shape)

    def named_high_precision_weights(self) -> Iterator[tuple[str, torch.Tensor, None]]:
        """``(megatron_name, BF16 tensor, None)``: every master rounded to BF16, which is what the FP8 codes are quantized from."""
        for name, master in self.named_masters():
            yield name, master.to(torch.bfloat16), None

    # Forward ---------------------------------------------------------------------------------------------------------

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """FP32 logits ``[T, vocab_size]`` of a packed batch; differentiable unless called under no_grad."""
        with self.ground.scope():
            return self._logits(batch)

    def _logits(self, batch: PackedBatch) -> torch.Tensor:
        tokens = batch.token_ids.numel()
        padded = to_device(pad_packed(batch, self.ground.token_multiple), self.ground.device)
        params, positions_T = packed_layout(padded.cu_seqlens)
        self.model.rotary_pos_emb.positions_T = positions_T
        logits_1TV = self._ddp(padded.token_ids[None], positions_T[None], None, packed_seq_params=params)
        return logits_1TV[0, :tokens]

    def _stats(self, batch: PackedBatch) -> TokenStats:
        return token_stats_from_logits(
            self._logits(batch),
            batch.targets.to(self.ground.device),
            temperature=self.cfg.rollout.temperature,
            vocab_size=self.cfg.model.vocab_size,
        )

    def token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """Log-probabilities and entropies of each micro-batch; no gradient, on the engine's device."""
        with self.ground.scope(), torch.no_grad():
            return [self._stats(batch) for batch in batches]

    # Update ----------------------------------------------------------------------------------------------------------

    def set_learning_rate(self, learning_rate: float) -> None:
        """Learning rate of all parameter groups from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def train_step(self, batches: Sequence[PackedBatch], loss_fn: LossFn, denominator: float) -> StepReport:
        """Gradient of (sum of the micro-batches' loss sums) / ``denominator``, clip, one optimizer step, parameter sync.

        Metrics are the metric sums and the loss sum (``loss``) over ``denominator``. A step with a non-finite gradient is skipped:
        weights, optimizer state and ``policy_version`` stay as they are.

        Raises:
            ValueError: no micro-batch, or a denominator that is not positive and finite.
        """
        if not batches or not (math.isfinite(denominator) and denominator > 0):
            raise ValueError(f"A training step needs micro-batches and a positive denominator, not {len(batches)} and {denominator}.")
        with self.ground.scope():
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._ddp.set_is_first_microbatch()
            sums = self._accumulate_gradients(batches, loss_fn, denominator)
            metrics = {name: value / denominator for name, value in sums.items()}
            if not self._gradients_finite():
                self._optimizer.zero_grad()
                return StepReport(metrics=metrics, grad_norm=math.nan, skipped=True)
            applied, grad_norm, _ = self._optimizer.step()
            if not applied:
                return StepReport(metrics=metrics, grad_norm=float(grad_norm or math.nan), skipped=True)
            self.ground.after_parameter_sync(self.model)
        self.policy_version += 1
        return StepReport(metrics=metrics, grad_norm=float(grad_norm), skipped=False)

    def _accumulate_gradients(self, batches: Sequence[PackedBatch], loss_fn: LossFn, denominator: float) -> dict[str, float]:
        from megatron.core.distributed import finalize_model_grads

        sums: dict[str, float] = {}
        for batch in batches:
            loss_sum, metric_sums = loss_fn(self._stats(batch), to_device(batch, self.ground.device))
            (loss_sum / denominator).backward()
            for name, value in {"loss": loss_sum, **metric_sums}.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        finalize_model_grads([self._ddp], None)
        return sums

    def _gradients_finite(self) -> bool:
        buffers = [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]
        return all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in buffers)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nested dict of CPU tensors and numbers: masters, Adam state, RNG, ``policy_version``; enough for a bit-exact resume."""
        with self.ground.scope(), torch.no_grad():
            state = optimizer_state.export_state(self._optimizer, self.model)
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
                optimizer_state.import_masters(self.model, state)
            else:
                optimizer_state.import_state(self._optimizer, self.model, state)
                self.ground.set_rng_state(state["rng"])
            self._sync_parameters()
        self.policy_version = int(state["policy_version"])
