"""Where prompts and rewards come from."""

from typing import Any, Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class TaskConfig(Section):
    """A procedural reasoning-gym data set, or prompts from a file."""

    kind: Literal["reasoning_gym", "file"] = Field(default="reasoning_gym", description="Source of prompts.")
    name: str = Field(default="chain_sum", description="reasoning-gym data set name (kind reasoning_gym).")
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reasoning-gym data set.")
    path: str | None = Field(default=None, description="JSONL or parquet file with prompt and answer columns (kind file).")
    prompt_field: str = Field(default="prompt", description="Column with the prompt text (kind file).")
    answer_field: str = Field(default="answer", description="Column with the reference answer (kind file).")
    reward: str = Field(default="verifier", description="verifier (the task's own), math (math-verify), or package.module:function.")
    train_size: int = Field(default=2048, ge=1, description="Training prompts generated or read.")
    held_out_size: int = Field(default=128, ge=1, description="Held-out prompts, disjoint from training.")
    seed: int = Field(default=1, ge=0, description="Seed of the procedural generator and of the split.")
    tokenizer: str = Field(
        default="auto",
        description="auto takes the one of model.hf_path, or trains a small one on the task's text; otherwise an HF tokenizer directory.",
    )
