"""What keeps an evaluation honest: no shared prompts, no unknown characters, the same split in every process."""

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_fp8.config.root import Config
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.tasks.tokenizer import UNK, train_tokenizer

SPLIT_TASK = {"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 4}, "train_size": 40, "held_out_size": 10}
SPLIT_SCRIPT = f"""
import json
from e2e_fp8.config.root import Config
from e2e_fp8.tasks.dataset import load_task
task = load_task(Config.model_validate({{"task": {SPLIT_TASK!r}}}))
print(json.dumps([[p.uid, p.text, p.answer, p.token_ids] for p in (*task.train, *task.held_out)]))
"""


def file_config(path: Path, **fields: object) -> Config:
    return Config.model_validate({"task": {"kind": "file", "path": str(path), "held_out_size": 8, **fields}})


def test_repeated_prompts_never_stand_on_both_sides(tmp_path: Path) -> None:
    draw = random.Random(random.randrange(1 << 30))
    rows = [{"prompt": f"q {draw.randrange(30)}", "answer": "a"} for _ in range(300)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\r\n" for row in rows))
    for seed in range(5):
        task = load_task(file_config(path, seed=seed))
        train, held_out = [p.text for p in task.train], [p.text for p in task.held_out]
        assert not set(train) & set(held_out)
        assert sorted([*train, *held_out]) == sorted({row["prompt"] for row in rows})


def test_characters_that_only_held_out_prompts_have_are_not_unknown(tmp_path: Path) -> None:
    """Every prompt has a letter of its own, so each split keeps some letters from the training text."""
    rows = [{"prompt": f"{letter} {letter}", "answer": "1"} for letter in string.ascii_letters]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(file_config(path))
    for prompt in (*task.train, *task.held_out):
        assert task.tokenizer.decode(prompt.token_ids) == prompt.text


@settings(deadline=None, max_examples=20)
@given(st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=20))
def test_a_character_outside_the_alphabet_is_unknown_and_the_rest_is_kept(text: str) -> None:
    tokenizer = train_tokenizer([string.ascii_lowercase], 64, alphabet_of=["!"])
    assert tokenizer.decode(tokenizer.encode_answer(text + "!")) == text + "!"
    ids = tokenizer.encode_answer(text + "?")
    assert tokenizer.decode(ids) == text
    assert ids[:-1] == tokenizer.encode_answer(text)
    assert tokenizer.decode(ids[-1:]) == "" != UNK


@pytest.mark.slow
def test_split_and_token_ids_are_the_same_in_another_process() -> None:
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SPLIT_SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": str(random.randrange(1 << 30))},
    )
    task = load_task(Config.model_validate({"task": SPLIT_TASK}))
    here = [[p.uid, p.text, p.answer, list(p.token_ids)] for p in (*task.train, *task.held_out)]
    assert len(here) == 50
    assert json.loads(other.stdout) == here
