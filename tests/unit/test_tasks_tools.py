"""Tools, episodes of several turns, and masks: what a tool wrote is never trained."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.config.task import ToolConfig
from e2e_fp8.errors import ConfigError
from e2e_fp8.orchestration.batching import pack_samples, response_values, with_old_log_probs
from e2e_fp8.orchestration.episodes import joined
from e2e_fp8.tasks.tools import calculator, load_tools, tool_call, tool_result
from e2e_fp8.types import Prompt, Sample

PROMPT = Prompt(uid="t-1", text="2 + 2", token_ids=(5, 6), answer="4")


def _turn(prompt: Prompt, tokens: tuple[int, ...], text: str = "", version: int = 3) -> Sample:
    return Sample(
        prompt=prompt,
        group_id=0,
        response_token_ids=tokens,
        response_text=text,
        rollout_log_probs=tuple(-0.25 * t for t in tokens),
        routed_experts=None,
        finish_reason="stop",
        policy_version=version,
    )


def _continued(sample: Sample, tool: tuple[int, ...]) -> Prompt:
    return replace(sample.prompt, token_ids=(*sample.prompt.token_ids, *sample.response_token_ids, *tool))


def shout(text: str) -> str:
    """A user's tool."""
    return text.upper()


def test_turns_join_into_one_sequence_with_tool_tokens_masked() -> None:
    first = _turn(PROMPT, (7, 8), "<tool>")
    second = _turn(_continued(first, (1, 2, 3)), (9,), "x")
    both = joined(first, (1, 2, 3), second)
    third = _turn(_continued(both, (4,)), (10, 11), "end")
    episode = joined(both, (4,), third)
    assert episode.prompt == PROMPT
    assert episode.response_token_ids == (7, 8, 1, 2, 3, 9, 4, 10, 11)
    assert episode.response_mask == (True, True, False, False, False, True, False, True, True)
    assert episode.rollout_log_probs == (-1.75, -2.0, 0, 0, 0, -2.25, 0, -2.5, -2.75)
    assert (episode.response_text, episode.group_id) == ("end", 0)
    with pytest.raises(ValueError, match="does not continue"):
        joined(first, (1, 2), second)
    with pytest.raises(ValueError, match="policy versions 3 and 4"):
        joined(first, (1, 2, 3), replace(second, policy_version=4))


segments = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4)


@given(st.lists(segments, min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_packed_masks_are_those_of_an_independent_walk(episodes: list[list[tuple[int, int]]], seed: int) -> None:
    draw, samples, expected = random.Random(seed), [], []
    for turns in episodes:
        tokens, mask, log_probs = [], [], []
        for sampled, tool in turns:
            for is_tool, count in ((False, sampled), (True, tool)):
                for _ in range(count):
                    tokens.append(draw.randrange(100))
                    mask.append(not is_tool)
                    log_probs.append(-draw.random())
        samples.append(replace(_turn(PROMPT, tuple(tokens)), rollout_log_probs=tuple(log_probs), response_mask=tuple(mask)))
        expected.append([(t, p) for t, p, m in zip(tokens, log_probs, mask, strict=True) if m])
    advantages = torch.arange(1.0, len(samples) + 1)
    batches = pack_samples(samples, advantages, max_tokens=40, device="cpu")
    trained = [
        (int(b.targets[i]), float(b.rollout_log_probs[i]), float(b.advantages[i]))
        for b in batches
        for i in torch.nonzero(b.loss_mask)[:, 0]
    ]
    assert trained == [(t, float(torch.tensor(p)), float(a)) for row, a in zip(expected, advantages, strict=True) for t, p in row]
    for b in batches:
        silent = b.loss_mask == 0
        scored = with_old_log_probs(b, torch.randn(b.loss_mask.shape))
        for values in (b.advantages, b.rollout_log_probs, scored.old_log_probs):
            assert not values[silent].any()
    assert [len(v) for v in response_values(batches, [b.loss_mask for b in batches])] == [len(row) for row in expected]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 mask entries for 2 response tokens"):
        pack_samples([replace(_turn(PROMPT, (1, 2)), response_mask=(True,))], torch.zeros(1), max_tokens=9, device="cpu")


def test_a_mask_of_ones_changes_nothing() -> None:
    plain = _turn(PROMPT, (1, 2, 3))
    masked = replace(plain, response_mask=(True,) * 3)
    (a,), (b,) = (pack_samples([s], torch.ones(1), max_tokens=9, device="cpu") for s in (plain, masked))
    assert torch.equal(a.loss_mask, b.loss_mask)
    assert torch.equal(a.advantages, b.advantages)
    assert torch.equal(a.rollout_log_probs, b.rollout_log_probs)


def test_calls_are_read_from_the_end_of_a_turn() -> None:
    assert tool_call("so <tool>calculator: 2*(3+4)</tool>") == ("calculator", "2*(3+4)")
    assert tool_call("<tool>a: 1</tool> then <tool> b : 2 </tool>") == ("b", "2")
    assert tool_call("<tool>a: 1</tool>\n") == ("a", "1")
    for text in ("", "<tool>calculator: 1", "calculator: 1</tool>", "<tool>no colon</tool>", "<tool>a: 1</tool> <tool>b: 2"):
        assert tool_call(text) is None


def test_results_and_errors_are_what_the_policy_reads() -> None:
    tools = load_tools(ToolConfig(names=("calculator", f"{__name__}:shout")))
    assert tool_result(("calculator", "2*(3+4)"), tools) == "<result>14</result>"
    assert tool_result((f"{__name__}:shout", "a"), tools) == "<result>A</result>"
    assert tool_result(("calculator", "1/0"), tools) == "<result>error: ZeroDivisionError: division by zero</result>"
    assert tool_result(("search", "x"), tools) == "<result>error: no tool search</result>"


expressions = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=8,
)


@given(expressions)
def test_calculator_is_exact_on_whole_numbers(text: str) -> None:
    assert Fraction(calculator(text)) == eval(text, {"__builtins__": {}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "__import__('os')",
        "(1).real",
        "'a' * 9",
        "9**9**9",
        "10**64*10**64*10**64*10**64",
        "(-8)**0.5",
        "True",
        "[1]",
        "1 +",
        "((" * 500,
    ],
)
def test_calculator_refuses_all_else_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|only numbers|too large"):
        calculator(text)


def test_tools_need_a_stop_string_and_a_known_name() -> None:
    with pytest.raises(ConfigError, match=r"add '</tool>' to rollout\.stop"):
        Config.model_validate({"task": {"tools": {"names": ["calculator"]}}})
    with pytest.raises(ConfigError, match=r"task\.tools\.names has 'abacus'"):
        Config.model_validate({"task": {"tools": {"names": ["abacus"]}}, "rollout": {"stop": ["</tool>"]}})
    with pytest.raises(ConfigError, match=r"task\.tools\.names: json:no_such cannot be imported"):
        load_tools(ToolConfig(names=("json:no_such",)))
