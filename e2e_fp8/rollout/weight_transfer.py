"""Delivery of weights into a live vLLM model: no disk and no requantization on the ``local`` path.

The trainer side puts tensors into :data:`MAILBOX` under a fresh token and calls vLLM's weight-update calls with that
token; the engine side, in the same process, loads them by vLLM's layerwise reload, which keeps the storage of every
parameter (so captured CUDA graphs stay valid) and copies bytes as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, _place_kernel_tensors, get_layerwise_info

from e2e_fp8.rollout.shared_operators import share_operators

BACKEND = "e2e_fp8_local"
"""Name under which the in-process engine is registered with vLLM's ``WeightTransferEngineFactory``."""
REMOTE_BACKEND = "e2e_fp8"
"""Name of the engine that takes weights from another process (:mod:`e2e_fp8.rollout.remote_transfer`)."""

MAILBOX: dict[str, Iterable[tuple[str, torch.Tensor]]] = {}
"""Token -> (HF name, tensor) pairs waiting to be loaded; each token is taken once."""

_tokens = count()


def post(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Put (HF name, tensor) pairs into the mailbox and return the token that fetches them."""
    token = f"update-{next(_tokens)}"
    MAILBOX[token] = tensors
    return token


def discard(token: str) -> None:
    """Drop what a failed update left in the mailbox, so that it keeps no tensors alive."""
    MAILBOX.pop(token, None)


def abandon_layerwise_reload(model: torch.nn.Module) -> None:
    """Give every layer that a failed update left unfinished its own tensors back, with the bytes they had, and forget what was buffered.

    vLLM has no call for this. Without it the next update counts the tensors that the failed one had buffered as its own,
    finishes such layers before all their tensors came, and says nothing.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def safetensors_files(directory: Path) -> list[Path]:
    """All ``*.safetensors`` files of ``directory``, by name."""
    return sorted(directory.glob("*.safetensors"))


def read_directory(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every safetensors file of ``directory``, one in memory at a time."""
    for path in safetensors_files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, file.get_tensor(name)


@dataclass
class LocalInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: both ends share the process."""


@dataclass
class LocalUpdateInfo(WeightTransferUpdateInfo):
    """Exactly one of the two is set: a mailbox token, or a directory of safetensors files."""

    token: str = ""
    directory: str = ""


class LocalWeightTransferEngine(WeightTransferEngine[LocalInitInfo, LocalUpdateInfo]):
    """Loads complete sets of HF-named tensors from the mailbox or from a directory."""

    init_info_cls = LocalInitInfo
    update_info_cls = LocalUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # vLLM makes this object as soon as the model is loaded, in whichever process that is.
        share_operators(model, vllm_config, device)

    def init_transfer_engine(self, init_info: LocalInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LocalUpdateInfo) -> None:
        if bool(update_info.token) == bool(update_info.directory):
            raise ValueError(f"exactly one of token and directory must be given, got {update_info}")
        if update_info.token:
            self.model.load_weights(iter(MAILBOX.pop(update_info.token)))  # type: ignore[operator]
        else:
            self.model.load_weights(read_directory(Path(update_info.directory)))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        MAILBOX.clear()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("the trainer shares the process: use e2e_fp8.rollout.engine.VllmEngine.update_weights")
