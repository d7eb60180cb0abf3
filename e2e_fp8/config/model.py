"""Architecture of the policy: Qwen3 (dense) or Qwen3-MoE, from fields or from a Hugging Face directory."""

from typing import Any, Literal

from pydantic import Field, model_validator

from e2e_fp8.config.base import Section
from e2e_fp8.config.hf import merge_hf_fields


class ModelConfig(Section):
    """Dimensions of the transformer. With ``hf_path`` set, they are read from its config.json; a field given here must agree with it."""

    hf_path: str | None = Field(
        default=None, description="Directory with config.json, tokenizer and safetensors; None builds from scratch."
    )
    architecture: Literal["qwen3", "qwen3_moe"] = Field(default="qwen3_moe", description="Model family; qwen3 is dense.")
    vocab_size: int = Field(default=128, ge=8, description="Rows of the embedding and the output head.")
    hidden_size: int = Field(default=256, ge=1, description="Width of the residual stream; a multiple of 128 under FP8.")
    num_hidden_layers: int = Field(default=2, ge=1, description="Transformer layers.")
    num_attention_heads: int = Field(default=2, ge=1, description="Query heads; a multiple of num_key_value_heads.")
    num_key_value_heads: int = Field(default=1, ge=1, description="Key and value heads (grouped-query attention).")
    head_dim: int = Field(default=128, ge=2, description="Width of one head; under FP8 all q rows and all k rows must be multiples of 128.")
    intermediate_size: int = Field(default=512, ge=1, description="Width of the dense SwiGLU block (qwen3); unused by qwen3_moe.")
    moe_intermediate_size: int = Field(default=128, ge=1, description="Width of one expert (qwen3_moe); a multiple of 128 under FP8.")
    num_experts: int = Field(default=8, ge=1, description="Experts per MoE layer (qwen3_moe).")
    num_experts_per_tok: int = Field(default=2, ge=1, description="Experts each token is sent to; at most num_experts.")
    norm_topk_prob: bool = Field(default=True, description="Renormalise the chosen experts' probabilities to sum to one.")
    rope_theta: float = Field(default=1_000_000.0, gt=0, description="Rotary base.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Epsilon of every RMSNorm.")
    max_position_embeddings: int = Field(default=512, ge=8, description="Longest sequence (prompt and response) in tokens.")
    tie_word_embeddings: bool = Field(default=False, description="Share the embedding with the output head.")
    initializer_range: float = Field(default=0.02, gt=0, description="Standard deviation of the normal initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _read_hf_path(cls, values: Any) -> Any:
        """Fill the dimensions from ``hf_path``; ConfigError when a given field disagrees with it."""
        return merge_hf_fields(values) if isinstance(values, dict) else values

    @property
    def is_moe(self) -> bool:
        """Whether feed-forward layers are mixtures of experts."""
        return self.architecture == "qwen3_moe"

    @property
    def num_parameters(self) -> int:
        """Weights of the model: linear layers, embedding, norms; a tied head is counted once."""
        m, width = self, self.moe_intermediate_size if self.is_moe else self.intermediate_size
        attention = 2 * m.hidden_size * m.head_dim * (m.num_attention_heads + m.num_key_value_heads) + 2 * m.head_dim
        blocks = m.num_experts if m.is_moe else 1
        router = m.num_experts * m.hidden_size if m.is_moe else 0
        layer = attention + blocks * 3 * m.hidden_size * width + router + 2 * m.hidden_size
        embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
        return m.num_hidden_layers * layer + embeddings + m.hidden_size
