"""Tokenizers: every text comes back, training is a function of its input alone, and transformers reads what is saved."""

import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from e2e_fp8.config.root import Config
from e2e_fp8.errors import DataError
from e2e_fp8.tasks.dataset import load_task
from e2e_fp8.tasks.tokenizer import EOS, PAD, UNK, HfTokenizer, load_tokenizer, train_tokenizer

ALPHABET = string.ascii_letters + string.digits + " +-*/=().,:?\n\u00e9\u2028"


def _sums(count: int = 200) -> list[str]:
    draw = random.Random(random.randrange(1 << 30))
    return [f"State the final answer to this sum: {draw.randrange(1000)} + {draw.randrange(1000)} =" for _ in range(count)]


@pytest.fixture(scope="module")
def characters() -> HfTokenizer:
    return train_tokenizer([ALPHABET], 128)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=ALPHABET + "<>", max_size=60))
def test_round_trip_is_exact(characters: HfTokenizer, text: str) -> None:
    spelled = text.replace("<", "(").replace(">", ")")
    assert characters.decode(characters.encode_answer(spelled)) == spelled


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=20, alphabet=st.characters(exclude_categories=("Cs",))), min_size=1, max_size=8))
def test_round_trip_of_any_text_it_was_trained_on(texts: list[str]) -> None:
    tokenizer = train_tokenizer(texts, 512)
    for text in texts:
        assert tokenizer.decode(tokenizer.encode_answer(text)) == text


def test_text_that_spells_a_special_token_stays_text() -> None:
    text = f"a{EOS}b{PAD}c{UNK}"
    tokenizer = train_tokenizer([text], 64)
    ids = tokenizer.encode_answer(text)
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
    assert tokenizer.decode(ids) == text


def test_wording_becomes_few_tokens_and_digits_stay_single() -> None:
    tokenizer = train_tokenizer(_sums(), 128)
    assert len(tokenizer.encode_prompt("State the final answer to this sum: 123 + 45 =")) == 1 + 3 + 1 + 2 + 1
    digits = [tokenizer.encode_answer(d)[0] for d in string.digits]
    assert len(set(digits)) == 10
    number = "".join(random.choices(string.digits, k=12))
    assert tokenizer.encode_answer(number) == tuple(digits[int(d)] for d in number)


def test_words_that_vary_stay_characters_but_for_pieces_of_the_wording() -> None:
    """Byte-pair merges are steps towards the wording, so a word that holds one of its pieces (the ``rd`` of backward) is shorter."""
    draw, wording = random.Random(random.randrange(1 << 30)), "Spell backward: "
    words = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(300)]
    tokenizer = train_tokenizer([t for w in words for t in (f"{wording}{w}", w[::-1])], 512)
    for word in words:
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode_prompt(wording + word)]
        assert "".join(pieces) == wording + word
        assert all(len(piece) == 1 or piece in wording for piece in pieces)
        # most words keep the wording whole; one that starts with b takes the space for the piece " b"
        assert len(pieces) <= 1 + 5
    assert len(tokenizer.encode_answer(sorted(set(string.ascii_lowercase) - set(wording))[0] * 5)) == 5


def test_vocabulary_limit_is_kept_and_its_violation_named() -> None:
    texts = _sums()
    distinct = len(set("".join(texts)))
    for limit in (distinct + 3, distinct + 20):
        assert train_tokenizer(texts, limit).vocab_size <= limit
    with pytest.raises(DataError, match=rf"model\.vocab_size {distinct + 2} is too small.*set at least {distinct + 3}"):
        train_tokenizer(texts, distinct + 2)


def test_training_is_a_function_of_its_input_even_across_processes(tmp_path: Path) -> None:
    texts = _sums(60)
    train_tokenizer(texts, 96).save(tmp_path / "here")
    program = "import sys; from e2e_fp8.tasks.tokenizer import train_tokenizer; from pathlib import Path\n"
    program += f"train_tokenizer({texts!r}, 96).save(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], check=True, timeout=120)
    files = sorted(p.name for p in (tmp_path / "here").iterdir())
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    for name in files:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    texts = _sums()
    tokenizer = train_tokenizer(texts, 128)
    tokenizer.save(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True), load_tokenizer(tmp_path)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size)
    assert (ours.eos_token_id, ours.pad_token_id, ours.vocab_size) == (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size)
    for text in (*texts[:20], f"1{EOS}2"):
        expected = tokenizer.encode_prompt(text)
        assert tuple(theirs.encode(text, add_special_tokens=False)) == ours.encode_prompt(text) == expected


def test_decode_leaves_special_tokens_out(characters: HfTokenizer) -> None:
    ids = (characters.pad_token_id, *characters.encode_answer("42"), characters.eos_token_id)
    assert characters.decode(ids) == "42"


def test_chat_template_wraps_prompts_and_leaves_answers_alone(tmp_path: Path) -> None:
    train_tokenizer([ALPHABET + "<>|"], 128).save(tmp_path)
    raw = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    raw.chat_template = (
        "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}(assistant) {% endif %}"
    )
    raw.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt("1 + 1 =")) == "(user) 1 + 1 =\n(assistant) "
    assert tokenizer.decode(tokenizer.encode_answer("2")) == "2"


def test_task_uses_the_tokenizer_directory_it_is_given(tmp_path: Path) -> None:
    train_tokenizer([ALPHABET], 128).save(tmp_path)
    task = {"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}, "train_size": 8, "held_out_size": 4}
    loaded = load_task(Config.model_validate({"task": {**task, "tokenizer": str(tmp_path)}}))
    # a character tokenizer: one token for each character, unlike the merged wording of `auto`
    assert all(len(p.token_ids) == len(p.text) for p in loaded.train)
    trained = load_task(Config.model_validate({"task": task}))
    assert all(len(p.token_ids) <= 5 for p in trained.train)


def test_unusable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task\.tokenizer: no tokenizer could be read from .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"task\.tokenizer: no tokenizer could be read from"):
        load_tokenizer(tmp_path)
    train_tokenizer([ALPHABET], 128).save(tmp_path / "cut")
    whole = (tmp_path / "cut" / "tokenizer.json").read_bytes()
    (tmp_path / "cut" / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"task\.tokenizer: no tokenizer could be read from .*cut"):
        load_tokenizer(tmp_path / "cut")


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    train_tokenizer([ALPHABET], 128).save(tmp_path)
    raw = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    raw.eos_token = None
    raw.save_pretrained(str(tmp_path))
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        load_tokenizer(tmp_path)
