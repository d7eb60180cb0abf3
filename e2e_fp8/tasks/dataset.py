"""Prompts with verifiers: reasoning-gym data sets, or JSONL and parquet files."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from e2e_fp8.config.root import Config
from e2e_fp8.config.task import TaskConfig
from e2e_fp8.errors import ConfigError, DataError
from e2e_fp8.tasks.curriculum import Curriculum
from e2e_fp8.tasks.gym import Pool, gym_entries, pools_of, split_pools
from e2e_fp8.tasks.scoring import Scorer, Scores
from e2e_fp8.tasks.tokenizer import HfTokenizer, load_tokenizer, train_tokenizer
from e2e_fp8.tasks.tools import Tool, load_tools
from e2e_fp8.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training and held-out prompts with their rewards and tokenizer."""

    train: list[Prompt]
    held_out: list[Prompt]
    """Disjoint from ``train`` by prompt text."""
    tokenizer: HfTokenizer
    scorer: Scorer
    curriculum: Curriculum | None
    """Chooses the prompts of a step where there are several data sets or levels."""
    tools: dict[str, Tool]
    """Tools that responses may call; empty for responses of one turn."""

    def score(self, prompt: Prompt, response_text: str) -> float:
        """Finite reward of one response; DataError naming the prompt otherwise."""
        return self.scorer.score_all([(prompt, response_text)]).rewards[0]

    def score_all(self, responses: Sequence[tuple[Prompt, str]]) -> Scores:
        """Rewards of many responses, in order, in parallel where task.reward_workers says so."""
        return self.scorer.score_all(responses)

    def close(self) -> None:
        """Stop the reward workers."""
        self.scorer.close()


def load_task(cfg: Config) -> Task:
    """Read or generate prompts, split them, make or load the tokenizer, check lengths.

    Raises:
        DataError: no usable prompts, malformed files, or a prompt longer than the window.
        ConfigError: unknown data set or reward.
    """
    pools, held_out = _prompts(cfg.task)
    train = [prompt for prompts in pools.values() for prompt in prompts]
    if cfg.training.warm_start.steps:
        _require_answers(train)
    # a checkpoint comes with the tokenizer its embedding was trained with
    source = cfg.task.tokenizer if cfg.task.tokenizer != "auto" else cfg.model.hf_path or "auto"
    if source == "auto":
        tokenizer = train_tokenizer(
            (t for p in train for t in (p.text, p.answer)), cfg.model.vocab_size, alphabet_of=(p.text for p in held_out)
        )
    else:
        tokenizer = load_tokenizer(Path(source))
    limit = cfg.rollout.max_model_len - cfg.rollout.max_response_tokens
    pools = {pool: [_encoded(p, tokenizer, limit) for p in prompts] for pool, prompts in pools.items()}
    return Task(
        train=[prompt for prompts in pools.values() for prompt in prompts],
        held_out=[_encoded(p, tokenizer, limit) for p in held_out],
        tokenizer=tokenizer,
        scorer=Scorer(cfg.task),
        curriculum=_curriculum(cfg.task, pools),
        tools=load_tools(cfg.task.tools),
    )


def _require_answers(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        if not prompt.answer:
            raise DataError(
                f"prompt {prompt.uid} has no reference answer, which the warm start trains on; "
                "set training.warm_start.steps to 0 or use data with answers."
            )


def _encoded(prompt: Prompt, tokenizer: HfTokenizer, limit: int) -> Prompt:
    token_ids = tokenizer.encode_prompt(prompt.text)
    if not token_ids:
        raise DataError(f"prompt {prompt.uid} is empty; remove it from the data set.")
    if len(token_ids) > limit:
        raise DataError(
            f"prompt {prompt.uid} has {len(token_ids)} tokens, more than the {limit} that rollout.max_model_len leaves beside "
            "rollout.max_response_tokens; raise max_model_len, lower max_response_tokens, or drop the prompt."
        )
    return replace(prompt, token_ids=token_ids)


def _split(prompts: list[Prompt], task: TaskConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Distinct prompts (the last of equal texts is kept), shuffled by the task's seed; the first ones are held out."""
    distinct = list({p.text: p for p in prompts}.values())
    if not distinct:
        raise DataError(f"the data set {task.path or task.name} is empty: no prompt was found.")
    if len(distinct) <= task.held_out_size:
        raise DataError(
            f"the data set {task.path or task.name} has {len(distinct)} distinct prompts, not enough for "
            f"task.held_out_size {task.held_out_size} and one training prompt; lower task.held_out_size or give more data."
        )
    random.Random(task.seed).shuffle(distinct)
    return distinct[task.held_out_size :][: task.train_size], distinct[: task.held_out_size]


def _gym_prompts(task: TaskConfig, pool: Pool) -> list[Prompt]:
    name, level = pool
    label = f"{name}-level{level}" if task.curriculum.levels.get(name) else name
    return [
        Prompt(
            uid=f"{label}-{i}",
            text=e["question"],
            token_ids=(),
            answer=_text(e["answer"]),
            metadata={"entry": e, "source": name, "level": level},
        )
        for i, e in enumerate(gym_entries(task, pool))
    ]


def _prompts(task: TaskConfig) -> tuple[dict[Pool, list[Prompt]], list[Prompt]]:
    """(training prompts by pool, held-out prompts); a file is one pool."""
    if task.kind == "reasoning_gym" and (task.mixture or task.curriculum.levels):
        return split_pools({pool: _gym_prompts(task, pool) for pool in pools_of(task)}, task)
    only = ("", 0) if task.kind == "file" else (task.name, 0)
    train, held_out = _split(_from_file(task) if task.kind == "file" else _gym_prompts(task, only), task)
    return {only: train}, held_out


def _curriculum(task: TaskConfig, pools: dict[Pool, list[Prompt]]) -> Curriculum | None:
    """None where there is nothing to choose."""
    if len(pools) == 1:
        return None
    names = list(dict.fromkeys(name for name, _ in pools))
    weights = {name: task.mixture.get(name, 1.0) for name in names}
    by_name = {name: [prompts for (of, _), prompts in pools.items() if of == name] for name in names}
    return Curriculum(pools=by_name, weights=weights, cfg=task.curriculum)


def _text(answer: Any) -> str:
    """Some data sets accept many answers and name none; ``str(None)`` would become a supervised target."""
    return "" if answer is None else str(answer)


def _from_file(task: TaskConfig) -> list[Prompt]:
    if task.path is None:
        raise ConfigError("task.path is needed with task.kind: file; give a JSONL or parquet file.")
    path = Path(task.path)
    if not path.exists():
        raise DataError(f"task.path: {path} does not exist.")
    prompts = []
    for where, number, row in _rows(path):
        for column in (task.prompt_field, task.answer_field):
            if row.get(column) is None:
                raise DataError(f"{where} has no column {column!r}; it has {sorted(row)}. Set task.prompt_field and task.answer_field.")
        extra = {k: v for k, v in row.items() if k not in (task.prompt_field, task.answer_field)}
        prompts.append(
            Prompt(
                uid=f"{path.name}:{number}",
                text=str(row[task.prompt_field]),
                token_ids=(),
                answer=str(row[task.answer_field]),
                metadata=extra,
            )
        )
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """``(place for messages, line or row number, columns)`` of each item; lines count from 1, parquet rows from 0."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
        yield from ((f"{path} row {i}", i, row) for i, row in enumerate(rows))
        return
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"task.path: {path} is neither .jsonl nor .parquet.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"task.path: {path} cannot be read as UTF-8 text: {error}.") from error
    # not splitlines: a JSON string may hold U+2028 and its like
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {number} is not JSON: {error.msg}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is not a JSON object.")
        yield f"{path} line {number}", number, row
