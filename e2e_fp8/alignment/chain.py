"""The parity chain: equalities that add up to "the trainer's log-probs are the rollout's", each checked on real engines.

    bytes           trainer's FP8 bytes        = engine's
    trainer batch   one sequence alone         = among 63 others in a packed batch
    decode          tokens one at a time       = all tokens in one prefill
    engine batch    one request alone          = among 63 others
    chunked         prefill in chunks          = in one piece
    prefix cache    prompt from cached blocks  = computed anew
    modules         trainer, module by module  = engine, module by module
    log-probs       trainer's                  = those of the sampled tokens

The engine here is the configured one with small blocks, 64 sequences and 64 tokens a step, so that chunks and cached prefixes occur
on short prompts; kernels and arithmetic are the run's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.alignment.capture import Recorder, module_order, watch_engine, watch_trainer
from e2e_fp8.alignment.compare import Link, compare, open_causes
from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.orchestration.session import Session, load_task_for, write_model_dir
from e2e_fp8.orchestration.weight_sync import exported_tensors
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.sync.receipt import TensorRecord, manifest_of
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.packing import to_device
from e2e_fp8.types import PackedBatch

STEP_TOKENS = 64
BLOCK_TOKENS = 16
PROMPT_TOKENS = 40
RESPONSE_TOKENS = 8
OTHERS = 63


class ChainEngine(VllmEngine):
    """The run's engine with small blocks and steps, so that chunked prefill and cached prefixes happen on short prompts."""

    def _loader_args(self) -> dict[str, Any]:
        # Modules are read by hooks, which a replayed CUDA graph does not call; a step ahead would record tokens twice.
        on_gpu = {} if self.device == "cpu" else {"enforce_eager": True, "async_scheduling": False}
        return on_gpu | {
            "block_size": BLOCK_TOKENS,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": STEP_TOKENS,
            "enable_return_routed_experts": False,
        }


def chain_config(cfg: Config) -> Config:
    """The configuration with a window that holds the chain's sequences.

    Raises:
        ConfigError: the model is too short for them, or the engine is not in this process.
    """
    needed = 2 * (PROMPT_TOKENS + RESPONSE_TOKENS)
    if cfg.model.max_position_embeddings < needed:
        raise ConfigError(
            f"model.max_position_embeddings is {cfg.model.max_position_embeddings}, but align check runs {needed} tokens: raise it."
        )
    if cfg.rollout.placement != "in_process":
        raise ConfigError("align check reads the engine's modules: set rollout.placement to in_process.")
    window = max(cfg.rollout.max_model_len, needed)
    rollout = cfg.rollout.model_copy(update={"max_model_len": window, "max_num_seqs": STEP_TOKENS, "sleep_level": 0})
    training = cfg.training.model_copy(update={"max_tokens_per_microbatch": max(cfg.training.max_tokens_per_microbatch, window)})
    sync = cfg.sync.model_copy(update={"transport": "local"})
    return cfg.model_copy(update={"rollout": rollout, "training": training, "sync": sync})


@dataclass(kw_only=True)
class EngineRun:
    """What one request gave."""

    tokens: list[int]
    """Sampled tokens."""
    log_probs: torch.Tensor
    """float32 ``[R, 1]`` of the sampled tokens."""
    rows: dict[str, torch.Tensor]
    """Recorded modules, all requests of the call together."""
    steps: list[list[int]]
    """Token ids of each forward pass of the call."""
    cached_tokens: int


def packed(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PackedBatch:
    """Sequences as one batch on ``device``; every position predicts its successor."""
    tokens = torch.tensor([t for sequence in sequences for t in sequence])
    lengths = [len(sequence) for sequence in sequences]
    zeros = torch.zeros(len(tokens))
    batch = PackedBatch(
        token_ids=tokens,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        targets=tokens.roll(-1),
        loss_mask=zeros,
        advantages=zeros,
        rollout_log_probs=zeros,
        old_log_probs=zeros,
    )
    return to_device(batch, torch.device(device))


class Chain:
    """Trainer and engine on the same weights, and the links between them."""

    def __init__(self, trainer: MegatronEngine, engine: VllmEngine, cfg: Config, *, seed: int) -> None:
        self.trainer, self.engine, self.cfg = trainer, engine, cfg
        generator = torch.Generator().manual_seed(seed)
        vocab = cfg.model.vocab_size
        lengths = torch.randint(1, PROMPT_TOKENS + RESPONSE_TOKENS, (OTHERS,), generator=generator).tolist()
        self.others = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
        self.prompt = torch.randint(0, vocab, (PROMPT_TOKENS,), generator=generator).tolist()
        self.order = module_order(cfg.model.num_hidden_layers)
        self._reference: EngineRun | None = None

    def links(self) -> list[Link]:
        """All links, in order."""
        within = (self.trainer_batch, self.decode, self.engine_batch, self.chunked, self.prefix_cache)
        found = [(check in within, check()) for check in (self.bytes, *within, self.modules, self.log_probs)]
        return [self._with_causes(link, inside) for inside, link in found]

    def _with_causes(self, link: Link, inside: bool) -> Link:
        if link.difference is None:
            return link
        return replace(link, causes=open_causes(link.difference.module, choices_of(self.cfg.numerics), within_one_side=inside))

    # Sides -----------------------------------------------------------------------------------------------------------

    def _request(
        self, tokens: Sequence[int], *, sampled: int = RESPONSE_TOKENS, greedy: bool = False
    ) -> tuple[Sequence[int], dict[str, Any]]:
        # A prompt that is cut into chunks cannot be sampled with a seed on the CPU, so links with chunks are greedy.
        settings: dict[str, Any] = {"temperature": 0.0} if greedy else {"temperature": self.cfg.rollout.temperature, "seed": 7}
        return tokens, settings | {"max_tokens": sampled, "ignore_eos": True}

    def _run(self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]], index: int = 0, *, keep_cache: bool = False) -> EngineRun:
        """Run all requests together; the answer is of the ``index``-th."""
        if not keep_cache:
            self.engine.reset_prefix_cache()
        recorder = Recorder()

        def watch(model: torch.nn.Module) -> AbstractContextManager[Any]:
            return watch_engine(model, recorder)

        outputs, cached = self.engine.probe(requests, watch)
        output = outputs[index]
        tokens = list(output.token_ids)
        log_probs = torch.tensor([[step[token].logprob] for step, token in zip(output.logprobs, tokens, strict=True)])
        return EngineRun(tokens=tokens, log_probs=log_probs, rows=recorder.rows(), steps=recorder.token_ids, cached_tokens=cached)

    @property
    def reference(self) -> EngineRun:
        """The prompt alone: prefill in one step, then one token a step."""
        if self._reference is None:
            self._reference = self._run([self._request(self.prompt)])
        return self._reference

    @property
    def sequence(self) -> list[int]:
        """Prompt and sampled tokens."""
        return [*self.prompt, *self.reference.tokens]

    def _trainer_rows(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        recorder = Recorder()
        with watch_trainer(self.trainer.model, recorder):
            self.trainer.token_stats([packed(sequences, self.trainer.device)])
        tokens = sum(len(sequence) for sequence in sequences)
        return {name: rows[:tokens] for name, rows in recorder.rows().items()}

    # Links -----------------------------------------------------------------------------------------------------------

    def bytes(self) -> Link:
        """The receipt's comparison, as a link."""
        covered = self.engine.covered
        ours = manifest_of(exported_tensors(self.trainer, self.cfg), covered=covered).tensors
        theirs = manifest_of(self.engine.read_back(), covered=covered).tensors
        names = sorted(ours.keys() | theirs.keys())
        return compare("bytes", _digests(ours, names), _digests(theirs, names), names, sides=("trainer", "engine"))

    def trainer_batch(self) -> Link:
        """The sequence alone, and packed behind and before others."""
        alone = self._trainer_rows([self.sequence])
        before = self.others[: OTHERS // 2]
        together = self._trainer_rows([*before, self.sequence, *self.others[OTHERS // 2 :]])
        start = sum(len(other) for other in before)
        mine = {name: rows[start : start + len(self.sequence)] for name, rows in together.items()}
        return compare("trainer batch", alone, mine, self.order, sides=("alone", f"among {OTHERS} others"))

    def decode(self) -> Link:
        """Tokens that were decoded one at a time, prefilled together."""
        whole = self._run([self._request(self.sequence[:-1], sampled=1)])
        stepped, count = dict(self.reference.rows), len(self.sequence) - 1
        prefilled = {name: rows[:count] for name, rows in whole.rows.items()}
        stepped["logits"] = stepped["logits"][-1:]
        return compare("decode", prefilled, stepped, self.order, sides=("prefill", "decode"))

    def engine_batch(self) -> Link:
        """The request alone, and among others."""
        requests = [self._request(other[:PROMPT_TOKENS], greedy=True) for other in self.others]
        alone = self._run([self._request(self.prompt, greedy=True)])
        together = self._run([*requests, self._request(self.prompt, greedy=True)], index=len(requests))
        return self._compare_runs("engine batch", alone, together, ("alone", f"among {OTHERS} others"))

    def chunked(self) -> Link:
        """The prompt in one piece, and cut by another prompt that takes most of a step's tokens."""
        alone = self._run([self._request(self.prompt, greedy=True)])
        filler = [token for other in self.others for token in other][: STEP_TOKENS - PROMPT_TOKENS // 3]
        cut = self._run([self._request(filler, greedy=True), self._request(self.prompt, greedy=True)], index=1)
        part = self.prompt[: STEP_TOKENS - len(filler)]
        # vLLM's second model runner puts the shorter request first
        if cut.steps[0] not in ([*filler, *part], [*part, *filler]):
            raise RuntimeError("vLLM did not cut the prompt, so the chunked link compared nothing")
        return self._compare_runs("chunked", alone, cut, ("whole", "in chunks"))

    def prefix_cache(self) -> Link:
        """The prompt computed anew, and with its full blocks from the cache."""
        fresh = self._run([self._request(self.prompt, greedy=True)])
        again = self._run([self._request(self.prompt, greedy=True)], keep_cache=True)
        if again.cached_tokens == 0:
            raise RuntimeError("vLLM took nothing from its prefix cache, so the prefix-cache link compared nothing")
        start = again.cached_tokens
        rows = {name: rows if name == "logits" else rows[start:] for name, rows in fresh.rows.items()}
        found = compare("prefix cache", rows, again.rows, self.order, sides=("fresh", "cached"))
        return found if not found.holds else self._compare_runs("prefix cache", fresh, again, ("fresh", "cached"))

    def modules(self) -> Link:
        """Trainer and engine, module by module, over prompt and sampled tokens."""
        ours = self._trainer_rows([self.sequence])
        rows = {name: values[:-1] for name, values in ours.items()}
        rows["logits"] = rows["logits"][len(self.prompt) - 1 :]
        theirs = self.reference.rows
        if self.engine.device == "cuda" and "native" in choices_of(self.cfg.numerics).values():
            # native operators fuse norms and experts into products that show nothing; shared ones show all (docs/alignment.md)
            both = rows.keys() & theirs.keys()
            rows, theirs = ({name: side[name] for name in both} for side in (rows, theirs))
        return compare("modules", rows, theirs, self.order, sides=("trainer", "engine"))

    def log_probs(self) -> Link:
        """Log-probs of the sampled tokens."""
        stats = self.trainer.token_stats([packed([self.sequence], self.trainer.device)])[0]
        ours = stats.log_probs[len(self.prompt) - 1 : -1, None].cpu()
        sides = ("trainer", "rollout")
        return compare("log-probs", {"log_probs": ours}, {"log_probs": self.reference.log_probs}, ["log_probs"], sides=sides)

    def _compare_runs(self, name: str, left: EngineRun, right: EngineRun, sides: tuple[str, str]) -> Link:
        """Log-probs and tokens of two runs of one request."""
        values = [
            {"log_probs": run.log_probs, "tokens": torch.tensor(run.tokens)[:, None]} for run in (left, right)
        ]  # fmt: skip
        return compare(name, values[0], values[1], ["log_probs", "tokens"], sides=sides)


def _digests(records: dict[str, TensorRecord], names: list[str]) -> dict[str, torch.Tensor]:
    """The digest of every tensor as two halves that a float holds exactly; a missing tensor is -1."""
    halves = {name: [records[name].digest >> 32, records[name].digest & 0xFFFFFFFF] if name in records else [-1, -1] for name in names}
    return {name: torch.tensor([value]) for name, value in halves.items()}


def check(cfg: Config, folder: Path, *, seed: int) -> list[Link]:
    """Start trainer and engine of ``cfg`` (with its ground resolved) on the starting weights and run the chain; ``folder`` is scratch."""
    cfg = chain_config(cfg)
    task = load_task_for(cfg)
    write_model_dir(cfg, task, folder / "model")
    trainer = MegatronEngine(cfg)
    engine = ChainEngine(cfg, folder / "model", task.tokenizer.eos_token_id, task.tokenizer.decode)
    session = Session(cfg=cfg, task=task, trainer=trainer, model_dir=folder / "model", rollout=engine)
    try:
        session.sync()
        return Chain(trainer, engine, cfg, seed=seed).links()
    finally:
        session.close()
