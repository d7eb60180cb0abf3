"""One trainer rank and one engine rank, each on its own device, over the ``ranks`` transport, compared with a slow reference.

Usage: ``python rank_transport_process.py {qwen3|qwen3_moe} {cpu|cuda} FOLDER``. On ``cuda`` the trainer (Transformer Engine) has GPU 0 and
the server GPU 1 where there are two, with CUDA graphs. Every version is another one: the trainer takes a step before each. Prints ``ok``.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from integration.gpus import ENGINE, places
from integration.rank_process import held
from integration.server_cases import Served, assert_live, case_config, generate
from rank_cases import MODEL, Case, whole_weights
from training_cases import fresh_generator, nll, random_batch, trained_tokens

from e2e_fp8.config.root import Config
from e2e_fp8.orchestration.weight_sync import publish_shares, rank_publisher
from e2e_fp8.rollout.agreement import check_agreement
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.training.engine import MegatronEngine

VERSIONS = 6
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
    },
}
"""Graphs of decoding, nothing compiled."""


def config(architecture: str, device: str) -> Config:
    """The model that the server tests have, on the ``ranks`` transport."""
    cfg = case_config(architecture, device=device, initializer_range=0.05, num_experts=4)
    return cfg.model_copy(update={"sync": cfg.sync.model_copy(update={"transport": "ranks"})})


def reference(trainer: MegatronEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor as it should be: the masters, quantized by the slow reference."""
    case = Case(world=1, model={name: getattr(trainer.cfg.model, name) for name in MODEL})
    save_file(held(trainer), folder / "end-0.safetensors")
    return whole_weights(case, folder)


def main(architecture: str, device: str, folder: Path) -> None:
    cfg, on_gpu = config(architecture, device), device == "cuda"
    served = Served(cfg, folder / "served", **({"environ": places(2)[ENGINE].server_environ} | GRAPHS if on_gpu else {}))
    try:
        trainer = MegatronEngine(cfg)
        trainer.set_learning_rate(3e-3)
        control = UpdateControl(served.process.url, served.process.token, timeout_s=60)
        check_agreement(cfg, control.workers)
        publisher = rank_publisher(trainer, cfg, control)
        generator, digests = fresh_generator(), set()
        for _ in range(VERSIONS):
            batch = random_batch([30, 41, 9], generator, cfg.model.vocab_size)
            assert not trainer.train_step([batch], nll, trained_tokens([batch])).skipped
            report = publish_shares(trainer, publisher, cfg)
            assert report.receipt is not None
            digests.add(report.receipt.combined)
            assert served.versions() == [trainer.policy_version]
            expected = reference(trainer, folder)
            assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
            assert_live(served, expected)
            print(generate(served.client))
            # decoding replays graphs that were captured before any of these bytes came
            assert_live(served, expected)
            phases = ", ".join(f"{phase} {seconds * 1e3:.2f}" for phase, seconds in report.phases.items())
            print(f"ranks {report.num_bytes} bytes: sync {report.seconds:.4f} s, receipt {report.receipt_seconds:.4f} s; in ms: {phases}")
        assert len(digests) == VERSIONS
        publisher.close()
    finally:
        served.process.close()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
