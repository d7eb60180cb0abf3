"""Export: un-interleaving is checked against an independent per-row reference, bytes with ==."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.export.fused import Part, split_gate_up, split_qkv
from e2e_fp8.export.hf_names import expected_hf_names, to_hf


def random_block(rows: int, columns: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale_inv = torch.rand((rows + 127) // 128, (columns + 127) // 128, generator=generator)
    return Part(weight=codes, scale_inv=scale_inv)


@settings(deadline=None, max_examples=25)
@given(
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    tiles=st.integers(1, 2),
    columns=st.sampled_from([128, 200]),
    seed=st.integers(0, 99),
)
def test_qkv_rows_and_their_scales_follow_each_other(groups, queries, tiles, columns, seed):
    head_dim = 128 * tiles
    fused = random_block(groups * (queries + 2) * head_dim, columns, seed)
    q, k, v = split_qkv(fused, num_heads=groups * queries, num_groups=groups, head_dim=head_dim)
    raw, scales = fused.weight.view(torch.uint8), fused.scale_inv

    def fused_row(kind: str, hf_row: int) -> int:
        head, inner = divmod(hf_row, head_dim)
        group, slot = divmod(head, queries) if kind == "q" else (head, queries + (kind == "v"))
        return (group * (queries + 2) + slot) * head_dim + inner

    for kind, part in (("q", q), ("k", k), ("v", v)):
        for hf_row in range(0, part.weight.shape[0], 64):
            source = fused_row(kind, hf_row)
            assert torch.equal(part.weight.view(torch.uint8)[hf_row], raw[source])
            assert torch.equal(part.scale_inv[hf_row // 128], scales[source // 128])


def test_gate_up_boundary_inside_a_tile_is_refused():
    with pytest.raises(ValueError, match="share FP8 tiles"):
        split_gate_up(random_block(2 * 192, 128, 0))
    gate, up = split_gate_up(random_block(512, 256, 1))
    assert gate.weight.shape == up.weight.shape == (256, 256)
    assert gate.scale_inv.shape == (2, 2)


def test_head_dim_64_is_refused():
    with pytest.raises(ValueError, match="head_dim 64"):
        split_qkv(random_block(4 * 64, 128, 0), num_heads=2, num_groups=1, head_dim=64)


def local_names(model: ModelConfig, grouped: bool) -> list[tuple[str, tuple[int, int]]]:
    hidden, width = model.hidden_size, model.moe_intermediate_size
    qkv_rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    names = [
        ("embedding.word_embeddings.weight", (128, hidden)),
        ("decoder.final_layernorm.weight", (hidden, 1)),
        ("output_layer.weight", (128, hidden)),
    ]
    for layer in range(model.num_hidden_layers):
        p = f"decoder.layers.{layer}."
        norm = p + ("self_attention.linear_qkv.layer_norm_weight" if grouped else "input_layernorm.weight")
        names += [
            (norm, (hidden, 1)),
            (p + "pre_mlp_layernorm.weight", (hidden, 1)),
            (p + "self_attention.linear_qkv.weight", (qkv_rows, hidden)),
        ]
        names += [(p + "self_attention.q_layernorm.weight", (128, 1)), (p + "self_attention.k_layernorm.weight", (128, 1))]
        names += [
            (p + "self_attention.linear_proj.weight", (hidden, model.num_attention_heads * 128)),
            (p + "mlp.router.weight", (8, hidden)),
        ]
        for e in range(model.num_experts):
            fc = f"mlp.experts.linear_fc{{}}.weight{e}" if grouped else f"mlp.experts.local_experts.{e}.linear_fc{{}}.weight"
            names += [(p + fc.format(1), (2 * width, hidden)), (p + fc.format(2), (hidden, width))]
    return names


@pytest.mark.parametrize("grouped", [False, True])
def test_every_name_of_the_architecture_comes_out_once(grouped):
    model = ModelConfig()
    weights = [(name, torch.zeros(shape, dtype=torch.bfloat16), None) for name, shape in local_names(model, grouped)]
    exported = [entry.name for entry in to_hf(weights, model)]
    assert len(exported) == len(set(exported))
    assert set(exported) == expected_hf_names(model)


def test_a_missing_or_unknown_tensor_is_an_error():
    model = ModelConfig()
    weights = [(name, torch.zeros(shape, dtype=torch.bfloat16), None) for name, shape in local_names(model, True)]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.7\.down_proj"):
        list(to_hf(weights[:-1], model))
    with pytest.raises(ValueError, match="No Hugging Face name is known"):
        list(to_hf([*weights, ("decoder.layers.0.mystery.weight", torch.zeros(1, 1), None)], model))
