"""vLLM model loader whose parameters are the trainer's memory, set before kernels and CUDA graphs take addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from e2e_fp8.rollout.engine_layout import TensorSlot
from e2e_fp8.rollout.shared import Sharing, plan_sharing

LOAD_FORMAT = "e2e_fp8_shared"


@dataclass
class SharingRequest:
    """What the engine of this process is to share; ``outcome`` is set by the loader."""

    layout: Sequence[TensorSlot]
    delivered: Mapping[str, torch.Tensor]
    outcome: Sharing | None = None


REQUESTS: list[SharingRequest] = []
"""At most one request: the engine puts it here right before it starts vLLM in the same process."""


class SharedModelLoader(DummyModelLoader):
    """Dummy weights first, then every parameter that can be a view of the trainer's storage becomes one."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Called by vLLM after the model is built and before its weights are processed."""
        super().load_weights(model, model_config)
        request = REQUESTS.pop()
        parameters = dict(model.named_parameters())
        request.outcome = plan_sharing(request.layout, request.delivered, parameters)
        for name, view in request.outcome.views.items():
            parameters[name].data = view


def register_shared_loader() -> None:
    """Make ``load_format=e2e_fp8_shared`` known to vLLM. Safe to call more than once."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(SharedModelLoader)
