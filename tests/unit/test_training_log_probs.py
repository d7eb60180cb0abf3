"""Log-probabilities and entropy against torch's own float64, and split over two processes."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from e2e_fp8.training.log_probs import token_stats_from_logits


def reference(logits, targets, temperature):
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_match_float64(temperature):
    logits = (torch.randn(7, 33) * 20).requires_grad_()
    targets = torch.randint(0, 33, (7,))
    weights = torch.randn(2, 7)
    stats = token_stats_from_logits(logits, targets, temperature=temperature, vocab_size=33)
    ((weights[0] * stats.log_probs).sum() + (weights[1] * stats.entropy).sum()).backward()
    wide = logits.detach().double().requires_grad_()
    log_probs, entropy = reference(wide, targets, temperature)
    ((weights[0] * log_probs).sum() + (weights[1] * entropy).sum()).backward()
    torch.testing.assert_close(stats.log_probs.double(), log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-4, atol=2e-5)


def test_input_is_not_changed_and_padding_has_no_mass():
    logits = torch.randn(5, 40)
    logits[:, 30:] = 1e4
    kept = logits.clone()
    targets = torch.randint(0, 30, (5,))
    stats = token_stats_from_logits(logits, targets, temperature=1.0, vocab_size=30)
    log_probs, entropy = reference(kept[:, :30], targets, 1.0)
    assert torch.equal(logits, kept)
    torch.testing.assert_close(stats.log_probs.double(), log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def test_bf16_logits_are_refused():
    with pytest.raises(ValueError, match="FP32"):
        token_stats_from_logits(torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long), temperature=1.0, vocab_size=4)


def _rank(rank: int, folder: str) -> None:
    case = torch.load(Path(folder) / "case.pt")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    shard = case["logits"].chunk(2, dim=1)[rank].clone().requires_grad_()
    stats = token_stats_from_logits(shard, case["targets"], temperature=0.9, vocab_size=21, group=dist.group.WORLD)
    (stats.log_probs * case["weights"] + stats.entropy).sum().backward()
    torch.save({"log_probs": stats.log_probs.detach(), "entropy": stats.entropy.detach(), "grad": shard.grad}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one():
    case = {"logits": torch.randn(6, 24) * 5, "targets": torch.randint(0, 21, (6,)), "weights": torch.randn(6)}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(case, Path(folder) / "case.pt")
        mp.spawn(_rank, args=(folder,), nprocs=2)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    logits = case["logits"].requires_grad_()
    stats = token_stats_from_logits(logits, case["targets"], temperature=0.9, vocab_size=21)
    (stats.log_probs * case["weights"] + stats.entropy).sum().backward()
    for result in ranks:
        torch.testing.assert_close(result["log_probs"], stats.log_probs.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["entropy"], stats.entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([r["grad"] for r in ranks], dim=1), logits.grad, rtol=1e-4, atol=1e-6)
