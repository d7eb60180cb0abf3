"""Sync and run sections."""

from typing import Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class SyncConfig(Section):
    """Delivery of weights into the rollout engine."""

    transport: Literal["local", "shared", "disk", "ipc", "nccl", "ranks"] = Field(
        default="local",
        description="local: copy within the process; shared: trainer and engine are views of one storage, nothing is copied; "
        "disk: block-FP8 HF checkpoint; ipc: shared memory of one GPU or host; nccl: broadcast to other GPUs (gloo on the CPU); "
        "ranks: every trainer rank sends its rows straight to the engine ranks that need them (NCCL, gloo on the CPU).",
    )
    max_bucket_mib: int = Field(
        default=512,
        ge=1,
        description="Largest bucket of nccl and of ipc where it has buckets, largest message of ranks, in MiB; two are held on each side.",
    )
    ipc_buckets: bool = Field(
        default=False,
        description="ipc on a GPU copies through buckets instead of letting the engine read the trainer's memory: for weights in a memory "
        "pool that cannot be shared between processes. Always so on the CPU.",
    )
    arm: bool = Field(
        default=True,
        description="Announce each sync to a server before the step's last optimizer step, so that only the copies come after it: nccl and "
        "ipc without buckets, one trainer process, on the server's host. Elsewhere nothing is announced (metric sync/armed). The "
        "server answers 503 from then on.",
    )
    receipt: bool = Field(default=True, description="Compare digests of what trainer and engine hold after every sync (docs/receipt.md).")
    receipt_before: Literal["generation", "answers"] = Field(
        default="answers",
        description="What waits for the receipt. answers: a server generates as soon as the bytes are there, and no answer leaves it "
        "before they were compared (ipc, nccl and disk; the first sync, ranks and an engine in the trainer's process compare before "
        "generation). generation: it generates after the comparison.",
    )


class RunConfig(Section):
    """Length, evaluation, checkpoints and outputs of a run."""

    name: str = Field(default="quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder name under out_dir.")
    out_dir: str = Field(default="runs", description="Parent folder of runs.")
    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Ground; auto takes cuda when a Hopper GPU and the stack are there."
    )
    steps: int = Field(default=30, ge=0, description="RL steps.")
    seed: int = Field(default=1, ge=0, description="Seed of initial weights, sampling and data order.")
    eval_interval: int = Field(
        default=10, ge=0, description="Held-out evaluation every this many steps (and at the start and end); 0 never."
    )
    eval_samples: int = Field(default=1, ge=1, description="Samples per held-out prompt: avg@k, and pass@k for powers of two up to it.")
    eval_pass_reward: float = Field(default=1.0, description="A held-out response passes (pass@k) at this reward or above.")
    checkpoint_interval: int = Field(default=10, ge=0, description="Checkpoint every this many steps and at the end; 0 never.")
    keep_checkpoints: int = Field(
        default=2, ge=1, description="Newest checkpoints kept; the last good one is never removed before a newer is whole."
    )
    resume: bool = Field(
        default=False, description="Continue from the newest checkpoint of this run; otherwise an existing run folder is refused."
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb_project: str | None = Field(default=None, description="Log to this W&B project if set (needs the wandb package).")
    threads: int = Field(default=0, ge=0, description="CPU threads for torch; 0 leaves the default.")
