"""Data sets, splits, rewards: what a user can hand in, and one sentence for everything that is wrong with it."""

import json
import random
import string
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, DataError
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.tasks.rewards import math_reward, strict_score, user_reward
from e2e_fp8.types import Prompt

SPELL = {"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}, "train_size": 96, "held_out_size": 32}


def _config(task: dict, **sections: dict) -> Config:
    return Config.model_validate({"task": task, **sections})


def _file_task(path: Path, **fields: object) -> dict:
    return {"kind": "file", "path": str(path), "train_size": 64, "held_out_size": 4, **fields}


def _write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _rows(count: int) -> list[dict]:
    return [{"prompt": f"double {i}", "answer": str(2 * i)} for i in range(count)]


def _double(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    """User reward of the tests: all four arguments reach it."""
    return float(int(response_text) == 2 * int(prompt_text.split()[1]) == int(answer)) * metadata["weight"]


def _broken(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    raise KeyError("rubric")


def _infinite(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    return float(response_text)


def _prompt(text: str = "1 + 1 =", answer: str = "2") -> Prompt:
    return Prompt(uid="p-7", text=text, token_ids=(3,), answer=answer)


def test_reasoning_gym_split_is_disjoint_deterministic_and_sized() -> None:
    seed = random.randrange(10_000)
    first, second = (load_task(_config({**SPELL, "seed": seed})) for _ in range(2))
    other = load_task(_config({**SPELL, "seed": seed + 1_000_000}))
    assert [(p.uid, p.text, p.token_ids, p.answer) for p in first.train] == [(p.uid, p.text, p.token_ids, p.answer) for p in second.train]
    assert [p.text for p in first.held_out] == [p.text for p in second.held_out]
    assert [p.text for p in first.train] != [p.text for p in other.train]
    assert len(first.train) == 96
    assert len(first.held_out) == 32
    texts = [p.text for p in (*first.train, *first.held_out)]
    assert len(set(texts)) == len(texts)
    assert len({p.uid for p in (*first.train, *first.held_out)}) == len(texts)


def test_held_out_set_does_not_depend_on_how_much_is_trained_on_from_a_file(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "d.jsonl", _rows(40))
    small, large = (load_task(_config(_file_task(path, train_size=n))) for n in (3, 30))
    assert [p.text for p in small.held_out] == [p.text for p in large.held_out]
    assert [p.text for p in small.train] == [p.text for p in large.train[:3]]


def test_verifier_is_the_data_sets_own_with_partial_credit() -> None:
    task = load_task(_config(SPELL))
    prompt = task.train[0]
    word = prompt.text.rsplit(" ", 1)[1]
    assert prompt.answer == word[::-1]
    assert task.score(prompt, prompt.answer) == 1.0
    assert task.score(prompt, f" {prompt.answer}\n") == 1.0
    assert task.score(prompt, "") == 0.0
    one_right = prompt.answer[0] + "00"
    assert task.score(prompt, one_right) == pytest.approx(1 / 3)


def test_unknown_data_set_and_refused_parameters_name_the_fields() -> None:
    with pytest.raises(ConfigError, match=r"task\.name spel_backward"):
        load_task(_config({"name": "spel_backward"}))
    with pytest.raises(ConfigError, match=r"task\.params .*min_word_len must be positive"):
        load_task(_config({**SPELL, "params": {"min_word_len": 0}}))
    with pytest.raises(ConfigError, match=r"task\.params .*no_such"):
        load_task(_config({**SPELL, "params": {"no_such": 1}}))


def test_too_few_distinct_prompts_name_the_counts() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match=r"chain_sum has \d+ distinct prompts, not enough for task\.held_out_size 5000"):
        load_task(_config({"params": params, "train_size": 10, "held_out_size": 5000}))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_file_columns_reach_the_prompt(tmp_path: Path, suffix: str) -> None:
    rows = [{"q": f"double {i}", "a": 2 * i, "level": i % 3} for i in range(20)]
    path = tmp_path / f"d.{suffix}"
    if suffix == "jsonl":
        _write_jsonl(path, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = load_task(_config(_file_task(path, prompt_field="q", answer_field="a")))
    by_text = {p.text: p for p in (*task.train, *task.held_out)}
    assert set(by_text) == {row["q"] for row in rows}
    for row in rows:
        assert by_text[row["q"]].answer == str(row["a"])
        assert by_text[row["q"]].metadata == {"level": row["level"]}
    prompt = task.train[0]
    assert task.score(prompt, f" {prompt.answer} ") == 1.0
    assert task.score(prompt, prompt.answer + "0") == 0.0


def test_uid_of_a_file_prompt_is_its_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in _rows(12)) + "\n")
    task = load_task(_config(_file_task(path)))
    for prompt in task.train:
        assert json.loads(path.read_text().split("\n")[int(prompt.uid.split(":")[1]) - 1])["prompt"] == prompt.text


def test_line_separators_inside_json_strings_do_not_split_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"a\u2028b\x85c {i}", "answer": str(i)} for i in range(8)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task = load_task(_config(_file_task(path)))
    assert {p.text for p in (*task.train, *task.held_out)} == {row["prompt"] for row in rows}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: no prompt was found"),
        (b"\n\n", "is empty: no prompt was found"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": \n', r"d\.jsonl line 2 is not JSON"),
        (b'{"prompt": "a", "answer": "b"}\n[1]\n', r"d\.jsonl line 2 is not a JSON object"),
        (b'{"prompt": "a"}\n', r"d\.jsonl line 1 has no column 'answer'; it has \['prompt'\]"),
        (b'{"prompt": null, "answer": "b"}\n', r"d\.jsonl line 1 has no column 'prompt'"),
        (b'{"prompt": "\xff", "answer": "b"}\n', r"d\.jsonl cannot be read as UTF-8"),
        (b'{"prompt": "a", "answer": "b"}\n', r"1 distinct prompts, not enough for task\.held_out_size 4"),
    ],
)
def test_unusable_files_name_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_task(_config(_file_task(path)))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        load_task(_config(_file_task(tmp_path / "nowhere.jsonl")))
    (tmp_path / "d.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"d\.csv is neither \.jsonl nor \.parquet"):
        load_task(_config(_file_task(tmp_path / "d.csv")))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 truncated")
    with pytest.raises(DataError, match=r"d\.parquet is not a readable parquet file"):
        load_task(_config(_file_task(tmp_path / "d.parquet")))
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match=r"folder\.parquet"):
        load_task(_config(_file_task(tmp_path / "folder.parquet")))


def test_prompt_longer_than_the_window_names_uid_length_and_limit(tmp_path: Path) -> None:
    noise = random.Random(random.randrange(1 << 30))
    rows = [{"prompt": "".join(noise.choices(string.ascii_letters, k=20)), "answer": "x"} for _ in range(20)]
    rows[13]["prompt"] = "".join(noise.choices(string.ascii_letters, k=29))
    path = _write_jsonl(tmp_path / "d.jsonl", rows)
    window = {"max_response_tokens": 4, "max_model_len": 32}
    with pytest.raises(DataError, match=r"prompt d\.jsonl:14 has 29 tokens, more than the 28"):
        load_task(_config(_file_task(path), rollout=window))
    rows[13]["prompt"] = rows[13]["prompt"][:28]
    _write_jsonl(path, rows)
    assert max(len(p.token_ids) for t in [load_task(_config(_file_task(path), rollout=window))] for p in (*t.train, *t.held_out)) == 28


def test_empty_prompts_and_answers_are_refused(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "d.jsonl", [*_rows(9), {"prompt": "", "answer": "0"}])
    with pytest.raises(DataError, match=r"prompt d\.jsonl:10 is empty"):
        load_task(_config(_file_task(path)))
    _write_jsonl(path, [{"prompt": f"double {i}", "answer": ""} for i in range(9)])
    load_task(_config(_file_task(path)))
    with pytest.raises(DataError, match=r"has no reference answer, which the warm start trains on"):
        load_task(_config(_file_task(path), training={"warm_start": {"steps": 1}}))


def test_math_reward_compares_values_not_text() -> None:
    half = _prompt(answer=r"\frac{1}{2}")
    assert math_reward(half, r"so it is $\frac{2}{4}$") == 1.0
    assert math_reward(half, "the answer is 0.5") == 1.0
    assert math_reward(half, "the answer is 0.51") == 0.0
    assert math_reward(half, "") == 0.0
    with pytest.raises(DataError, match=r"prompt p-7 raised ValueError: no mathematical expression"):
        strict_score(math_reward, _prompt(answer=""), "2")


def test_math_reward_is_selected_by_the_config(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "d.jsonl", _rows(9))
    task = load_task(_config(_file_task(path, reward="math")))
    prompt = task.train[0]
    assert task.score(prompt, f"${2 * int(prompt.answer)}/2$") == 1.0
    assert task.score(prompt, f"${int(prompt.answer) + 1}$") == 0.0


def test_user_reward_receives_all_four_arguments(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "d.jsonl", [{**row, "weight": 0.25} for row in _rows(9)])
    task = load_task(_config(_file_task(path, reward=f"{__name__}:_double")))
    assert task.score(task.train[0], task.train[0].answer) == 0.25
    assert task.score(task.train[0], "1") == 0.0


def test_user_reward_that_cannot_be_imported_is_a_config_error() -> None:
    for path, message in (
        ("no_such_module:f", "No module named"),
        ("json:no_such", "no_such"),
        ("json:__name__", "is a str, not a function"),
    ):
        with pytest.raises(ConfigError, match=rf"task\.reward: {path} .*{message}"):
            user_reward(path)


def test_reward_that_raises_names_prompt_and_exception() -> None:
    with pytest.raises(DataError, match=r"prompt p-7 raised KeyError: 'rubric' .*response 'seven'"):
        strict_score(user_reward(f"{__name__}:_broken"), _prompt(), "seven")
    with pytest.raises(DataError, match=r"prompt p-7 raised TypeError"):
        strict_score(lambda prompt, response: None, _prompt(), "seven")  # type: ignore[arg-type, return-value]


@settings(max_examples=50, deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_only_finite_rewards_pass_and_pass_unchanged(value: float) -> None:
    if abs(value) < float("inf"):
        assert strict_score(user_reward(f"{__name__}:_infinite"), _prompt(), repr(value)) == value
    else:
        with pytest.raises(DataError, match=r"prompt p-7 is (nan|-?inf) .*must be a finite number"):
            strict_score(user_reward(f"{__name__}:_infinite"), _prompt(), repr(value))
