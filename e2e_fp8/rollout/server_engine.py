"""vLLM behind HTTP: the rollout engine of :class:`e2e_fp8.protocols.RolloutEngine` in processes of its own."""

import asyncio
import base64
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy
import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.agreement import check_agreement
from e2e_fp8.rollout.engine_args import engine_args
from e2e_fp8.rollout.engine_layout import read_hf_config
from e2e_fp8.rollout.environment import apply_environment, rollout_environment
from e2e_fp8.rollout.sampling import check_prompts, finished_sample, request_seed, split_record
from e2e_fp8.rollout.server_process import ServerProcess, server_flags
from e2e_fp8.sync.channels import WriteFolder
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.publish_report import PublishReport
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.sync.token import read_token
from e2e_fp8.types import ExportedTensor, Prompt, Sample

_LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TRAINERS_ALONE = ("CUDA_DEVICE_MAX_CONNECTIONS",)
"""What Megatron-Core wants: one hardware queue for all streams, in which an engine's copies, messages and digests wait for each other."""
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_ROUTE = "/inference/v1/generate"


class ServerEngine:
    """One vLLM server, started here or found at ``rollout.server_url``; weights arrive over ``sync.transport``.

    ``model_dir`` holds config.json and needs no weights. ``write_folder`` writes the checkpoints of the disk transport. Before
    anything else, the workers' plan, device and switches are compared with the trainer's (:mod:`e2e_fp8.rollout.agreement`).
    """

    def __init__(
        self,
        cfg: Config,
        model_dir: Path,
        eos_token_id: int,
        decode: Callable[[Sequence[int]], str],
        write_folder: WriteFolder,
    ) -> None:
        """Raises ConfigError for contradictory settings, EngineError when the server does not come up or disagrees."""
        self.cfg = cfg
        self.device = cfg.run.backend if cfg.run.backend != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        apply_environment(cfg, device=self.device)
        self.hf_config = read_hf_config(model_dir)
        self.policy_version: int | None = None
        """Version of the weights delivered last; None before the first delivery."""
        self.prefix_cache_hit_rate: float | None = None
        """Of the last ``generate``; None when the server was started without ``--enable-prompt-tokens-details``."""
        self.eos_token_id, self.decode = eos_token_id, decode
        self.process = self._start(model_dir) if cfg.rollout.server_url is None else None
        try:
            url, token = (self.process.url, self.process.token) if self.process else (str(cfg.rollout.server_url), read_token())
            self.publisher: WeightPublisher | None = None
            """Takes whole tensors; None with the ``ranks`` transport, where trainer ranks send their shares through :attr:`control`."""
            if cfg.sync.transport == "ranks":
                self.control = UpdateControl(url, token, timeout_s=cfg.rollout.timeout_s)
            else:
                self.publisher = self._whole_tensors(url, token, model_dir, write_folder)
                self.control = self.publisher.control
            check_agreement(cfg, self.control.workers)
        except BaseException:
            self.close()
            raise
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}

    def _whole_tensors(self, url: str, token: str, model_dir: Path, write_folder: WriteFolder) -> WeightPublisher:
        cfg = self.cfg
        return WeightPublisher(
            url,
            token,
            transport=cfg.sync.transport,
            device=torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu"),
            timeout_s=cfg.rollout.timeout_s,
            max_bucket_bytes=cfg.sync.max_bucket_mib << 20,
            ipc_buckets=cfg.sync.ipc_buckets or None,
            folder=model_dir.parent / "sync",
            write_folder=write_folder,
        )

    def _start(self, model_dir: Path) -> ServerProcess:
        is_moe = self.hf_config["model_type"] == "qwen3_moe"
        args = engine_args(self.cfg, model_dir, device=self.device, is_moe=is_moe, fp8="quantization_config" in self.hf_config)
        environ = dict(os.environ) | rollout_environment(self.cfg, device=self.device)
        # The launcher's variables describe the trainer's ranks, and the server makes its own.
        for name in [n for n in environ if n in (*_LAUNCHER_VARIABLES, *_TRAINERS_ALONE) or n.startswith(_LAUNCHER_PREFIXES)]:
            del environ[name]
        # The log is only read when the server fails, and then it should say why.
        environ["VLLM_LOGGING_LEVEL"] = "INFO"
        if self.cfg.rollout.server_devices is not None:
            environ["CUDA_VISIBLE_DEVICES"] = self.cfg.rollout.server_devices
        return ServerProcess(server_flags(args), environ, model_dir.parent / "server", timeout_s=max(self.cfg.rollout.timeout_s, 600.0))

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]:
        """``group_size`` samples for each prompt, in prompt order; ``group_id`` is the prompt's index in ``prompts``.

        Raises ByteMismatchError when the last :meth:`publish` let generation begin before bytes were compared, and they differ.

        Sample j of prompt i is drawn from its own generator, seeded by (``seed``, i, j). Text after a stop string is cut at the
        token that completes it. Raises DataError for a prompt that does not fit the window, EngineError when the server dies,
        refuses, exceeds ``rollout.timeout_s``, or answers from another policy version than the one delivered here.
        """
        if self.policy_version is None:
            raise EngineError("The rollout engine has no weights yet: call update_weights before generate.")
        rollout = self.cfg.rollout
        check_prompts(
            prompts,
            window=rollout.max_model_len,
            max_response_tokens=rollout.max_response_tokens,
            vocab_size=self.hf_config["vocab_size"],
        )
        requests = [
            self._request(prompt, request_seed(seed, index, member)) for index, prompt in enumerate(prompts) for member in range(group_size)
        ]
        try:
            answers = asyncio.run(asyncio.wait_for(self._send_all(requests), rollout.timeout_s))
        except TimeoutError as error:
            raise EngineError(
                f"The rollout server did not finish {len(prompts)} x {group_size} samples within {rollout.timeout_s:g} s: raise "
                f"rollout.timeout_s or look at its log.{self._told()}"
            ) from error
        except EngineError:
            if self.publisher is not None:
                # a refusal may be because of bytes, which has names
                self.publisher.settle()
            raise
        except aiohttp.ClientError as error:
            raise EngineError(f"The rollout server {self._url} broke off during generation ({error}).{self._told()}") from error
        samples = [self._sample(prompts[i // group_size], i // group_size, answer) for i, answer in enumerate(answers)]
        self.prefix_cache_hit_rate = _hit_rate(samples)
        return samples

    def _told(self) -> str:
        """The dead server's own error, to be appended to a sentence."""
        if self.process is None or self.process.is_alive():
            return ""
        return f" It ended with: {self.process.last_words()}"

    def _request(self, prompt: Prompt, seed: int) -> dict[str, Any]:
        rollout = self.cfg.rollout
        params = {
            "temperature": rollout.temperature,
            "max_tokens": rollout.max_response_tokens,
            "stop_token_ids": [self.eos_token_id],
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
        }
        return {"token_ids": list(prompt.token_ids), "sampling_params": params}

    async def _send_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The server queues what it cannot run, so every request may be under way; its own limit is rollout.max_num_seqs.
        connector = aiohttp.TCPConnector(limit=max(1024, self.cfg.rollout.max_num_seqs))
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout, headers=self._headers) as session:
            return await asyncio.gather(*(self._send(session, request) for request in requests))

    async def _send(self, session: aiohttp.ClientSession, request: dict[str, Any]) -> dict[str, Any]:
        async with session.post(_ROUTE, json=request) as response:
            body = await response.json(content_type=None)
            if response.status != 200:
                message = body.get("error", body) if isinstance(body, dict) else body
                sentence = message.get("message", message) if isinstance(message, dict) else message
                raise EngineError(f"The rollout server refused to generate ({response.status}): {sentence}")
            version = response.headers.get("x-policy-version")
            if version != str(self.policy_version):
                raise EngineError(
                    f"The rollout server answered from policy version {version}, but {self.policy_version} was delivered here: another "
                    "trainer publishes to it; give each run its own server."
                )
            return body

    def _sample(self, prompt: Prompt, group_id: int, answer: dict[str, Any]) -> Sample:
        choice = answer["choices"][0]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        token_ids = tuple(choice["token_ids"])
        log_probs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        if len(log_probs) != len(token_ids):
            raise EngineError(f"The rollout server returned {len(log_probs)} log-probs for {len(token_ids)} tokens of {prompt.uid!r}.")
        encoded = choice["routed_experts"]
        record = None if encoded is None else numpy.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        routed_experts, routed_weights = split_record(record, self.hf_config["num_hidden_layers"])
        assert self.policy_version is not None
        return finished_sample(
            prompt,
            group_id=group_id,
            token_ids=token_ids,
            log_probs=log_probs,
            finish_reason=choice["finish_reason"],
            routed_experts=routed_experts,
            routed_weights=routed_weights,
            cached_tokens=details.get("cached_tokens"),
            policy_version=self.policy_version,
            stop=self.cfg.rollout.stop,
            eos_token_id=self.eos_token_id,
            decode=self.decode,
        )

    def publish(
        self, tensors: Iterable[ExportedTensor], *, policy_version: int, receipt: bool, before: str = "generation"
    ) -> PublishReport:
        """Deliver a complete set of weights, and with ``receipt`` compare bytes at every rank, ``before`` generation goes on or answers do;
        see :meth:`WeightPublisher.publish`.

        Raises EngineError when the server refuses or dies, ByteMismatchError when its bytes are not the given ones.
        """
        publisher = self.publisher
        if publisher is None:
            raise EngineError("sync.transport is ranks, which takes no whole tensors: use orchestration.weight_sync.publish_weights.")

        def deliver() -> PublishReport:
            return publisher.publish(tensors, policy_version=policy_version, receipt=receipt, before=before)

        return self.delivered(deliver, policy_version)

    def arm(self, policy_version: int, *, receipt: bool, before: str = "generation") -> bool:
        """Announce the next :meth:`publish`, of the same tensors; see :meth:`WeightPublisher.arm`. Nothing generates until then."""
        return self.publisher is not None and self.publisher.arm(policy_version, receipt=receipt, before=before)

    def disarm(self) -> None:
        """Take back what :meth:`arm` announced, if it did; see :meth:`WeightPublisher.disarm`."""
        if self.publisher is not None:
            self.publisher.disarm()

    def delivered(self, deliver: Callable[[], PublishReport], policy_version: int) -> PublishReport:
        """Run ``deliver``, which brings ``policy_version`` into the server, and serve that version from then on; its errors."""
        self.policy_version = None
        try:
            report = deliver()
        except EngineError as error:
            if told := self._told():
                raise EngineError(f"{error}{told}") from error
            # A refusal before anything was written leaves the old version in service.
            with suppress(EngineError):
                self.policy_version = self.control.policy_version()
            raise
        self.policy_version = policy_version
        return report

    def update_weights(self, tensors: Iterator[ExportedTensor], *, policy_version: int) -> int:
        """Deliver a complete set of weights and compare bytes; see :meth:`publish`. Returns the bytes moved."""
        return self.publish(tensors, policy_version=policy_version, receipt=True).num_bytes

    def sleep(self) -> None:
        """Nothing: rollout.sleep_level above 0 is refused with a server."""

    def close(self) -> None:
        """Release buffers and end the server that was started here; a server given by URL keeps running."""
        if publisher := getattr(self, "publisher", None):
            publisher.close()
        elif control := getattr(self, "control", None):
            control.close_channel()
            control.client.close()
        if self.process is not None:
            self.process.close()
            self.process = None


def _hit_rate(samples: Sequence[Sample]) -> float | None:
    """Share of the prompts' tokens that came from the prefix cache; None where an answer does not say."""
    cached = [s.cached_tokens for s in samples if s.cached_tokens is not None]
    if len(cached) < len(samples) or not samples:
        return None
    return sum(cached) / max(1, sum(len(s.prompt.token_ids) for s in samples))
