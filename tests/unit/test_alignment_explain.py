"""Numbers, gates and words of ``align explain``, without an engine."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.alignment.capture import Recorder
from e2e_fp8.alignment.divergence import by_module, by_position, changed_experts, first_positions, token_metrics
from e2e_fp8.alignment.explain_plot import draw
from e2e_fp8.cli.align_explain import judged, print_record, sentences
from e2e_fp8.cli.main import main
from e2e_fp8.config.alignment import CAUSES
from e2e_fp8.config.alignment_explain import GROUPS, METRICS, WHAT_IF, violations
from e2e_fp8.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")

log_prob = st.floats(min_value=-3, max_value=0, width=32)
responses = st.lists(st.lists(st.tuples(log_prob, log_prob), min_size=1, max_size=5), min_size=1, max_size=6)


def sides(rows):
    return tuple([torch.tensor([pair[side] for pair in row]) for row in rows] for side in (0, 1))


@given(responses)
def test_token_metrics_are_their_formulas_over_all_tokens(rows):
    d = [ours - theirs for row in rows for ours, theirs in row]
    expected = {
        "mismatch_kl": math.fsum(math.exp(x) - 1 - x for x in d) / len(d),
        "abs_mean": math.fsum(abs(x) for x in d) / len(d),
        "abs_max": max(abs(x) for x in d),
        "tme": math.fsum(math.exp(abs(x)) for x in d) / len(d),
        "tme_max": math.exp(max(abs(x) for x in d)),
        "ratio_above_2": sum(abs(x) > math.log(2) for x in d) / len(d),
    }
    found = token_metrics(*sides(rows))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # |d| <= 3, so every term is below 24 and carries a few roundings of 2^-53 of that: under 1e-13
        assert found[name] == pytest.approx(value, abs=1e-12), name


@given(responses)
def test_equal_sides_are_exactly_zero_everywhere(rows):
    ours, _ = sides(rows)
    found = token_metrics(ours, ours)
    assert found == {"mismatch_kl": 0, "abs_mean": 0, "abs_max": 0, "tme": 1, "tme_max": 1, "ratio_above_2": 0}
    assert first_positions(ours, ours) == [None] * len(ours)
    assert all(p["differ"] == 0 and p["abs_max"] == 0 for p in by_position(ours, ours))


def test_sides_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        token_metrics([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="cannot be compared"):
        token_metrics([], [])


@given(responses)
def test_positions_count_and_locate_what_differs(rows):
    ours, theirs = sides(rows)
    found = by_position(ours, theirs)
    assert [p["position"] for p in found] == list(range(max(len(row) for row in rows)))
    for entry in found:
        gaps = [abs(row[entry["position"]][0] - row[entry["position"]][1]) for row in rows if len(row) > entry["position"]]
        assert (entry["tokens"], entry["differ"], entry["abs_max"]) == (len(gaps), sum(g > 0 for g in gaps), max(gaps))
        assert entry["abs_mean"] == pytest.approx(math.fsum(gaps) / len(gaps), abs=1e-14)
    assert first_positions(ours, theirs) == [next((i for i, (a, b) in enumerate(row) if a != b), None) for row in rows]


@given(st.integers(0, 2**31 - 1))
def test_changed_experts_counts_choices_that_the_other_side_lacks(seed):
    generator = torch.Generator().manual_seed(seed)
    layers, experts, top_k, lengths = 3, 6, 2, (4, 1, 5)

    def choices(n):
        return torch.rand(n, layers, experts, generator=generator).topk(top_k, dim=2).indices

    ours = [torch.zeros(n, layers, experts, dtype=torch.bool).scatter(2, choices(n), True) for n in lengths]
    theirs = [choices(n).int() for n in lengths]
    covered = [torch.rand(n, layers, generator=generator) > 0.3 for n in lengths]
    covered[0][0] = True
    expected = []
    for layer in range(layers):
        pairs = [
            bool(ours[s][t, layer, int(theirs[s][t, layer, slot])])
            for s, n in enumerate(lengths)
            for t in range(n)
            if covered[s][t, layer]
            for slot in range(top_k)
        ]
        expected.append(pairs.count(False) / len(pairs))
    assert changed_experts(ours, theirs, covered) == expected
    with pytest.raises(ValueError, match="no recorded choice"):
        changed_experts(ours, theirs, [torch.zeros_like(c) for c in covered])


def test_modules_are_compared_in_order_and_the_first_difference_is_placed():
    torch.manual_seed(torch.seed() % 2**31)
    order = ["embedding", "layers.0.qkv", "layers.0.router_logits", "layers.0.mlp", "logits"]
    ours = [{name: torch.randn(4, 3) for name in order if "router" not in name} for _ in range(2)]
    theirs = [{name: value.clone() for name, value in rows.items()} for rows in ours]
    theirs[1]["layers.0.mlp"][2, 1] += 1
    found = by_module(ours, theirs, order)
    assert [m.module for m in found] == [n for n in order if "router" not in n]
    assert [m.first_row for m in found] == [None, None, 2, None]
    assert [m.relative_error == 0 for m in found] == [True, True, False, True]
    size = math.sqrt(sum(float(rows["layers.0.mlp"].double().square().sum()) for rows in theirs))
    gap = abs(float(theirs[1]["layers.0.mlp"][2, 1].double() - ours[1]["layers.0.mlp"][2, 1].double()))
    assert found[2].relative_error == pytest.approx(gap / size, rel=1e-12)
    assert found[2].unequal == 1 / 24
    theirs[0]["logits"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="logits is"):
        by_module(ours, theirs, order)


def test_a_recorder_of_one_module_keeps_no_other():
    recorder = Recorder(only="router_weights")
    recorder.add("layers.1.router_weights", torch.ones(2, 3))
    recorder.add("layers.1.router_logits", torch.ones(2, 3))
    assert list(recorder.rows()) == ["layers.1.router_weights"]


def test_every_cause_has_a_part_and_no_name_is_used_twice():
    assert GROUPS.keys() == CAUSES.keys()
    assert not WHAT_IF.keys() & (CAUSES.keys() | {"baseline", "total"})


MEASURED = {"total": {"mismatch_kl": 2e-3, "abs_max": math.nan}, "attention": {"mismatch_kl": 1e-4}}


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ({"total": 2e-3, "attention": 1e-4}, []),
        ({"total": 1.9e-3}, ["alignment_gates.total is exceeded: total has mismatch_kl 0.002, above 0.0019"]),
        ({"total.abs_max": 10.0}, ["total has abs_max nan"]),
        ({"attention": 0.0, "total": 0.0}, ["attention has mismatch_kl", "total has mismatch_kl"]),
        ({"staleness": 1.0}, ["staleness cannot be judged, because no gradient: remove"]),
        ({"combine": 1.0}, ["combine cannot be judged, because this model has no such cause"]),
        ({"attention.changed_experts": 1.0}, ["changed_experts is not measured for it"]),
    ],
)
def test_a_gate_is_exceeded_above_its_threshold_and_never_passes_unmeasured(gates, words):
    found = violations(gates, MEASURED, {"staleness": "no gradient"})
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ("{atention: 1.0e-3}", "names 'atention'"),
        ("{attention.k3: 1.0e-3}", "asks for 'k3'"),
        ("{total: -1}", "alignment_gates.total is -1"),
        ("{total: .nan}", "alignment_gates.total is nan"),
    ],
)
def test_a_gate_that_judges_nothing_is_refused_at_parse_time(gates, words, capsys):
    assert main(["config", CONFIG, "--set", f"numerics.alignment_gates={gates}"]) == 2
    assert words in capsys.readouterr().err


def test_gates_are_no_change_of_numerics_that_a_resume_would_refuse():
    plain = load_config(CONFIG, []).numerics
    gated, other = (load_config(CONFIG, [f"numerics.{text}"]).numerics for text in ("alignment_gates={total: 1.0}", "scale_format=pow2"))
    assert gated != plain
    assert gated.ungated == plain.ungated != other.ungated


@pytest.mark.parametrize(
    ("target", "overrides", "words"),
    [
        (CONFIG, ["rollout.placement=server", "sync.transport=disk"], "rollout.placement is server"),
        (CONFIG, ["numerics.rollout_precision=bf16", "numerics.training_precision=bf16"], "numerics.rollout_precision is bf16"),
        (CONFIG, ["numerics.router_precision=fp32"], "router_precision is fp32"),
        (str(ROOT / "docs"), [], "is not a run folder"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_one_sentence(target, overrides, words, capsys):
    arguments = [item for override in ["run.backend=cpu", *overrides] for item in ("--set", override)]
    assert main(["align", "explain", target, *arguments]) == 2
    assert words in capsys.readouterr().err


def row(name, kind, kl):
    metrics = dict.fromkeys(METRICS, 0.0) | {"mismatch_kl": kl, "tme": 1.0, "tme_max": 1.0}
    return {"name": name, "group": "part", "kind": kind, "what": "why", "metrics": metrics, "changed_experts": [0.0, 0.25]}


def record():
    module = {"module": "layers.0.attention", "relative_error": 1e-3, "unequal": 0.5, "first_row": 3}
    return {
        "alignment": "fast", "samples": 4, "tokens": 9, "baseline_is_zero": True, "sampled_again_abs_max": 0.0,
        "rows": [
            row("baseline", "baseline", 0.0), row("attention", "cause", 1e-4), row("total", "total", 3e-4), row("staleness", "what_if", 1.0)
        ],
        "sum_of_causes": 1e-4, "total": 3e-4, "first_module": module, "modules": [module],
        "hidden_modules": ["input_norm"],
        "positions": [{"position": 0, "tokens": 4, "differ": 2, "abs_mean": 1e-3, "abs_max": 2e-3}],
        "first_position": {"earliest": 0, "responses_that_differ": 2, "responses": 4},
        "not_measured": {"top_p": "there is no setting"}, "failed": [], "gates": {}, "violations": [],
    }  # fmt: skip


def test_the_table_names_every_row_and_the_sentences_say_what_it_leaves_out(capsys):
    print_record(record())
    printed = capsys.readouterr().out
    for part in ("baseline", "attention", "staleness *", "25.00 %", "1.00e-04", "top_p", "not measured"):
        assert part in printed
    text = "\n".join(sentences(record()))
    for part in (
        "interactions +0.0002",
        "first module that differs: layers.0.attention, token 3",
        "layer 0: first attention",
        "from token 0",
        "not measured: top_p",
        "do not show: input_norm",
        "equal bit for bit",
    ):
        assert part in text


def test_the_exit_code_is_1_for_a_gate_or_a_baseline_that_is_not_zero(capsys):
    assert judged(record()) == 0
    assert judged(record() | {"violations": ["total is exceeded."]}) == 1
    assert capsys.readouterr().err == "e2e-fp8: total is exceeded.\n"
    assert judged(record() | {"failed": ["top_p"]}) == 1
    assert "The row top_p could not be measured: there is no setting." in capsys.readouterr().err
    assert judged(record() | {"baseline_is_zero": False}) == 1
    assert "baseline" in capsys.readouterr().err


def test_the_plot_is_a_png_also_when_nothing_differs(tmp_path):
    equal = {"module": "embedding", "relative_error": 0.0, "unequal": 0.0, "first_row": None}
    for index, drawn in enumerate([record(), record() | {"rows": [row("baseline", "baseline", 0.0)], "modules": [equal]}]):
        path = tmp_path / f"{index}.png"
        draw(json.loads(json.dumps(drawn)), path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_documentation_lists_rows_and_metrics():
    text = (ROOT / "docs" / "alignment.md").read_text()
    assert all(f"`{name}`" in text for name in (*WHAT_IF, *METRICS))
