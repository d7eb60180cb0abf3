"""Text to token ids: a small tokenizer the project trains on a task's own text, or a user's Hugging Face tokenizer."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from e2e_fp8.errors import DataError

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


class Tokenizer(Protocol):
    """What tasks and engines need of a tokenizer."""

    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    """The end-of-sequence token where the tokenizer has no padding token."""

    def encode_prompt(self, text: str) -> tuple[int, ...]: ...
    def encode_answer(self, text: str) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, alphabet_of: Iterable[str] = ()) -> "HfTokenizer":
    """Byte-pair encoding of ``texts`` with every digit its own token, so that a task's constant wording becomes few tokens.

    Characters of ``alphabet_of`` get a token too, but add no merges. Text that spells a special token stays text.

    Raises:
        DataError: ``vocab_size`` is smaller than the number of distinct characters plus three special tokens.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as RawTokenizer
    from transformers import PreTrainedTokenizerFast

    corpus = list(texts)
    alphabet = sorted({character for text in (*corpus, *alphabet_of) for character in text})
    if len(alphabet) + 3 > vocab_size:
        raise DataError(
            f"model.vocab_size {vocab_size} is too small: the task's text has {len(alphabet)} distinct characters; "
            f"set at least {len(alphabet) + 3}."
        )
    raw = RawTokenizer(models.BPE(unk_token=UNK))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # merge only what a quarter of the items shares: wording becomes few tokens, while words and numbers that vary stay characters
        min_frequency=max(2, len(corpus) // 8),
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=96,
    )
    raw.train_from_iterator(corpus, trainer)
    return HfTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, eos_token=EOS, unk_token=UNK, split_special_tokens=True)
    )


def load_tokenizer(path: Path) -> "HfTokenizer":
    """A Hugging Face tokenizer from a local folder.

    Raises:
        DataError: the folder holds no usable tokenizer, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"task.tokenizer: no tokenizer could be read from {path}: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"task.tokenizer: the tokenizer in {path} has no end-of-sequence token; responses could never end.")
    return HfTokenizer(tokenizer)


class HfTokenizer:
    """Wraps a transformers tokenizer; prompts go through its chat template where it has one."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self.eos_token_id: int = tokenizer.eos_token_id
        self.pad_token_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a user prompt."""
        if getattr(self._tokenizer, "chat_template", None):
            ids = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return tuple(ids)
        return self.encode_answer(text)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, without special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self._tokenizer.save_pretrained(str(folder))
