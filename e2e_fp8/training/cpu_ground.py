"""CPU ground: gloo, Megatron's local layer spec, block-FP8 linears of this package."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.layout.megatron import Spec
from e2e_fp8.numerics.formats import TILE
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.patching import apply_all
from e2e_fp8.training.ground import local_expert_weights
from e2e_fp8.training.parallel import Parameter
from e2e_fp8.training.weights import hf_modules_of
from megatron_patches.cpu_device import megatron_on_cpu


class CpuGround:
    """Trains on the CPU; the FP8 bytes are the quantized BF16 parameters."""

    device = torch.device("cpu")
    process_group_backend = "gloo"
    spec: Spec = "local"
    token_multiple = 1

    def __init__(self) -> None:
        self._linear_of: dict[int, Any] = {}

    def scope(self) -> AbstractContextManager[None]:
        """Megatron's CUDA names mean the CPU inside."""
        return megatron_on_cpu()

    def prepare(self) -> None:
        """Apply the registered Megatron patches; nothing is drawn during training, so Megatron's forks of CUDA generators do nothing."""
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        from megatron_patches.registry import CPU_PATCHES

        apply_all(CPU_PATCHES)
        initialize_rng_tracker(inference_rng_tracker=True)

    def transformer_kwargs(self, cfg: Config) -> dict[str, Any]:
        """No fused kernels; FP8 is done by the linears, never by ``fp8=``, which Megatron ignores without Transformer Engine."""
        return {"use_cpu_initialization": True, "persist_layer_norm": False, "moe_grouped_gemm": False}

    def ddp_kwargs(self) -> dict[str, Any]:
        """Nothing beyond the common settings."""
        return {}

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Nothing beyond the common settings."""
        return {}

    def layer_spec(self, cfg: Config, config: Any, chunk: int | None) -> Any:
        """Megatron's local spec with this package's linears, also inside experts, norms and PackedAttention."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.moe.moe_layer import MoESubmodules
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

        from e2e_fp8.training.attention import AttentionOperators, EngineOrderSelfAttention, PackedAttention
        from e2e_fp8.training.fp8_linear import BlockFp8ColumnParallelLinear, BlockFp8RowParallelLinear
        from e2e_fp8.training.shared_modules import mlp_builder, moe_builder, norm_builder

        choices = choices_of(cfg.numerics)
        norm, qk_norm, final_norm = (norm_builder(choices[cause]) for cause in ("rms_norm", "qk_norm", "final_norm"))

        experts = cfg.model.num_experts if cfg.model.is_moe else None
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
        attention = spec.submodules.self_attention.submodules  # pyright: ignore[reportAttributeAccessIssue]
        spec.submodules.self_attention.module = EngineOrderSelfAttention  # pyright: ignore[reportAttributeAccessIssue]
        attention.linear_qkv = BlockFp8ColumnParallelLinear
        attention.linear_proj = BlockFp8RowParallelLinear
        attention.core_attention = partial(PackedAttention, operators=AttentionOperators.of(cfg, choices))
        attention.q_layernorm = attention.k_layernorm = qk_norm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm  # pyright: ignore[reportAttributeAccessIssue]
        linears = MLPSubmodules(linear_fc1=BlockFp8ColumnParallelLinear, linear_fc2=BlockFp8RowParallelLinear)
        if cfg.model.is_moe:
            moe = MoESubmodules(experts=partial(SequentialMLP, submodules=linears))
            spec.submodules.mlp = partial(moe_builder(choices), submodules=moe)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            spec.submodules.mlp = partial(mlp_builder(choices).as_mlp_submodule, submodules=linears)  # pyright: ignore[reportAttributeAccessIssue]
        return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, chunk), layer_norm=final_norm)  # pyright: ignore[reportArgumentType]

    def arrange_parameters(self, model: torch.nn.Module) -> None:
        """Nothing: the codes, not the parameters, are what the engine may share."""

    def configure_precision(self, linears: Sequence[Parameter], plan: QuantizationPlan) -> None:
        """Enable FP8 in every planned linear; all linears of the layers must be of this package's classes."""
        from e2e_fp8.training.fp8_linear import BlockFp8Mixin, LinearRecipe

        recipe = LinearRecipe.from_plan(plan)
        self._linear_of.clear()
        for entry in linears:
            name, linear = entry.name, entry.module
            wanted = {plan.training_fp8 and plan.is_fp8(module) for module in hf_modules_of(name)}
            if len(wanted) != 1:
                raise ConfigError(
                    f"numerics.high_precision_modules splits the fused linear {name}: list all of {hf_modules_of(name)} or none."
                )
            if not isinstance(linear, BlockFp8Mixin):
                raise ConfigError(
                    f"{name} is a {type(linear).__name__}, which cannot compute in block FP8 on the CPU; it would run in BF16 silently."
                )
            if wanted.pop():
                linear.enable_fp8(recipe)
                self._linear_of[id(linear.weight)] = linear
        self._stack_experts(linears)
        if plan.training_fp8 and not self._linear_of:
            raise ConfigError("numerics.training_precision is fp8, but numerics.high_precision_modules leaves no linear in FP8.")

    def _stack_experts(self, linears: Sequence[Parameter]) -> None:
        """One block of memory for the codes of a layer's experts, in order, as the rollout engine stacks them."""
        weights = {entry.name: entry.weight for entry in linears}
        for names in local_expert_weights(weights):
            experts = [self._linear_of[id(weights[name])] for name in names if id(weights[name]) in self._linear_of]
            if not experts:
                continue
            rows, columns = experts[0].weight.shape
            codes_ENK = torch.empty(len(experts), rows, columns, dtype=torch.uint8).view(torch.float8_e4m3fn)
            scale_inv_Enk = torch.empty(len(experts), -(-rows // TILE), -(-columns // TILE))
            for linear, codes, scale_inv in zip(experts, codes_ENK, scale_inv_Enk, strict=True):
                linear.place_quantized_weight(codes, scale_inv)

    def after_parameter_sync(self) -> None:
        """Quantize every FP8 linear's BF16 weight."""
        for linear in self._linear_of.values():
            linear.refresh_quantized_weight()

    @contextmanager
    def high_precision(self, chunks: Sequence[Any], master_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """The parameters beside the codes are bf16(FP32 master) already."""
        linears = list(self._linear_of.values())
        try:
            for linear in linears:
                linear.high_precision = True
            yield
        finally:
            for linear in linears:
                linear.high_precision = False

    def is_fp8(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter belongs to a linear in FP8."""
        return id(parameter) in self._linear_of

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales that the forward pass multiplies."""
        quantized = self._linear_of[id(parameter)].quantized_weight
        return quantized.codes, quantized.scale_inv

    def fp8_addresses(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Where those two lie."""
        quantized = self._linear_of[id(parameter)].quantized_weight
        return quantized.codes.data_ptr(), quantized.scale_inv.data_ptr()

    def rng_state(self) -> dict[str, torch.Tensor]:
        """torch's CPU generator."""
        return {"torch": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of ``rng_state``."""
        torch.set_rng_state(state["torch"])
