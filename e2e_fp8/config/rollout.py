"""vLLM side: sampling and engine sizes."""

from typing import Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class RolloutConfig(Section):
    """Sampling parameters and engine sizes."""

    placement: Literal["in_process", "server"] = Field(
        default="in_process", description="Engine in the trainer's process, or a vLLM server of its own."
    )
    server_url: str | None = Field(
        default=None,
        description="Running server (http://HOST:PORT, token in E2E_FP8_TOKEN or E2E_FP8_TOKEN_FILE); unset, the run starts its own.",
    )
    server_devices: str | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of the server that the run starts; unset, the trainer's own devices."
    )
    prompts_per_step: int = Field(default=16, ge=1, description="Prompts per RL step.")
    group_size: int = Field(default=8, ge=1, description="Samples per prompt; objective.advantage group compares them, and needs 2.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; log-probs on both sides are taken at it.")
    max_response_tokens: int = Field(default=16, ge=1, description="Longest response in tokens.")
    max_model_len: int = Field(default=256, ge=8, description="Window of the engine: prompt and response together, in tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Extra stop strings besides the end-of-sequence token.")
    capture_routed_experts: bool = Field(default=True, description="Return each token's expert choices (MoE only).")
    gpu_memory_utilization: float = Field(
        default=0.35, gt=0, lt=1, description="Share of device memory for the engine (GPU); not used when kv_cache_gib is set."
    )
    kv_cache_gib: int | None = Field(
        default=None,
        ge=1,
        description="KV cache size in GiB. None: 1 on the CPU, what gpu_memory_utilization leaves on a GPU. Set it where others use the "
        "same GPU, since vLLM's measurement of free memory fails when theirs changes.",
    )
    sleep_level: Literal[0, 1, 2] = Field(
        default=0,
        description="What the engine gives up between generation and sync (GPU): 0 nothing; 1 the KV cache, with its own weights moved to "
        "host memory; 2 both, as the next sync delivers all weights anew. Weights shared with the trainer always stay.",
    )
    max_num_seqs: int = Field(default=128, ge=1, description="Sequences decoded together.")
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one engine step, so that the prefill of many prompts is one. None: 16384 on a GPU, 2048 on the CPU, or as "
        "many as max_num_seqs or max_model_len, if they are more.",
    )
    enforce_eager: bool = Field(
        default=True,
        description="Run without CUDA graphs and compilation. False allows both, or, where numerics.alignment shares operators, graphs of "
        "decoding alone, since compiled code rounds differently.",
    )
    moe_backend: Literal["deep_gemm", "triton"] = Field(default="deep_gemm", description="vLLM's FP8 MoE kernels on the GPU.")
    tensor_parallel: int = Field(default=1, ge=1, description="Engine tensor parallel size.")
    expert_parallel: bool = Field(
        default=False,
        description="Deal whole experts out to the engine's ranks instead of splitting each over all of them (MoE, tensor_parallel "
        "above 1).",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="A generation or sync slower than this counts as a wedged engine.")
