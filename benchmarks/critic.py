"""How much of the returns can a critic explain, and how soon? A frozen policy's samples, fitted by critics of several learning rates.

    python benchmarks/critic.py configs/objectives/ppo_gae.yaml --steps 40 --rates 1e-3 3e-4 1e-4 --passes 1 4

Warm start, then ``--steps`` rollouts of the policy as it then is. The last four are never trained on; their prompts may come twice
(``task.train_size``). Each critic starts as the run's
does, takes one optimizer step a mini-batch over the others, ``--passes`` times, and is judged on the four. Beside it what any critic
could know: the share of the variance of rewards between prompts, and a ridge regression on the frozen policy's last hidden states.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from e2e_fp8.config.load import load_config
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, regrouped
from e2e_fp8.orchestration.collect import collect
from e2e_fp8.orchestration.critic import update_critic, with_gae
from e2e_fp8.orchestration.session import Session, open_session
from e2e_fp8.orchestration.warm_start import warm_start
from e2e_fp8.training.value_engine import ValueEngine
from e2e_fp8.types import PackedBatch, Sample

JUDGED = 4
"""Steps at the end on which critics are judged."""
Step = list[Sample]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-4, 1e-4])
    parser.add_argument("--passes", type=int, nargs="+", default=[1])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # no reference: a KL in the reward would be a second source of variance
        cfg = load_config(args.config, [*args.set, f"run.out_dir={folder}", "objective.kl_coef=0"])
        session = open_session(cfg, Path(folder) / "model")
        warm_start(session, 0, lambda *_: None)
        session.sync()
        steps = [collect(session, step, PhaseTimer()).kept for step in range(args.steps)]
        report_bounds(session, steps)
        for rate in args.rates:
            for passes in args.passes:
                fit(session, steps, rate, passes)
        session.close()


def report_bounds(session: Session, steps: list[Step]) -> None:
    """What prompts alone explain (their share of the variance, unbiased), and what is linear in the frozen hidden states."""
    rewards = torch.tensor([s.reward for step in steps for s in step], dtype=torch.float64)
    size = session.cfg.rollout.group_size
    groups = rewards.view(-1, size)
    within, between = groups.var(dim=1).mean(), groups.mean(dim=1).var()
    share = float(1 - within / (between + within * (1 - 1 / size)))
    print(f"rewards: mean {rewards.mean():.3f}, variance {rewards.var():.4f}, between prompts {share:.3f} of it")
    hidden, returns = zip(*(hidden_states(session, step) for step in steps), strict=True)
    for ridge in (1e2, 1e3, 1e4):
        print(f"ridge {ridge:g} on the last hidden states: explained variance {probe(hidden, returns, ridge):.3f}")


def hidden_states(session: Session, samples: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """What the value head would read at each response token, float64 ``[N, hidden]``, and the reward of its response."""
    critic, found = new_critic(session), []
    batches = [b for part in minibatches(session, samples) for b in part]
    with critic.model.output_layer.register_forward_hook(lambda module, given, output: found.append(given[0][:, 0].double().cpu())):
        critic.values(batches)
    mask = torch.cat([b.loss_mask for b in batches]).cpu() > 0
    lengths = torch.tensor([int(part.sum()) for b in batches for part in b.loss_mask.split(b.cu_seqlens.diff().tolist())])
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    return torch.cat(found)[mask], torch.repeat_interleave(rewards, lengths)


def probe(hidden: tuple[torch.Tensor, ...], returns: tuple[torch.Tensor, ...], ridge: float) -> float:
    """Explained variance of the last JUDGED steps by a ridge regression on the others, features standardised."""
    x, y = torch.cat(hidden[:-JUDGED]), torch.cat(returns[:-JUDGED])
    mean, spread = x.mean(dim=0), x.std(dim=0) + 1e-9
    x = (x - mean) / spread
    weights = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.size(1), dtype=x.dtype), x.T @ (y - y.mean()))
    x, y = (torch.cat(hidden[-JUDGED:]) - mean) / spread, torch.cat(returns[-JUDGED:])
    return float(1 - (y - x @ weights).var() / y.var())


def new_critic(session: Session) -> ValueEngine:
    critic = ValueEngine(session.cfg)
    critic.start_from(session.trainer.named_masters())
    return critic


def minibatches(session: Session, samples: Step) -> list[list[PackedBatch]]:
    training, device = session.cfg.training, session.trainer.device
    slices, blank = minibatch_slices([s.group_id for s in samples], training.minibatches_per_step), torch.zeros(len(samples))
    return [pack_samples(samples[p], blank[p], max_tokens=training.max_tokens_per_microbatch, device=device) for p in slices]


def fit(session: Session, steps: list[Step], rate: float, passes: int) -> None:
    """One critic; every step is judged before it is trained on, so nothing is judged on what it has seen in its first pass."""
    critic = session.cfg.objective.critic.model_copy(update={"learning_rate": rate})
    cfg = session.cfg.model_copy(update={"objective": session.cfg.objective.model_copy(update={"critic": critic})})
    engine, started, seen = new_critic(session), time.perf_counter(), []
    for samples in [*steps[:-JUDGED] * passes, *steps[-JUDGED:]]:
        parts = minibatches(session, samples)
        batches = [b for part in parts for b in part]
        found, metrics = with_gae(cfg, samples, batches, engine.values(batches))
        seen.append((metrics["critic/vf_explained_var"], metrics["critic/values/mean"] - metrics["critic/returns/mean"]))
        if len(seen) <= len(steps[:-JUDGED]) * passes:
            update_critic(engine, regrouped(found, parts), cfg)
    explained, offsets = (torch.tensor(column) for column in zip(*seen, strict=True))
    curve = " ".join(f"{float(part.mean()):.3f}" for part in explained.chunk(8))
    print(
        f"rate {rate:g}, {passes} passes: explained variance {float(explained[-JUDGED:].mean()):.3f} (over time {curve}), "
        f"offset of the mean value {float(offsets[4:].square().mean().sqrt()):.3f}, {time.perf_counter() - started:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
