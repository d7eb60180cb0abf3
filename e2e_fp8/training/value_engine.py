"""The critic: a second Megatron model of the policy's sizes, with one FP32 value per token instead of logits.

Two models of one process share torch.distributed and Megatron's groups, so the critic has the policy's parallel sizes.
"""

from collections.abc import Iterable, Sequence

import torch

from e2e_fp8.config.critic import critic_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError
from e2e_fp8.layout import VALUE_HEAD, ShardedParameter, value_model_shards
from e2e_fp8.training.megatron_model import MegatronModel
from e2e_fp8.training.parallel import Parameter
from e2e_fp8.training.weights import check_weights, import_safetensors, local_weight
from e2e_fp8.types import PackedBatch


class ValueEngine(MegatronModel[torch.Tensor]):
    """Megatron-Core training of a value model, set up by ``objective.critic``; loss functions see values, float32 ``[T]``.

    A new engine holds the weights of ``objective.critic.hf_path`` if that is set, else nothing: give it those of a policy
    (``start_from``) or a saved state.

    Raises:
        ConfigError: the configuration asks for something the trainer does not do.
        CheckpointError: the weights of ``objective.critic.hf_path`` are damaged or do not fit the policy's sizes.
    """

    value_head = True

    def __init__(self, cfg: Config) -> None:
        super().__init__(critic_config(cfg))
        if self.cfg.model.hf_path is not None:
            self._load_hf(self.cfg.model.hf_path)

    def layout_of(self, rank: int) -> list[ShardedParameter]:
        """What any rank of this job holds of each Hugging Face tensor."""
        return value_model_shards(super().layout_of(rank), self.cfg.model.hidden_size)

    def _load_hf(self, path: str) -> None:
        tensors = import_safetensors(path)
        head = tensors.pop(VALUE_HEAD, torch.zeros(1, self.cfg.model.hidden_size))
        if tuple(head.shape) != (1, self.cfg.model.hidden_size):
            raise CheckpointError(
                f"objective.critic.hf_path: {VALUE_HEAD} has shape {tuple(head.shape)}, but a critic has one value per token and needs "
                f"{(1, self.cfg.model.hidden_size)}. Use another checkpoint, or remove that tensor to start from a head of zeros."
            )
        # a policy's checkpoint may have an output head, a reward model's has none: a tied model takes either and reads neither
        body = self.cfg.model.model_copy(update={"tie_word_embeddings": True})
        check_weights(tensors, body)
        self._load(lambda parameter: local_weight(parameter.layout, tensors | {VALUE_HEAD: head}))

    def start_from(self, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a policy's weights (``MegatronEngine.named_masters`` of the same sizes) and a head of zeros.

        Values are then 0 everywhere, and GAE's advantages the reward-to-go. Collective.
        """
        policy = dict(masters)

        def weight_of(parameter: Parameter) -> torch.Tensor:
            if parameter.layout.kind == "value_head":
                return torch.zeros(parameter.layout.shape, device=self.device)
            return policy[parameter.name]

        self._load(weight_of)

    def _read(self, output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        return self._whole(output[0, :, 0], batch)

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Value of the tokens up to each position, float32 ``[T]`` for each micro-batch; no gradient, on the engine's device.

        Collective.
        """
        return [found[0] for found in self._per_token(batches, lambda output, batch: self._read(output, batch)[None], 1)]
