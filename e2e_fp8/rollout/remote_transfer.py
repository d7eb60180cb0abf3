"""The receiving end of weight updates inside a vLLM worker: vLLM's weight-transfer engine ``e2e_fp8``.

vLLM's verbs stay as they are: init opens a channel, start marks the weights as torn, update takes buckets, finish gives them
their version. Before a start, ``prepare_update`` (a method of the worker extension) compares the announced names, shapes and
dtypes with the model, so that an incomplete update is refused while the old weights still serve; ``weight_update`` runs several
verbs in one call.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from e2e_fp8.errors import EngineError, LayoutError
from e2e_fp8.layout import EngineParallel
from e2e_fp8.rollout.capture import capture_unquantized_cpu_routing
from e2e_fp8.rollout.engine_layout import check_delivery, check_model_type, engine_layout
from e2e_fp8.rollout.live_receipt import LiveReceipt
from e2e_fp8.rollout.rank_filling import RankFiller
from e2e_fp8.rollout.rank_layout import RankSlot, rank_layout
from e2e_fp8.rollout.shared_operators import share_operators
from e2e_fp8.rollout.weight_loading import InPlaceLoader, LayerwiseLoader, LiveParameters, Loader
from e2e_fp8.sync.buckets import UpdateManifest, UpdateStep
from e2e_fp8.sync.channels import VERSION_KEY, Receiver, open_receiver
from e2e_fp8.sync.direct import DirectReceiver
from e2e_fp8.sync.flags import EngineFlags
from e2e_fp8.sync.rank_publisher import CHANNEL
from e2e_fp8.sync.token import require_token_for_dev_routes


@dataclass
class RemoteInitInfo(WeightTransferInitInfo):
    """Channel name and its parameters, made by the sender (``e2e_fp8.sync.channels``), and the id it goes by."""

    channel: str
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class RemoteUpdateInfo(WeightTransferUpdateInfo):
    """Digest of the prepared manifest, and what the sender announces."""

    manifest: str
    update: dict[str, Any] = field(default_factory=dict)


class RemoteWeightTransferEngine(WeightTransferEngine[RemoteInitInfo, RemoteUpdateInfo]):
    """Loads complete, versioned sets of HF-named tensors from another process."""

    init_info_cls = RemoteInitInfo
    update_info_cls = RemoteUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Raises ConfigError without a token when the server's control routes are on, EngineError for a model it cannot lay out."""
        super().__init__(config, vllm_config, device, model)
        require_token_for_dev_routes()
        share_operators(model, vllm_config, device)
        hf_config = self.model_config.hf_config
        self.hf_config: dict[str, Any] = hf_config.to_dict()
        if hasattr(hf_config, "num_experts"):
            # transformers writes this field under another name than it reads it
            self.hf_config["num_experts"] = hf_config.num_experts
        check_model_type(self.hf_config, str(self.model_config.model))
        if self.parallel_config.pipeline_parallel_size > 1:
            raise EngineError("Weight updates into pipeline-parallel rollout are not implemented: use tensor or expert parallelism.")
        self.layout = engine_layout(self.hf_config)
        size, expert = self.parallel_config.tensor_parallel_size, self.parallel_config.enable_expert_parallel
        self.parallel = EngineParallel(tensor=size, expert=expert)
        self.parts: list[RankSlot] = []
        """This rank's parts of whole Hugging Face tensors."""
        self._no_parts: LayoutError | None = None
        """Why this engine cannot be filled from such; the ``ranks`` transport, which moves rows of fused matrices, may do."""
        try:
            self.parts = rank_layout(self.hf_config, get_tensor_model_parallel_rank(), size, expert=expert)
        except LayoutError as error:
            self._no_parts = error
        self.in_place = self.device.type == "cuda" and self.hf_config.get("quantization_config") is not None
        """Whether live parameters have the checkpoint's layout; elsewhere vLLM repacks them and its reload is used."""
        self.policy_version: int | None = self.hf_config.get(VERSION_KEY)
        self.refusal = ""
        """Why the weights must not be used; empty when they may."""
        if vllm_config.load_config.load_format == "dummy":
            self.refusal = "the rollout server has no weights yet: publish a policy version"
        self._parameters = LiveParameters(model)
        self._loader: Loader = InPlaceLoader(self._parameters, self.parts) if self.in_place else LayerwiseLoader(model, self.model_config)
        self._receiver: Receiver | RankFiller | None = None
        self._channel = ""
        self._flags: EngineFlags | None = None
        self._prepared: UpdateManifest | None = None
        self._manifest: UpdateManifest | None = None
        self._pending: set[int] = set()
        self._captures = False
        self._receipt = LiveReceipt(self.parts, self._parameters, self._live_now, in_place=self.in_place)

    def init_transfer_engine(self, init_info: RemoteInitInfo) -> None:
        self._close_receiver()
        self._capture_routing()
        rank = self._rank
        if init_info.channel == CHANNEL:
            receiver = RankFiller(init_info.parameters, self.hf_config, self.parallel, rank, self.device)
            receiver.look(self._live_now(), all_in_place=self.in_place)
        elif self._no_parts is not None:
            raise self._no_parts
        else:
            receiver = open_receiver(init_info.channel, init_info.parameters, rank=1 + rank, device=self.device)
        if isinstance(receiver, DirectReceiver) and self._prepared is not None:
            # Refused here, a malformed place leaves the old weights in service.
            receiver.expect(self._prepared)
        self._receiver = receiver
        self._channel = init_info.id

    @property
    def _rank(self) -> int:
        """Of all ranks of the engine."""
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def open_flags(self, description: dict[str, Any]) -> None:
        """Open a trainer's flags (``TrainerFlags.describe``) in the place of others. Raises EngineError on another host."""
        self._close_flags()
        self._flags = EngineFlags(description, self._rank)

    @property
    def has_channel(self) -> bool:
        """Whether a sender's channel is open at this rank."""
        return self._receiver is not None

    def _capture_routing(self) -> None:
        """Once the server is up, and with it vLLM's recorder of routed experts."""
        if self._captures or self.device.type != "cpu" or not self.model_config.enable_return_routed_experts:
            return
        capture_unquantized_cpu_routing(self.model)
        self._captures = True

    def prepare(self, manifest: UpdateManifest) -> None:
        """Accept ``manifest`` as the next update, ending an earlier one that was left halfway.

        Raises EngineError unless its names, shapes and dtypes are exactly the model's; nothing is changed then.
        """
        check_delivery(self.layout, {spec.name: (spec.dtype, spec.shape) for spec in manifest.specs()})
        self._prepared = manifest
        self._accept(manifest)

    def is_prepared(self, step: UpdateStep) -> bool:
        """Whether the step may be done: these tensors were accepted before, the open channel and flags are this sender's."""
        if step.flags and (self._flags is None or self._flags.id != step.flags):
            return False
        return self._prepared is not None and self._prepared.layout_digest == step.layout and self._channel == step.channel

    def begin(self, policy_version: int, *, sealed: bool = False) -> None:
        """Accept the tensors of the last :meth:`prepare` once more, as another update; ``sealed`` if all of it comes in one call and its
        receipt is asked for then."""
        assert self._prepared is not None
        self._accept(self._prepared.at_version(policy_version), sealed=sealed)

    def wait_for_word(self, step: UpdateStep) -> str:
        """After :meth:`begin` of an announced update: empty once the trainer says go, otherwise why nothing of it is to be written."""
        assert self._flags is not None
        self._loader.look()
        refusal = self._flags.wait(step.turn, step.patience_s, soon=self._take_the_gpu)
        if refusal:
            self._manifest, self._pending = None, set()
        return refusal

    def _take_the_gpu(self) -> None:
        """Have a GPU that has worked for the trainer's process, which may be its own too, work for this one before bytes are ready: the
        first piece of work after a change waits a fifth of a millisecond."""
        if self.device.type == "cuda":
            with suppress(torch.OutOfMemoryError):
                torch.zeros(1, device=self.device)
                torch.cuda.current_stream(self.device).synchronize()

    def tell(self, step: UpdateStep, *, done: bool) -> None:
        """Tell the trainer of an announced update that this rank holds all of it, or never will."""
        if step.flags and self._flags is not None:
            (self._flags.done if done else self._flags.failed)(step.turn)

    def _accept(self, manifest: UpdateManifest, *, sealed: bool = False) -> None:
        self._loader.abandon()
        self._manifest, self._pending = manifest, set(range(len(manifest.buckets)))
        self._receipt.begin(manifest if sealed and not isinstance(self._receiver, RankFiller) else None)

    def start_weight_update(self) -> None:
        if self._manifest is None or self._receiver is None:
            raise EngineError("Weight update refused, nothing was written: call prepare_update and init_weight_transfer_engine first.")
        version = self._manifest.policy_version
        if isinstance(self._receiver, RankFiller):
            self._receiver.look(self._live_now(), all_in_place=self.in_place)
        self.policy_version = None
        self.refusal = f"the update to policy version {version} began and has not finished: its trainer must publish again"
        self._loader.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, but only what writes weights is waited for, not digests that are read of them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def receive_weights(self, update_info: RemoteUpdateInfo) -> None:
        manifest = self._manifest
        if manifest is None or self._receiver is None or update_info.manifest != manifest.digest:
            raise EngineError("Weights arrived that belong to no prepared update; publish again.")
        if isinstance(self._receiver, RankFiller):
            self._receiver.fill(int(update_info.update["turn"]), manifest.policy_version, self._loader)
            self._pending.clear()
            return
        for index, tensors in self._receiver.receive(update_info.update, manifest, self._loader.placed):
            if index not in self._pending:
                raise EngineError(f"Bucket {index} of policy version {manifest.policy_version} came twice; publish again.")
            self._loader.load(tensors, reusable=self._receiver.reusable)
            self._receipt.written(index, tensors)
            self._pending.discard(index)

    def finish_weight_update(self) -> None:
        assert self._manifest is not None
        if self._pending:
            missing = [spec.name for index in sorted(self._pending) for spec in self._manifest.buckets[index]]
            raise EngineError(f"{len(missing)} announced tensors never came, {missing[:4]} among them; publish again.")
        self._loader.finish()
        self.policy_version, self.refusal = self._manifest.policy_version, ""
        self._manifest = None

    def receipt(self, known: Collection[str]) -> dict[str, Any]:
        """Digest of every part this rank can show, see :meth:`LiveReceipt.full`; with the ``ranks`` transport instead ``pieces``, see
        :meth:`RankFiller.receipt`."""
        if isinstance(self._receiver, RankFiller):
            return {"pieces": self._receiver.receipt(self._live_now(), all_in_place=self.in_place)}
        return self._receipt.full(known)

    def begin_receipt(self) -> None:
        """Begin to read what :meth:`sealed_receipt` tells of, and wait for nothing."""
        if not isinstance(self._receiver, RankFiller):
            self._receipt.begin_reading()

    def sealed_receipt(self) -> dict[str, Any]:
        """The same digests as one, see :meth:`LiveReceipt.sealed`; with the ``ranks`` transport as :meth:`receipt`."""
        return self.receipt(()) if isinstance(self._receiver, RankFiller) else self._receipt.sealed()

    def _live_now(self) -> dict[str, torch.Tensor]:
        """The model's parameters; a reload gives layers other ones, under other names too."""
        return self._parameters.named() if self.in_place else dict(self.model.named_parameters())

    def close_channel(self, channel: str) -> None:
        """Close the channel that goes by this id, if it is still the open one."""
        if channel and channel == self._channel:
            self._close_receiver()

    def _close_receiver(self) -> None:
        self._channel = ""
        self._loader.forget()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _close_flags(self) -> None:
        if self._flags is not None:
            self._flags.close()
            self._flags = None

    def shutdown(self) -> None:
        self._close_receiver()
        self._close_flags()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("use e2e_fp8.sync.publisher.WeightPublisher in the trainer's process")
