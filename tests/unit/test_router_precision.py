"""Router logits in a stated precision: the arithmetic, and the trainer's and the engine's plans of it."""

import pytest
import torch
from references.router_reference import router_logits as reference
from training_cases import fresh_generator, random_batch, small_config

from e2e_fp8.config.load import parse_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, EngineError
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.numerics.router import router_logits
from e2e_fp8.rollout.agreement import _check_plan, planned_facts
from e2e_fp8.rollout.engine import engine_args
from e2e_fp8.rollout.router_gate import GateRecipe
from e2e_fp8.training.engine import MegatronEngine

PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
FORMATS = pytest.mark.parametrize(("x_pow2", "w_pow2"), [(False, False), (True, False), (False, True)])


def plan_of(x_pow2: bool, w_pow2: bool, **numerics) -> QuantizationPlan:
    kinds = {"activation_scale_format": "pow2" if x_pow2 else "fp32", "weight_scale_format": "pow2" if w_pow2 else "fp32"}
    return QuantizationPlan.from_config(Config.model_validate({"numerics": kinds | numerics}))


def operands(experts: int, hidden: int, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = fresh_generator()
    x = torch.randn(tokens, hidden, generator=generator) * 10 ** (2 * torch.rand(tokens, 1, generator=generator))
    return x.bfloat16(), (0.06 * torch.randn(experts, hidden, generator=generator)).bfloat16()


def error_bound(x: torch.Tensor, w: torch.Tensor, exact: torch.Tensor, precision: str) -> torch.Tensor:
    """Largest error of any order of FP32 sums, (K + 2) u sum|x||w|, and half a BF16 unit of the result where that is rounded.

    FP8 values are at most 1/16 larger than the unquantized ones, which the factor 1.2 covers for both operands.
    """
    sums = 1.2 * (x.shape[1] + 2) * 2.0**-24 * (x.double().abs() @ w.double().abs().T)
    return sums if precision == "fp32" else sums + (exact.abs() + sums) * 2.0**-8


@PRECISIONS
@FORMATS
@pytest.mark.parametrize(("experts", "hidden"), [(4, 256), (8, 200), (130, 128)])
def test_logits_are_the_references_to_the_rounding_of_their_sums(precision, x_pow2, w_pow2, experts, hidden):
    x, weight = operands(experts, hidden)
    logits = router_logits(x, weight, precision, plan_of(x_pow2, w_pow2))
    exact = reference(x, weight, precision, x_pow2, w_pow2)
    assert logits.dtype == torch.float32
    assert bool(((logits.double() - exact).abs() <= error_bound(x, weight, exact, precision)).all())
    if precision != "fp32":
        assert torch.equal(logits, logits.bfloat16().float())


@FORMATS
def test_an_fp8_logit_is_the_exact_sum_of_two_tiles_rounded(x_pow2, w_pow2):
    """Block sums are exact and one block is one product of scales: with K = 128 every rounding is known."""
    x, weight = operands(5, 128)
    exact = reference(x, weight, "fp8", x_pow2, w_pow2)
    logits = router_logits(x, weight, "fp8", plan_of(x_pow2, w_pow2))
    # float32 product of scales, float32 product with the sum, BF16: three roundings, the last of which dominates
    assert bool(((logits.double() - exact).abs() <= exact.abs() * (2.0**-8 + 4 * 2.0**-24)).all())


@PRECISIONS
def test_rows_do_not_know_their_neighbours_and_leading_axes_are_kept(precision):
    x, weight = operands(4, 128, tokens=12)
    whole = router_logits(x.view(3, 4, 128), weight, precision, plan_of(False, False))
    assert whole.shape == (3, 4, 4)
    assert torch.equal(whole.view(12, 4), router_logits(x, weight, precision, plan_of(False, False)))


@PRECISIONS
def test_trainer_computes_its_logits_so_and_learns_through_them(precision):
    cfg = small_config(numerics={"router_precision": precision})
    engine = MegatronEngine(cfg)
    router = engine.model.decoder.layers[0].mlp.router
    x, _ = operands(4, cfg.model.hidden_size)
    with engine.ground.scope():
        seen = router.gating(x.clone().requires_grad_())
    expected = router_logits(x, router.weight.detach(), precision, engine.plan)
    if precision == "fp32":
        # Megatron's own function: the same operands, its own order of sums
        bound = error_bound(x, router.weight.detach(), expected.double(), precision)
        assert bool(((seen - expected).abs() <= 2 * bound).all())
    else:
        assert torch.equal(seen, expected)
    seen.square().sum().backward()
    assert float(router.weight.grad.abs().sum() if router.weight.grad is not None else router.weight.main_grad.abs().sum()) > 0


def test_precisions_give_three_different_policies():
    batch = random_batch([40, 20], fresh_generator())
    found = []
    for precision in ("bf16", "fp32", "fp8"):
        engine = MegatronEngine(small_config(numerics={"router_precision": precision}))
        found.append(engine.token_stats([batch])[0].log_probs.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_mixed_is_megatrons_fp32_and_vllms_bf16():
    batch = random_batch([40, 20], fresh_generator())
    mixed, fp32 = (MegatronEngine(small_config(numerics={"router_precision": p})).token_stats([batch])[0] for p in ("mixed", "fp32"))
    assert torch.equal(mixed.log_probs, fp32.log_probs)
    assert planned_facts(small_config())["router_precision"] == "bf16"


@pytest.mark.parametrize(("precision", "options"), [("mixed", False), ("bf16", False), ("fp32", True), ("fp8", True)])
def test_engine_is_told_what_vllm_does_not_do_by_itself(tmp_path, precision, options):
    cfg = small_config(numerics={"router_precision": precision, "weight_scale_format": "pow2"})
    told = engine_args(cfg, tmp_path, device="cpu", is_moe=True, fp8=True)["additional_config"]["e2e_fp8"].get("router")
    assert (told is not None) is options
    if told:
        recipe = GateRecipe(**told)
        assert (recipe.precision, recipe.weight_power_2_scale, recipe.power_2_scale) == (precision, True, False)


def test_an_engine_with_another_router_is_refused():
    planned = planned_facts(small_config(numerics={"router_precision": "fp32"}))
    with pytest.raises(EngineError, match="router_precision is fp32 in the trainer's plan and bf16 at rollout rank 0: pass the run's"):
        _check_plan(planned, planned | {"router_precision": "bf16"}, "rollout rank 0")
    _check_plan(planned, dict(planned), "rollout rank 0")


def test_a_dense_model_has_no_router_to_set():
    with pytest.raises(ConfigError, match="router_precision is fp8, but qwen3 has no router: remove the field"):
        parse_config({"model": {"architecture": "qwen3"}, "numerics": {"router_precision": "fp8"}})
    assert planned_facts(parse_config({"model": {"architecture": "qwen3"}}))["router_precision"] is None
