"""vLLM in the trainer's process, on CPU or CUDA: the rollout engine of :class:`e2e_fp8.protocols.RolloutEngine`."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.delivery import Deliveries, Delivery
from e2e_fp8.rollout.engine_args import engine_args
from e2e_fp8.rollout.engine_layout import TensorSlot, check_delivery, engine_layout, read_hf_config
from e2e_fp8.rollout.engine_thread import EngineThread
from e2e_fp8.rollout.environment import apply_environment
from e2e_fp8.rollout.rank_layout import rank_layout
from e2e_fp8.rollout.sampling import check_prompts, finished_sample, request_seed, split_record
from e2e_fp8.rollout.weight_loading import InPlaceLoader, LiveParameters
from e2e_fp8.types import ExportedTensor, Prompt, Sample


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Undo what starting vLLM does to its host process, which is the trainer's.

    It seeds Python's and numpy's generators (torch's are kept by the engine's thread), and its CPU worker replaces
    ``torch.set_num_threads`` by a function that only warns.
    """
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class VllmEngine:
    """One in-process vLLM engine.

    ``model_dir`` holds config.json (with ``quantization_config`` for FP8 rollout) and needs no weights: they are random
    until the first :meth:`update_weights`, and :meth:`generate` refuses to run before it. All calls into vLLM are made by one
    thread and timed against ``rollout.timeout_s``.
    """

    def __init__(self, cfg: Config, model_dir: Path, eos_token_id: int, decode: Callable[[Sequence[int]], str]) -> None:
        """Start vLLM. Raises ConfigError for contradictory settings, EngineError when vLLM or the plugin does not come up."""
        self.cfg = cfg
        self.device = cfg.run.backend if cfg.run.backend != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        apply_environment(cfg, device=self.device)
        self.hf_config = read_hf_config(model_dir)
        self.layout = engine_layout(self.hf_config)
        self.policy_version: int | None = None
        """Version of the weights delivered last; None before the first delivery and after one that stopped half-way."""
        self.prefix_cache_hit_rate: float | None = None
        """Share of the prompt tokens of the last generation that came from the prefix cache; None before the first."""
        self._refusal = "The rollout engine has no weights yet: call update_weights before generate."
        self.eos_token_id = eos_token_id
        self.decode = decode
        self._requests = 0
        self._asleep = False
        self._thread = EngineThread()
        self._shown: tuple[Any, tuple[ExportedTensor, ...]] = (None, ())
        self.deliveries = Deliveries(self.layout, self.is_in_place)
        self._llm: Any = self._thread.run("start-up", max(cfg.rollout.timeout_s, 600.0), lambda: self._start(model_dir))

    def _start(self, model_dir: Path) -> Any:
        if self.device == "cpu":
            # The environment variable is read when dynamo is imported, which may have happened already.
            import torch._dynamo.config as dynamo_config

            dynamo_config.disable = True
        from vllm import LLM

        from e2e_fp8.rollout.preflight import verify_agreement, verify_plugin_live

        verify_plugin_live()
        is_moe = self.hf_config["model_type"] == "qwen3_moe"
        args = engine_args(self.cfg, model_dir, device=self.device, is_moe=is_moe, fp8="quantization_config" in self.hf_config)
        with preserved_process_state():
            llm = LLM(**(args | self._loader_args()))
        verify_agreement(llm, self.cfg, torch.device(self.device))
        if is_moe and args["enable_return_routed_experts"] and self.device == "cpu":
            from e2e_fp8.rollout.capture import capture_unquantized_cpu_routing

            llm.apply_model(capture_unquantized_cpu_routing)
        llm.init_weight_transfer_engine({"init_info": {}})
        self._live = llm.apply_model(self._loader_of)[0]
        return llm

    def _loader_of(self, model: torch.nn.Module) -> InPlaceLoader:
        """Copies into those parameters of vLLM's model that have the checkpoint's layout."""
        slots = [slot for slot in rank_layout(self.hf_config, 0, 1) if self.is_in_place(slot.slot)]
        return InPlaceLoader(LiveParameters(model, {slot.slot.parameter for slot in slots}), slots)

    def _loader_args(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that replace the usual ones."""
        return {}

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, seed: int) -> list[Sample]:
        """``group_size`` samples for each prompt, in prompt order; ``group_id`` is the prompt's index in ``prompts``.

        Sample j of prompt i is drawn from its own generator, seeded by (``seed``, i, j), so a call is a function of weights
        and arguments. Text after a stop string is cut at the token that completes the string. Raises DataError for a prompt that
        does not fit the window, EngineError when the engine dies or exceeds ``rollout.timeout_s``.
        """
        if self.policy_version is None and not self._thread.is_dead:
            raise EngineError(self._refusal)
        rollout = self.cfg.rollout
        check_prompts(
            prompts,
            window=rollout.max_model_len,
            max_response_tokens=rollout.max_response_tokens,
            vocab_size=self.hf_config["vocab_size"],
        )
        if self._asleep:
            self._thread.run("wake-up", rollout.timeout_s, self._wake)
        phase = f"generation of {len(prompts)} x {group_size} samples"
        outputs = self._thread.run(phase, rollout.timeout_s, lambda: self._generate(prompts, group_size, seed))
        return [
            self._sample(prompt, index, outputs[index * group_size + member])
            for index, prompt in enumerate(prompts)
            for member in range(group_size)
        ]

    def _generate(self, prompts: Sequence[Prompt], group_size: int, seed: int) -> list[Any]:
        settings = {
            "temperature": self.cfg.rollout.temperature,
            "max_tokens": self.cfg.rollout.max_response_tokens,
            "stop_token_ids": [self.eos_token_id],
        }
        requests = [
            (prompt.token_ids, settings | {"seed": request_seed(seed, index, member)})
            for index, prompt in enumerate(prompts)
            for member in range(group_size)
        ]
        finished = self._run(requests)
        self.prefix_cache_hit_rate = _cached_tokens(finished) / max(1, group_size * sum(len(p.token_ids) for p in prompts))
        return finished

    def _run(self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[tuple[Any, int]]:
        """vLLM's finished requests of (tokens, sampling parameters) in order, each with the times that it was preempted."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine, order = self._llm.llm_engine, {}
        preemptions: dict[str, int] = {}
        internal: list[str] = []
        for token_ids, settings in requests:
            params = SamplingParams(**settings, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            request_id = f"e2e-{self._requests}"
            self._requests += 1
            order[request_id] = len(order)
            internal.append(engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(token_ids)), params))
        finished: list[Any] = [None] * len(order)
        deadline, done, steps = time.monotonic() + self.cfg.rollout.timeout_s, 0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                finished[order[output.request_id]] = output
                done += 1
            # the scheduler forgets a request when it ends, and does not preempt it in that step
            waiting = engine.engine_core.engine_core.scheduler.requests.values()
            preemptions |= {request.request_id: request.num_preemptions for request in waiting if request.num_preemptions}
            steps += 1
            self._thread.progress = f"{done} of {len(order)} samples finished after {steps} steps"
            if time.monotonic() > deadline:
                # The caller has given up by now; do not compete with it for the processor.
                raise EngineError("generation abandoned")
        return [(output, preemptions.get(name, 0)) for output, name in zip(finished, internal, strict=True)]

    def probe(
        self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]], watch: Callable[[torch.nn.Module], AbstractContextManager[Any]]
    ) -> tuple[list[Any], int]:
        """Run (tokens, sampling parameters) inside ``watch(model)``; vLLM's outputs in order, and the prompt tokens taken from its
        prefix cache. For the parity chain."""

        def run() -> list[tuple[Any, int]]:
            with watch(self._llm.apply_model(lambda model: model)[0]):
                return self._run(requests)

        finished = self._thread.run(f"probe of {len(requests)} requests", self.cfg.rollout.timeout_s, run)
        return [request.outputs[0] for request, _ in finished], _cached_tokens(finished)

    def set_alignment(self, choices: Mapping[str, str]) -> None:
        """Give the live engine the operators of ``choices`` (cause -> choice, e2e_fp8.config.alignment), between requests.

        For studies of single causes without a start for each. Raises EngineError when the engine cannot have one, or replays CUDA graphs,
        which keep the operators that they were captured with.
        """
        from e2e_fp8.rollout.shared_operators import share_operators

        vllm_config, device = self._llm.llm_engine.vllm_config, torch.device(self.device)
        if not vllm_config.model_config.enforce_eager:
            raise EngineError("The engine runs CUDA graphs, which keep their operators: start it with rollout.enforce_eager.")

        def change() -> None:
            self._llm.reset_prefix_cache()
            self._llm.apply_model(lambda model: share_operators(model, vllm_config, device, choices))

        self._thread.run("change of operators", self.cfg.rollout.timeout_s, change)

    def model_runner(self) -> Any:
        """vLLM's, whose sampler forced decoding replaces; call on the engine's thread."""
        return self._llm.collective_rpc(lambda worker: worker.model_runner)[0]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._thread.run("reset of the prefix cache", self.cfg.rollout.timeout_s, lambda: self._llm.reset_prefix_cache())

    def _sample(self, prompt: Prompt, group_id: int, finished: tuple[Any, int]) -> Sample:
        request, preemptions = finished
        output = request.outputs[0]
        token_ids = tuple(output.token_ids)
        routed_experts, routed_weights = split_record(output.routed_experts, self.hf_config["num_hidden_layers"])
        assert self.policy_version is not None
        return finished_sample(
            prompt,
            group_id=group_id,
            token_ids=token_ids,
            log_probs=tuple(step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)),
            finish_reason=output.finish_reason,
            routed_experts=routed_experts,
            routed_weights=routed_weights,
            cached_tokens=request.num_cached_tokens,
            preemptions=preemptions,
            policy_version=self.policy_version,
            stop=self.cfg.rollout.stop,
            eos_token_id=self.eos_token_id,
            decode=self.decode,
        )

    def update_weights(self, tensors: Iterable[ExportedTensor], *, policy_version: int) -> int:
        """Load a complete set of weights and reset the prefix cache; no copy through disk, no requantization. Returns the bytes copied.

        Names, shapes and dtypes are compared with the model's before anything is written: EngineError otherwise. A tuple that comes
        again and whose tensors lie where they lay costs no Python for each copy. The tensors are read on this call only, so the
        caller may change their values afterwards.
        """
        return self._write(self.deliveries.of(tensors), policy_version)

    def _write(self, delivery: Delivery, policy_version: int) -> int:
        """Bring checked tensors, all of the model's or those of whole layers, into the engine; returns their bytes."""
        from e2e_fp8.rollout.weight_transfer import discard, post

        token = post(list(delivery.reloaded.items())) if delivery.reloaded else ""

        def write() -> None:
            self._copy_in_place(delivery)
            if token:
                self._layerwise_reload({"token": token})

        try:
            self._update(write, policy_version, reload=bool(token))
        finally:
            discard(token)
        return delivery.num_bytes

    def is_in_place(self, slot: TensorSlot) -> bool:
        """Whether vLLM keeps this tensor as the checkpoint does, so that a copy into its parameter is the whole update.

        True for FP8 codes and scales, and beside them for everything on Hopper, where vLLM's processing after loading changes
        nothing (the receipt checks it); the CPU build repacks BF16 layers, and BF16 experts may be shuffled on a GPU.
        """
        return slot.fp8 or self.covered == "all"

    def _copy_in_place(self, delivery: Delivery) -> None:
        """Write into the engine's own storage: no allocation, addresses kept, CUDA graphs stay valid."""
        if not delivery.settled:
            self._live.forget()
        self._live.start()
        self._live.load(delivery.placed, reusable=delivery.settled)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def update_weights_from_disk(self, directory: Path, *, policy_version: int) -> int:
        """As :meth:`update_weights`, from the safetensors files of ``directory``."""
        from e2e_fp8.rollout.weight_transfer import read_directory

        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read_directory(directory)}
        check_delivery(self.layout, found)
        self._update(lambda: self._layerwise_reload({"directory": str(directory)}), policy_version, reload=True)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in found.values())

    def _layerwise_reload(self, update_info: dict[str, str]) -> None:
        """vLLM's own update, through the registered weight-transfer engine."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": update_info})
        self._llm.finish_weight_update()

    def _update(self, write: Callable[[], None], policy_version: int, *, reload: bool) -> None:
        """Run ``write``, which uses vLLM's reload if ``reload``, on the engine's thread and reset the prefix cache; until both are
        done the engine has no version.

        A write that fails leaves a mix of two versions behind, so the engine refuses to generate until an update succeeds.
        """
        from e2e_fp8.rollout.weight_transfer import abandon_layerwise_reload

        def transfer() -> None:
            self._wake()
            try:
                write()
            except Exception as error:
                if reload:
                    self._llm.apply_model(abandon_layerwise_reload)
                raise EngineError(f"{torn} ({type(error).__name__}: {error}).") from error
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM refused to reset the prefix cache after the weight update")

        torn = (
            f"The weight update to policy version {policy_version} stopped half-way, the rollout engine refuses to run on a mix of weights"
        )
        self.policy_version, self._refusal = None, f"{torn}: repeat the update."
        self._thread.run(f"weight update to policy version {policy_version}", self.cfg.rollout.timeout_s, transfer)
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Release memory as ``rollout.sleep_level`` says until the next update, or at level 1 the next generation."""
        level = self.cfg.rollout.sleep_level
        if level == 0 or self._asleep:
            return
        self._thread.run("sleep", self.cfg.rollout.timeout_s, lambda: self._llm.sleep(level=level))
        self._asleep = True
        if level == 2:
            self.policy_version = None

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    @property
    def covered(self) -> Literal["all", "fp8"]:
        """Which tensors :meth:`read_back` gives: all where the engine holds every one in the checkpoint's layout, else FP8 ones."""
        return "all" if self.device == "cuda" and "quantization_config" in self.hf_config else "fp8"

    def read_back(self) -> tuple[ExportedTensor, ...]:
        """The covered tensors of the live model under their HF names, as views of the engine's memory; the same tuple while none moves.

        Raises EngineError when vLLM holds one in another shape or dtype than delivered.
        """
        views = self._thread.run("read-back", self.cfg.rollout.timeout_s, self._live.views)
        if self._shown[0] is not views:
            self._shown = views, tuple(ExportedTensor(name=name, tensor=tensor) for name, tensor in views.items())
        return self._shown[1]

    def close(self) -> None:
        """Shut the engine down and free its memory; a second call, or one on a dead engine, does nothing."""
        if self._llm is None or self._thread.is_dead:
            return
        llm, self._llm = self._llm, None
        self._thread.run("shut-down", self.cfg.rollout.timeout_s, lambda: llm.llm_engine.engine_core.shutdown())
        self._thread.stop()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _cached_tokens(finished: Sequence[tuple[Any, int]]) -> int:
    """Prompt tokens of ``VllmEngine._run``'s requests that came from the prefix cache."""
    return sum(request.num_cached_tokens or 0 for request, _ in finished)
