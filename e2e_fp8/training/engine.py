"""The policy: Megatron-Core on the CPU or on a GPU through one code path, with log-probabilities of tokens."""

from collections.abc import Mapping, Sequence

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.training import optimizer_state
from e2e_fp8.training.log_probs import token_stats_from_logits
from e2e_fp8.training.megatron_model import MegatronModel
from e2e_fp8.training.parallel import tensor_group
from e2e_fp8.training.weights import check_weights, import_safetensors, initial_hf_weights, local_weight
from e2e_fp8.types import PackedBatch, TokenStats


class MegatronEngine(MegatronModel[TokenStats]):
    """Megatron-Core training of one policy (``e2e_fp8.protocols.TrainEngine`` without the export, which orchestration adds).

    A new engine holds the weights of ``model.hf_path``, or fresh ones from ``run.seed``.

    Raises:
        ConfigError: the configuration asks for something the trainer does not do, or a linear would run in another precision.
        CheckpointError: the weights of ``model.hf_path`` are damaged or do not fit.
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        source = cfg.model.hf_path
        self.load_hf_weights(initial_hf_weights(cfg.model, cfg.run.seed) if source is None else import_safetensors(source))

    def load_hf_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the FP32 masters to the given HF-named weights, exactly, and the model parameters from them.

        Every rank takes its share of every tensor. Collective.

        Raises:
            CheckpointError: names, shapes or dtypes do not fit the model.
        """
        check_weights(tensors, self.cfg.model)
        self._load(lambda parameter: local_weight(parameter.layout, tensors))

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """FP32 logits ``[T, V]`` of a packed batch, V this rank's columns of the vocabulary; differentiable unless under no_grad.

        With context parallelism collective, and of all tokens on every rank.

        Raises:
            ConfigError: the layers are divided over a pipeline.
        """
        if self.grid.pipeline > 1:
            raise ConfigError("training.parallel.pipeline is above 1: logits of one batch need a whole model in each process.")
        with self.ground.scope():
            return self._whole(self._forward(self._wrapped[0], batch)[0], batch)

    def _read(self, output: torch.Tensor, batch: PackedBatch) -> TokenStats:
        if self.context is None:
            return self._stats_of(output[0, : batch.token_ids.numel()], batch.targets.to(self.ground.device))
        tokens = output.size(1) * self.context.size
        targets = torch.nn.functional.pad(batch.targets, (0, tokens - batch.targets.numel()))[self.context.rows(tokens)]
        stats = self._stats_of(output[0], targets.to(self.ground.device))
        log_probs, entropy = self._whole(torch.stack([stats.log_probs, stats.entropy], dim=1), batch).unbind(1)
        return TokenStats(log_probs=log_probs, entropy=entropy)

    def _stats_of(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> TokenStats:
        return token_stats_from_logits(
            logits_TV,
            targets_T,
            temperature=self.cfg.rollout.temperature,
            vocab_size=self.cfg.model.vocab_size,
            group=tensor_group() if self.grid.tensor > 1 else None,
            engine_temperature=self._choices["temperature"] != "native",
            engine_log_softmax=self._choices["log_softmax"] != "native",
        )

    def token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """Log-probabilities and entropies of each micro-batch; no gradient, on the engine's device.

        Each data-parallel rank brings its own micro-batches; tensor and pipeline ranks bring the same. Collective.
        """

        def read(output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
            stats = self._read(output, batch)
            return torch.stack([stats.log_probs, stats.entropy])

        return [TokenStats(log_probs=found[0], entropy=found[1]) for found in self._per_token(batches, read, 2)]

    def high_precision_token_stats(self, batches: Sequence[PackedBatch]) -> list[TokenStats]:
        """``token_stats`` of the same weights with BF16 linears on bf16(FP32 master): what training in BF16 would see. Collective."""
        parameter_of = {id(parameter.weight): parameter for parameter in self._parameters}

        def master_of(weight: torch.Tensor) -> torch.Tensor:
            return next(optimizer_state.whole_masters(self._masters, [parameter_of[id(weight)]]))[1]

        with self.ground.high_precision(self.chunks, master_of):
            # this rank's own: a driving engine's token_stats would order the others to run theirs in FP8
            return MegatronEngine.token_stats(self, batches)
