"""Methods that ``--worker-extension-cls`` adds to every vLLM worker, called by name through ``/collective_rpc``.

Each answers with a JSON object; a mistake of the caller is ``{"error": sentence}``, because vLLM turns exceptions of workers
into stack traces on the way.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from e2e_fp8.errors import UserError
from e2e_fp8.rollout.agreement import worker_facts
from e2e_fp8.rollout.remote_transfer import RemoteWeightTransferEngine
from e2e_fp8.sync.buckets import UpdateManifest, UpdateStep


class WorkerExtension:
    """Preparation, state and proof of weight updates. Needs ``--weight-transfer-config '{"backend": "e2e_fp8"}'``."""

    weight_transfer_engine: Any
    device: torch.device
    vllm_config: Any
    _weight_update_active: bool
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def prepare_update(self, manifest: str) -> dict[str, Any]:
        """Check an ``UpdateManifest`` in JSON against the model; ends an update that was left halfway.

        ``has_channel``: whether an earlier ``init_weight_transfer_engine`` still holds.
        """
        try:
            transfer = _transfer(self)
            transfer.prepare(UpdateManifest.from_json(manifest))
        except UserError as error:
            return {"error": str(error)}
        self._weight_update_active = False
        transfer.reset_weight_update_target()
        return {"has_channel": transfer.has_channel}

    def weight_update(self, step: str) -> dict[str, Any]:
        """vLLM's verbs start, update and finish in one call, as an ``UpdateStep`` in JSON says; ``seconds`` it took here.

        A call that finishes the update also says ``state``, see :meth:`weight_state`; where the step asks for a receipt, ``table`` and
        ``seal`` as of :meth:`LiveReceipt.sealed` and ``receipt_seconds``, which are not part of ``seconds``; with ``resume`` they are
        only begun, for :meth:`sealed_receipt`.
        ``unprepared``: nothing was done, because these tensors or this channel are not known; call ``prepare_update`` and
        ``init_weight_transfer_engine`` first. A step with ``flags`` waits for the trainer's word before anything is marked or written;
        ``disarmed`` says why it did not come. ``error``: a sentence, with ``untouched`` whether whole weights are what they were.
        """
        before = self.weight_state()
        try:
            transfer, wanted = _transfer(self), UpdateStep.from_json(step)
            if not transfer.is_prepared(wanted):
                return {"unprepared": True}
            if wanted.begin:
                self._weight_update_active = False
                transfer.reset_weight_update_target()
                transfer.begin(wanted.policy_version, sealed=wanted.finish and wanted.receipt)
                if wanted.flags and (refusal := transfer.wait_for_word(wanted)):
                    return {"disarmed": refusal}
            started = time.perf_counter()
            self._written(wanted)
            if not wanted.finish:
                return {"seconds": time.perf_counter() - started}
            finished = time.perf_counter()
            answer: dict[str, Any] = {"seconds": finished - started, "state": self.weight_state()}
            if wanted.receipt and wanted.resume:
                transfer.begin_receipt()
            elif wanted.receipt:
                answer |= transfer.sealed_receipt()
                answer["receipt_seconds"] = time.perf_counter() - finished
        except UserError as error:
            return {"error": str(error), "untouched": not before["refusal"] and self.weight_state() == before}
        return answer

    def _written(self, step: UpdateStep) -> None:
        transfer = _transfer(self)
        try:
            if step.begin:
                self.start_weight_update()
            self.update_weights({"manifest": step.update_digest, "update": step.update})
            if step.finish:
                self.finish_weight_update()
        except BaseException:
            transfer.tell(step, done=False)
            raise
        transfer.tell(step, done=True)

    def open_flags(self, description: str) -> dict[str, Any]:
        """Open a trainer's flags, ``TrainerFlags.describe`` in JSON; ``refusal``: why this rank cannot, empty when it has."""
        try:
            _transfer(self).open_flags(json.loads(description))
        except (UserError, ValueError) as error:
            return {"refusal": str(error)}
        return {"refusal": ""}

    def close_channel(self, channel: str) -> dict[str, Any]:
        """Let go of a trainer's memory or process group; nothing when another channel has taken its place."""
        _transfer(self).close_channel(channel)
        return {}

    def weight_state(self) -> dict[str, Any]:
        """``policy_version`` (None when torn or unknown) and ``refusal``, why generation must not run (empty when it may)."""
        transfer = _transfer(self)
        return {"policy_version": transfer.policy_version, "refusal": transfer.refusal}

    def refuse_generation(self, reason: str) -> dict[str, Any]:
        """Mark the weights as unusable until the next finished update."""
        transfer = _transfer(self)
        transfer.policy_version, transfer.refusal = None, reason
        return {}

    def receipt(self, known: str = "[]") -> dict[str, Any]:
        """Digests of this rank's live bytes, see :meth:`RemoteWeightTransferEngine.receipt`; ``known``: JSON list of tables that
        the caller has."""
        try:
            return _transfer(self).receipt(json.loads(known))
        except (UserError, ValueError) as error:
            return {"error": str(error)}

    def sealed_receipt(self) -> dict[str, Any]:
        """``table`` and ``seal`` of this rank's live bytes, which the last update may have begun to read."""
        try:
            return _transfer(self).sealed_receipt()
        except UserError as error:
            return {"error": str(error)}

    def describe_worker(self) -> dict[str, Any]:
        """What this worker computes with: see :func:`e2e_fp8.rollout.agreement.worker_facts`."""
        transfer = _transfer(self)
        return worker_facts(transfer.model, self.vllm_config, self.device) | {
            "in_place": transfer.in_place,
            "policy_version": transfer.policy_version,
        }


def _transfer(worker: WorkerExtension) -> RemoteWeightTransferEngine:
    transfer = worker.weight_transfer_engine
    if not isinstance(transfer, RemoteWeightTransferEngine):
        raise RuntimeError('start vLLM with --weight-transfer-config \'{"backend": "e2e_fp8"}\' to use this worker extension')
    return transfer
