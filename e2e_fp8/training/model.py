"""Build Qwen3 and Qwen3-MoE as Megatron-Core's GPTModel, wrapped for BF16, data parallelism and the distributed optimizer."""

from typing import Any

import torch
import torch.nn.functional as F

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.training.ground import Ground


def check_supported(cfg: Config) -> None:
    """Refuse what the engine does not do.

    Raises:
        ConfigError: uneven heads, or top-1 routing with renormalised probabilities.
    """
    model = cfg.model
    if model.num_attention_heads % model.num_key_value_heads:
        raise ConfigError("model.num_attention_heads must be a multiple of model.num_key_value_heads.")
    if model.is_moe and model.num_experts_per_tok > model.num_experts:
        raise ConfigError("model.num_experts_per_tok must be at most model.num_experts.")
    if model.is_moe and model.norm_topk_prob and model.num_experts_per_tok == 1:
        raise ConfigError(
            "model.num_experts_per_tok is 1 with model.norm_topk_prob: the probability would always be 1 and the router "
            "could not learn. Use two experts or set norm_topk_prob to false."
        )


def _parallel_kwargs(cfg: Config) -> dict[str, Any]:
    parallel = cfg.training.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": uses_sequence_parallel(cfg),
        "variable_seq_lengths": parallel.pipeline > 1,
        # The loss is divided by the denominator of all ranks, so data parallelism sums gradients instead of averaging them.
        "calculate_per_token_loss": True,
    }


def uses_sequence_parallel(cfg: Config) -> bool:
    """Megatron trains experts under tensor parallelism only with sequence parallelism."""
    return cfg.training.parallel.tensor > 1 and cfg.model.is_moe


def transformer_config(cfg: Config, ground: Ground) -> Any:
    """TransformerConfig of the model; initial values are loaded afterwards, so none are drawn here."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = cfg.model
    moe: dict[str, Any] = {}
    if model.is_moe:
        moe = {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.num_experts_per_tok,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_router_dtype": "fp32",
            # Softmax over the chosen logits equals softmax over all, then top-k, then renormalisation.
            "moe_router_pre_softmax": not model.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_fusion": False,
            "moe_permute_fusion": False,
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": cfg.training.router_replay.enabled,
        }
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.moe_intermediate_size if model.is_moe else model.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # The fused SwiGLU rounds once from FP32; the rollout engine rounds silu(gate) to BF16 first, as the unfused one does.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_parallel_kwargs(cfg),
        **moe,
        **ground.transformer_kwargs(cfg),
    )


def build_model(cfg: Config, ground: Ground, *, value_head: bool = False) -> tuple[list[Any], list[Any]]:
    """``(GPTModels, DistributedDataParallel around each)`` on the ground's device, weights undefined until loaded.

    One model per chunk of layers that this pipeline rank holds. With ``value_head`` its output is one value per token, not logits.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(cfg, ground)
    chunks = [_build_chunk(cfg, ground, config, index, value_head) for index in range(cfg.training.parallel.virtual_pipeline)]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        **ground.ddp_kwargs(),
    )
    wrapped = [
        DistributedDataParallel(config, settings, Float16Module(config, chunk), disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    return chunks, wrapped


def _build_chunk(cfg: Config, ground: Ground, config: Any, index: int, value_head: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from e2e_fp8.training.attention import PackedRotary
    from e2e_fp8.training.head import Fp32OutputLayer, ValueHead
    from e2e_fp8.training.router import set_router_precision

    choices = choices_of(cfg.numerics)
    stage = index if cfg.training.parallel.virtual_pipeline > 1 else None
    where = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=ground.layer_spec(cfg, config, stage),
        vocab_size=cfg.model.vocab_size,
        max_sequence_length=cfg.model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        position_embedding_type="rope",
        rotary_base=cfg.model.rope_theta,  # pyright: ignore[reportArgumentType]
        share_embeddings_and_output_weights=cfg.model.tie_word_embeddings,
        parallel_output=True,
        vp_stage=stage,
    ).to(ground.device)
    ground.arrange_parameters(model)
    if cfg.model.is_moe:
        set_router_precision(model, cfg.numerics.router_precision, QuantizationPlan.from_config(cfg))
    if model.post_process and value_head:
        model.output_layer = ValueHead(config, ground.device)  # pyright: ignore[reportAttributeAccessIssue]
    elif model.post_process:
        Fp32OutputLayer.become(model.output_layer, row_invariant=choices["head"] != "native")
    model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb, applied_by_attention=choices["rotary"] != "native")  # pyright: ignore[reportAttributeAccessIssue]
    return model


def build_optimizer(cfg: Config, ground: Ground, wrapped: list[Any]) -> Any:
    """Megatron's optimizer over FP32 masters kept by the distributed optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    training = cfg.training
    config = OptimizerConfig(
        optimizer="adam",
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **ground.optimizer_kwargs(),
    )
    return get_megatron_optimizer(config, wrapped)
