"""Random small models and parallel sizes that divide them, for the layout tests."""

import math
from typing import Any

from hypothesis import strategies as st
from references.layout_reference import Sizes, head_dim, num_experts

from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
from e2e_fp8.layout.plan import Plan

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "deepseek_v3")


def plan_of(config: dict[str, Any], sizes: Sizes) -> Plan:
    """The plan of these sizes."""
    train = MegatronParallel(
        tensor=sizes.tp, pipeline=sizes.pp, virtual_pipeline=sizes.vpp, expert=sizes.ep, expert_tensor=sizes.etp, data=sizes.dp
    )
    rollout = EngineParallel(tensor=sizes.rollout_tp, data=sizes.rollout_dp, expert=sizes.rollout_ep)
    return Plan.from_config(config, train, rollout, qkv_order=sizes.order, spec=sizes.spec)


def divisors(*numbers: int, most: int = 4) -> list[int]:
    """Common divisors of the numbers up to ``most``."""
    return [n for n in range(1, most + 1) if math.gcd(*numbers) % n == 0]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json; widths are multiples of 32, often not of 128."""
    family = draw(st.sampled_from(FAMILIES))
    groups, per_group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 2, 1, 3, 7]))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 128,
        "num_hidden_layers": draw(st.sampled_from([4, 2, 1])),
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([128, 64, 32, 192])),
        "intermediate_size": draw(st.sampled_from([512, 256, 384]) | st.integers(1, 16).map(lambda n: 32 * n)),
        "vocab_size": draw(st.integers(1, 150)),
        "tie_word_embeddings": family != "deepseek_v3" and draw(st.booleans()),
    }
    if family in ("qwen3_moe", "deepseek_v3"):
        config |= {"moe_intermediate_size": draw(st.sampled_from([256, 128, 512, 64, 192]))}
        config["num_experts" if family == "qwen3_moe" else "n_routed_experts"] = draw(st.sampled_from([4, 2, 6]))
    if family == "deepseek_v3":
        sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
        config |= sizes | {"first_k_dense_replace": draw(st.integers(0, 1)), "n_shared_experts": draw(st.integers(1, 2))}
    return config


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], Sizes]:
    """A model and sizes that divide it on both sides."""
    config = draw(models())
    heads, groups, layers = config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]
    experts, moe_width = num_experts(config), config.get("moe_intermediate_size", 0)
    widths = [config["intermediate_size"], *([moe_width * config.get("n_shared_experts", 1)] if experts else [])]
    latent = config["model_type"] == "deepseek_v3"
    ranks_of_latents = [config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]] if latent else []
    possible = [n for n in divisors(heads, *widths, *ranks_of_latents) if groups % n == 0 or n % groups == 0]
    order = draw(st.sampled_from(["megatron", "engine"]))
    if not latent and order == "engine":
        tensor = [n for n in possible if n <= groups]
    else:
        tensor = [n for n in possible if latent or (heads + 2 * groups) * head_dim(config) % n == 0]
    tp, pp = draw(st.sampled_from(tensor)), draw(st.sampled_from(divisors(layers)))
    vpp = draw(st.sampled_from([None, *divisors(layers // pp)])) if pp > 1 else None
    ep = draw(st.sampled_from(divisors(experts))) if experts else 1
    etp = draw(st.sampled_from(divisors(moe_width, most=2))) if experts else tp
    dp = math.lcm(tp, ep * etp) // tp * draw(st.sampled_from([1, 2]))
    rollout_tp = draw(st.sampled_from([n for n in possible if (-(-config["vocab_size"] // 64) * 64) % n == 0]))
    rollout_ep = experts > 0 and draw(st.booleans())
    ranks = [n for n in (1, 2) if (n * rollout_tp <= experts if rollout_ep else moe_width % (n * rollout_tp) == 0)]
    if not ranks:
        rollout_tp, ranks = 1, [1]
    spec = draw(st.sampled_from(["te", "te_norms", "local"]))
    return config, Sizes(tp, pp, vpp, ep, etp, dp, rollout_tp, draw(st.sampled_from(ranks)), rollout_ep, order, spec)
