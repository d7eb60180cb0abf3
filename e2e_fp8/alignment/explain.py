"""Attribution of the mismatch between trainer and engine: causes opened one at a time from ``bitwise`` to the configuration.

Responses are sampled once, by the engine of the configuration. Everything after speaks of these tokens: the engine decodes them again, one
at a time, with the operators of each row, and the trainer scores them with its own. So rows differ by their cause alone and not by
what was sampled. The baseline shares every operator and must be 0, bit for bit.
"""

import gc
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from e2e_fp8.alignment.capture import LAYER_MODULES, Recorder, module_order, watch_engine, watch_trainer
from e2e_fp8.alignment.chain import packed
from e2e_fp8.alignment.divergence import ModuleDivergence, by_module, changed_experts, token_metrics
from e2e_fp8.config.alignment import CAUSES, choices_at, choices_of
from e2e_fp8.config.alignment_explain import BASELINE, GROUPS, TOTAL, with_numerics
from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.batching import pack_samples, response_values
from e2e_fp8.orchestration.replay import Routing, routing_of
from e2e_fp8.orchestration.session import Session
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.forced_decoding import forced_responses
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import PackedBatch, Sample

Watch = Callable[[torch.nn.Module], AbstractContextManager[Any]]
LAYER_SAMPLES = 4
"""Sequences whose modules are compared."""


class ExplainEngine(VllmEngine):
    """The run's engine, which records the experts of a mixture of experts whatever the configuration says.

    On a GPU it runs without graphs and compilation, which keep their operators, and without steps ahead of the tokens.
    """

    def _loader_args(self) -> dict[str, Any]:
        on_gpu = {} if self.device == "cpu" else {"enforce_eager": True, "async_scheduling": False}
        return on_gpu | {"enable_return_routed_experts": self.cfg.model.is_moe}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    group: str
    kind: str
    """``baseline``, ``cause`` (open in the configuration), ``total`` or ``what_if`` (on top of the baseline, not open)."""
    what: str
    """What differs between the two sides."""
    metrics: dict[str, float]
    """See e2e_fp8.config.alignment_explain.METRICS."""
    changed_experts: list[float] | None = None
    """By layer; None for a dense model, and where one side alone is compared."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One side's view of the samples."""

    log_probs: list[torch.Tensor]
    """float32 ``[R]`` of each sample's own tokens."""
    chosen: list[torch.Tensor] | None = None
    """Trainer: bool ``[n, L, E]`` of each sample."""
    routings: list[Routing] | None = None
    """Engine: its choices."""


def where_finite(ours: Scores, theirs: Scores) -> tuple[Scores, Scores, float]:
    """Both sides' log-probs of the tokens that ``theirs`` gives a probability above 0, and the share of all others."""
    kept = [row.isfinite() for row in theirs.log_probs]
    left_out = 1 - sum(int(mask.sum()) for mask in kept) / max(1, sum(len(mask) for mask in kept))
    mine, others = ([row[mask] for row, mask in zip(side.log_probs, kept, strict=True)] for side in (ours, theirs))
    return replace(ours, log_probs=mine), replace(theirs, log_probs=others), left_out


@dataclass(kw_only=True)
class Explanation:
    """All that was measured."""

    rows: list[Row] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Cause -> why it has no row."""
    failed: list[str] = field(default_factory=list)
    """Of these, causes whose measurement raised: a fault, not a property of the configuration."""
    modules: list[ModuleDivergence] = field(default_factory=list)
    """Of the configuration, over the first samples, each alone on both sides."""
    hidden_modules: list[str] = field(default_factory=list)
    """Kinds of modules that one side's fused kernels do not show (GPU)."""
    trainer: Scores = Scores(log_probs=[])
    engine: Scores = Scores(log_probs=[])
    """Both sides of the configuration, for the view by position."""
    sampled_again: float = 0.0
    """Largest |difference| between the log-probs that the engine reported when it sampled and when it decoded the same tokens again."""


class Explainer:
    """A session with sampled responses, whose sides are given other operators row by row."""

    def __init__(self, session: Session, samples: Sequence[Sample]) -> None:
        assert isinstance(session.rollout, VllmEngine)
        self.session, self.cfg, self.engine = session, session.cfg, session.rollout
        self.samples = list(samples)
        self.state = session.trainer.state_dict()
        self.open = choices_of(self.cfg.numerics)
        self.shared = choices_at("bitwise")
        self.batches: list[PackedBatch] = pack_samples(
            self.samples,
            torch.zeros(len(self.samples)),
            max_tokens=self.cfg.training.max_tokens_per_microbatch,
            device=session.trainer.device,
        )

    def causes(self) -> list[str]:
        """Those that this model has and this configuration does not share."""
        return [n for n, c in CAUSES.items() if (self.cfg.model.is_moe or not c.moe_only) and self.open[n] != self.shared[n]]

    def explain(self) -> Explanation:
        """Baseline, one cause at a time, the configuration, and where that one diverges."""
        found = Explanation()
        found.rows.append(self._operators(BASELINE, "", "baseline", "every operator shared", self.shared)[0])
        for name in self.causes():
            self.attempt(found, name, partial(self._cause, name))
        what = "the configuration, all of the above together"
        row, found.trainer, found.engine = self._operators(TOTAL, "", "total", what, self.open, self.session.trainer)
        found.rows.append(row)
        sampled = self._own([torch.tensor(s.rollout_log_probs) for s in self.samples])
        found.sampled_again = max(float((a - b).abs().max()) for a, b in zip(sampled, found.engine.log_probs, strict=True))
        found.modules, found.hidden_modules = self.modules(self.session.trainer)
        return found

    def _cause(self, name: str) -> Row:
        choice = CAUSES[name].choices[self.open[name]]
        what = f"{choice.trainer} | {choice.rollout}"
        return self._operators(name, GROUPS[name], "cause", what, self.shared | {name: self.open[name]})[0]

    def attempt(self, found: Explanation, name: str, measure: Callable[[], Row | str]) -> None:
        """Add the row of ``measure``, or its reason. One cause that raises does not take the others' rows with it; it is said."""
        print(f"align explain: {name}", file=sys.stderr, flush=True)
        try:
            row = measure()
        except Exception as error:
            traceback.print_exc()
            row = f"failed, {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            found.failed.append(name)
        if isinstance(row, str):
            found.not_measured[name] = row
        else:
            found.rows.append(row)

    def trainer_with(self, choices: Mapping[str, str], **numerics: Any) -> MegatronEngine:
        """A trainer of the session's weights, in FP8 unless said otherwise, with these operators."""
        return self.trainer_of(with_numerics(self.cfg, choices, **({"training_precision": "fp8"} | numerics)))

    def trainer_of(self, cfg: Config) -> MegatronEngine:
        """A trainer of another configuration on the session's weights."""
        # those of the rows before have cycles, and every one holds weights, masters and gradients
        gc.collect()
        trainer = MegatronEngine(cfg)
        trainer.load_state_dict(self.state, weights_only=True)
        return trainer

    def _operators(
        self, name: str, group: str, kind: str, what: str, choices: Mapping[str, str], trainer: MegatronEngine | None = None
    ) -> tuple[Row, Scores, Scores]:
        ours = self.trainer_scores(trainer or self.trainer_with(choices))
        theirs = self.engine_scores(choices)
        return self.row(name, group, kind, what, ours, theirs), ours, theirs

    def row(self, name: str, group: str, kind: str, what: str, ours: Scores, theirs: Scores) -> Row:
        """Compare two sides."""
        metrics, changed = token_metrics(ours.log_probs, theirs.log_probs), None
        if ours.chosen is not None and theirs.routings is not None:
            covered = [r.covered for r in theirs.routings]
            changed = changed_experts(ours.chosen, [r.ids for r in theirs.routings], covered)
            metrics["changed_experts"] = sum(changed) / len(changed)
        return Row(name=name, group=group, kind=kind, what=what, metrics=metrics, changed_experts=changed)

    # Sides -----------------------------------------------------------------------------------------------------------

    def _own(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Without the tokens that a tool wrote."""
        masks = [s.response_mask for s in self.samples]
        return [v if mask is None else v[torch.tensor(mask)] for v, mask in zip(values, masks, strict=True)]

    def trainer_scores(self, trainer: MegatronEngine, *, high_precision: bool = False) -> Scores:
        """Log-probs and, of a mixture of experts, choices; ``high_precision`` multiplies bf16(FP32 master) in BF16."""
        score = trainer.high_precision_token_stats if high_precision else trainer.token_stats
        values, chosen = [], []
        for batch in self.batches:
            recorder = Recorder(only="router_weights")
            with watch_trainer(trainer.model, recorder):
                values += [stats.log_probs for stats in score([batch])]
            # rows that pad the batch come last
            rows = {name: weights[: len(batch.token_ids)] for name, weights in recorder.rows().items()}
            if rows:
                layers = range(self.cfg.model.num_hidden_layers)
                chosen.append(torch.stack([rows[f"layers.{layer}.router_weights"] > 0 for layer in layers], dim=1))
        log_probs = [row.cpu() for row in response_values(self.batches, values)]
        if not chosen:
            return Scores(log_probs=log_probs)
        lengths = [len(s.prompt.token_ids) + len(s.response_token_ids) for s in self.samples]
        return Scores(log_probs=log_probs, chosen=list(torch.cat(chosen).split(lengths)))

    def engine_scores(self, choices: Mapping[str, str], watch: Watch | None = None, *, top_p: float = 1.0) -> Scores:
        """The engine with these operators, inside ``watch(model)``, decoding the samples' tokens."""
        self.engine.set_alignment(choices)
        sequences = [(s.prompt.token_ids, s.response_token_ids) for s in self.samples]
        found = forced_responses(self.engine, sequences, watch, top_p)
        log_probs = self._own([f.log_probs for f in found])
        if not self.cfg.model.is_moe:
            return Scores(log_probs=log_probs)
        forced = [replace(s, routed_experts=f.routed_experts) for s, f in zip(self.samples, found, strict=True)]
        return Scores(log_probs=log_probs, routings=[routing_of(s, self.cfg) for s in forced])

    def modules(self, trainer: MegatronEngine) -> tuple[list[ModuleDivergence], list[str]]:
        """Module by module over the first sample of some prompts, each alone on both sides; the engine keeps its operators.

        Also the kinds of modules that one side alone shows: on a GPU native norms are inside a product, native experts in one kernel.
        """
        firsts = {s.group_id: s for s in reversed(self.samples)}
        chosen = [firsts[group] for group in sorted(firsts)[:LAYER_SAMPLES]]
        ours, theirs = [], []
        for sample in chosen:
            sequence, start = [*sample.prompt.token_ids, *sample.response_token_ids], len(sample.prompt.token_ids)
            recorder = Recorder()
            with watch_trainer(trainer.model, recorder):
                trainer.token_stats([packed([sequence], trainer.device)])
            rows = {name: values[: len(sequence) - 1] for name, values in recorder.rows().items()}
            ours.append(rows | {"logits": rows["logits"][start - 1 :]})
            theirs.append(self._engine_rows(sample))
        order, hidden = module_order(self.cfg.model.num_hidden_layers), set()
        if self.engine.device == "cuda":
            hidden = ours[0].keys() ^ theirs[0].keys()
            ours, theirs = ([{n: v for n, v in rows.items() if n not in hidden} for rows in side] for side in (ours, theirs))
        kinds = {name.rpartition(".")[2] for name in hidden}
        return by_module(ours, theirs, order), [name for name in (*LAYER_MODULES, "final_norm") if name in kinds]

    def _engine_rows(self, sample: Sample) -> dict[str, torch.Tensor]:
        recorder = Recorder()

        def watch(model: torch.nn.Module) -> AbstractContextManager[Any]:
            return watch_engine(model, recorder)

        forced_responses(self.engine, [(sample.prompt.token_ids, sample.response_token_ids)], watch)
        return recorder.rows()
