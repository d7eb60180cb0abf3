"""Export: parts are views of the fused matrices, names complete, bytes compared with ==."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.model import ModelConfig
from e2e_fp8.export.fused import Part, split_rows
from e2e_fp8.export.hf_names import expected_hf_names, to_hf


def random_block(rows: int, columns: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale_inv = torch.rand((rows + 127) // 128, (columns + 127) // 128, generator=generator)
    return Part(weight=codes, scale_inv=scale_inv)


@settings(deadline=None, max_examples=25)
@given(
    tiles=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    columns=st.sampled_from([128, 200]),
    seed=st.integers(0, 99),
)
def test_parts_are_views_of_the_fused_rows_and_scale_tiles(tiles, columns, seed):
    fused = random_block(128 * sum(tiles), columns, seed)
    parts = split_rows(fused, [128 * count for count in tiles])
    raw, first = fused.weight.view(torch.uint8), 0
    for count, part in zip(tiles, parts, strict=True):
        assert torch.equal(part.weight.view(torch.uint8), raw[first : first + 128 * count])
        assert torch.equal(part.scale_inv, fused.scale_inv[first // 128 : first // 128 + count])
        assert part.weight.data_ptr() == fused.weight.data_ptr() + first * columns
        first += 128 * count


@pytest.mark.parametrize("rows", [(192, 192), (896, 64, 64), (576, 192)])
def test_a_boundary_inside_a_tile_is_refused(rows):
    with pytest.raises(ValueError, match="share FP8 tiles"):
        split_rows(random_block(sum(rows), 128, 0), rows)


def test_rows_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="do not make up"):
        split_rows(random_block(512, 128, 0), (256, 128))


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
