"""CUDA ground: NCCL, Transformer Engine, FP8 primary weights in Transformer Engine's blockwise tensors (Hopper)."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError
from e2e_fp8.layout.megatron import Spec
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.training.ground import local_expert_weights
from e2e_fp8.training.parallel import Parameter, local_device_index
from e2e_fp8.training.weights import hf_modules_of

SCALE_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Read by Transformer Engine when it is imported; exactly "1" gives FP32 scales, anything else powers of two."""


class CudaGround:
    """Trains on one Hopper GPU; the FP8 bytes are the primary weights."""

    process_group_backend = "cpu:gloo,cuda:nccl"
    token_multiple = 128

    def __init__(self, cfg: Config) -> None:
        self.choices = choices_of(cfg.numerics)
        # Transformer Engine fuses a norm into the linear behind it
        self.spec: Spec = "te" if self.choices["rms_norm"] == "native" else "te_norms"
        self.fp8 = cfg.numerics.training_precision == "fp8"
        self.power_2_scale = cfg.numerics.activation_power_2_scale
        self.weight_power_2_scale = cfg.numerics.weight_power_2_scale
        self.any_fp32_scale = cfg.numerics.any_fp32_scale
        self.amax_epsilon = cfg.numerics.amax_epsilon
        self.seed = cfg.run.seed
        torch.cuda.set_device(local_device_index())
        self.device = torch.device("cuda", torch.cuda.current_device())

    def scope(self) -> AbstractContextManager[None]:
        """Nothing to change."""
        return contextlib.nullcontext()

    def prepare(self) -> None:
        """Check the scale kind before Transformer Engine builds a quantizer, set its amax floor, seed Megatron's RNG tracker.

        Raises:
            ConfigError: Transformer Engine or a Hopper GPU is missing, or the scale variable contradicts ``numerics.scale_format``.
        """
        if self.fp8:
            if torch.cuda.get_device_capability()[0] != 9:
                raise ConfigError("Block-FP8 training with Transformer Engine needs a Hopper GPU (compute capability 9.x).")
            if (os.environ.get(SCALE_VARIABLE) == "1") != self.any_fp32_scale:
                raise ConfigError(
                    f"numerics.scale_format asks for {'FP32' if self.any_fp32_scale else 'power-of-two'} scales, but {SCALE_VARIABLE} is "
                    f"{os.environ.get(SCALE_VARIABLE)!r}. Set it to {'1' if self.any_fp32_scale else '0'} before Python starts."
                )
        try:
            from transformer_engine.common.recipe import Float8BlockScaling, QParams  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"Training on the GPU needs Transformer Engine, which cannot be imported ({error}).") from error
        if self.fp8:
            # Megatron builds its own recipe instances, so only the class attributes reach them.
            for slot, power_2_scale in (
                ("fp8_quant_fwd_inp", self.power_2_scale),
                ("fp8_quant_fwd_weight", self.weight_power_2_scale),
                ("fp8_quant_bwd_grad", self.power_2_scale),
            ):
                setattr(Float8BlockScaling, slot, QParams(power_2_scale=power_2_scale, amax_epsilon=self.amax_epsilon))
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(self.seed)

    def transformer_kwargs(self, cfg: Config) -> dict[str, Any]:
        """Block FP8 with FP8 primary weights."""
        kwargs: dict[str, Any] = {"moe_grouped_gemm": cfg.model.is_moe}
        if self.fp8:
            kwargs |= {
                "fp8": "hybrid" if cfg.numerics.backward_format == "e5m2" else "e4m3",
                "fp8_recipe": "blockwise",
                "fp8_param": True,
            }
        return kwargs

    def ddp_kwargs(self) -> dict[str, Any]:
        """FP8 bytes, not BF16, are gathered."""
        return {"fp8_param_gather": True} if self.fp8 else {}

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The optimizer must know that quantized parameters are blockwise."""
        return {"fp8_recipe": "blockwise"} if self.fp8 else {}

    def layer_spec(self, cfg: Config, config: Any, chunk: int | None) -> Any:
        """Megatron's Transformer Engine spec with PackedAttention, and with what trainer and engine share in place of its own."""
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

        from e2e_fp8.training.attention import AttentionOperators, EngineOrderSelfAttention, PackedAttention
        from e2e_fp8.training.shared_modules import mlp_builder, moe_builder, norm_builder

        choices = self.choices
        experts = cfg.model.num_experts if cfg.model.is_moe else None
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=cfg.model.is_moe, qk_layernorm=True)
        layer: Any = spec.submodules
        attention: Any = layer.self_attention.submodules
        layer.self_attention.module = EngineOrderSelfAttention
        attention.core_attention = partial(PackedAttention, operators=AttentionOperators.of(cfg, choices))
        mlp: Any = layer.mlp.keywords["submodules"]
        if choices["qk_norm"] != "native":
            attention.q_layernorm = attention.k_layernorm = norm_builder(choices["qk_norm"])
        if choices["rms_norm"] != "native":
            layer.input_layernorm = layer.pre_mlp_layernorm = norm_builder(choices["rms_norm"])
            attention.linear_qkv = TEColumnParallelLinear
            mlp = mlp if cfg.model.is_moe else replace(mlp, linear_fc1=TEColumnParallelLinear)
        if cfg.model.is_moe:
            layer.mlp = partial(moe_builder(choices), submodules=mlp)
        else:
            layer.mlp = partial(mlp_builder(choices).as_mlp_submodule, submodules=mlp)
        final_norm: Any = TENorm if choices["final_norm"] == "native" else norm_builder(choices["final_norm"])
        return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, chunk), layer_norm=final_norm)

    def arrange_parameters(self, model: torch.nn.Module) -> None:
        """Register each layer's experts last to first: Megatron fills its buffer from the last parameter, so they lie in order there."""
        for names in local_expert_weights(name for name, _ in model.named_parameters()):
            module_name, _, _ = names[0].rpartition(".")
            parameters = model.get_submodule(module_name)._parameters
            for name in reversed(names):
                leaf = name.rpartition(".")[2]
                parameters[leaf] = parameters.pop(leaf)

    def configure_precision(self, linears: Sequence[Parameter], plan: QuantizationPlan) -> None:
        """Check what Transformer Engine built; with FP8 primary weights single linears cannot be left out through GPTModel."""
        for entry in linears:
            name, parameter = entry.name, entry.weight
            wanted = {plan.training_fp8 and plan.is_fp8(module) for module in hf_modules_of(name)}
            if wanted != {plan.training_fp8}:
                raise ConfigError(
                    f"On the GPU either all linears of the layers are FP8 or none is, but numerics.high_precision_modules names {name}."
                )
            if self.is_fp8(parameter) != plan.training_fp8:
                raise ConfigError(f"{name} is a {type(parameter).__name__}: it would not run in {self._precision_name(plan)}.")
        if plan.training_fp8:
            self._check_quantizers(linears)
            self._stack_expert_scales(linears)

    @staticmethod
    def _precision_name(plan: QuantizationPlan) -> str:
        return "block FP8" if plan.training_fp8 else "BF16"

    def _check_quantizers(self, linears: Sequence[Parameter]) -> None:
        seen = 0
        for entry in linears:
            name, groups = entry.name, getattr(entry.module, "quantizers", None)
            for quantizer in [q for group in groups.values() for q in group] if isinstance(groups, dict) else []:
                if quantizer is None:
                    continue
                seen += 1
                # Weights alone have two-dimensional tiles.
                wanted = self.weight_power_2_scale if quantizer.block_scaling_dim == 2 else self.power_2_scale
                if quantizer.force_pow_2_scales != wanted or quantizer.amax_epsilon != self.amax_epsilon:
                    raise ConfigError(
                        f"A quantizer of {name} has force_pow_2_scales={quantizer.force_pow_2_scales} and amax_epsilon="
                        f"{quantizer.amax_epsilon}, but the configuration asks for {wanted} and {self.amax_epsilon}. "
                        f"Set {SCALE_VARIABLE} before Python starts."
                    )
        if not seen:
            raise ConfigError("Transformer Engine built no quantizer although numerics.training_precision is fp8.")

    @staticmethod
    def _stack_expert_scales(linears: Sequence[Parameter]) -> None:
        """One block of memory for the scales of a layer's experts, in order; Transformer Engine writes scales in place."""
        weight_of: dict[str, Any] = {entry.name: entry.weight for entry in linears}
        for names in local_expert_weights(weight_of):
            weights = [weight_of[name] for name in names]
            stacked = torch.stack([weight._rowwise_scale_inv for weight in weights])
            for weight, scale_inv in zip(weights, stacked, strict=True):
                weight._rowwise_scale_inv = scale_inv

    def after_parameter_sync(self) -> None:
        """Nothing: the parameters are the bytes."""

    @contextlib.contextmanager
    def high_precision(self, chunks: Sequence[Any], master_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Each module takes bf16(FP32 master) before its forward and gives it back after; Megatron enters no FP8 context."""
        modules = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(m.config): m.config for m in modules if getattr(getattr(m, "config", None), "fp8", None)}
        formats = {key: config.fp8 for key, config in configs.items()}
        handles: list[Any] = []
        try:
            for config in configs.values():
                config.fp8 = None
            for module in modules:
                fp8 = {leaf: weight for leaf, weight in module._parameters.items() if weight is not None and self.is_fp8(weight)}
                if fp8:
                    handles += _bf16_during_forward(module, fp8, master_of)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for key, config in configs.items():
                config.fp8 = formats[key]

    def is_fp8(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is one of Transformer Engine's blockwise tensors."""
        return hasattr(parameter, "_rowwise_scale_inv")

    def fp8_weight(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row-wise bytes as a view and the scales without the uninitialised columns that pad them to a multiple of 4."""
        fields = parameter.get_metadata()  # type: ignore[attr-defined]
        if not fields["is_2D_scaled"]:
            raise ConfigError("A weight is quantized in 1x128 tiles, not 128x128; the rollout engine cannot use it.")
        data = fields["rowwise_data"]
        return data.view(torch.float8_e4m3fn), fields["rowwise_scale_inv"][:, : math.ceil(data.shape[1] / 128)]

    def fp8_addresses(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Where those two lie, read from the attributes behind ``get_metadata``, which is slow."""
        return parameter._rowwise_data.data_ptr(), parameter._rowwise_scale_inv.data_ptr()  # type: ignore[attr-defined]

    def rng_state(self) -> dict[str, torch.Tensor]:
        """CPU generator, CUDA generator and Megatron's named CUDA streams."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        streams = {f"megatron/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}  # pyright: ignore[reportOptionalMemberAccess]
        return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), **streams}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of ``rng_state``."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states({k.removeprefix("megatron/"): v for k, v in state.items() if k.startswith("megatron/")})  # pyright: ignore[reportOptionalMemberAccess]


def _bf16_during_forward(
    module: torch.nn.Module, fp8: dict[str, torch.nn.Parameter], master_of: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any]:
    """Hooks that replace the FP8 parameters ``{leaf name: parameter}`` of a module while it runs; also put back when it raises."""

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        for leaf, parameter in fp8.items():
            # written past __setattr__: Transformer Engine's own wraps parameters that it is handed
            module._parameters[leaf] = torch.nn.Parameter(master_of(parameter).to(torch.bfloat16), requires_grad=False)

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(fp8)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
