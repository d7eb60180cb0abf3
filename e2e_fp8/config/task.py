"""Where prompts and rewards come from."""

from typing import Any, Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class CodeConfig(Section):
    """Unit tests of code responses (reward ``code``), each in a sandbox process; the prompt's column ``tests`` holds them."""

    time_limit_s: float = Field(default=5.0, gt=0, description="Wall-clock time of one test in seconds; CPU time is bounded by it too.")
    memory_mib: int = Field(default=512, ge=64, description="Address space of one process in MiB.")
    output_kib: int = Field(default=64, ge=1, description="Largest standard output or file of one test, in KiB.")
    isolation: Literal["namespaces", "limits"] = Field(
        default="namespaces",
        description="namespaces: no network, no files but one small folder, refused where the kernel does not allow it; limits: time and "
        "memory alone, network and files are open to the policy's code.",
    )
    partial_credit: bool = Field(default=False, description="Reward the share of tests that pass instead of all or nothing.")


class JudgeConfig(Section):
    """A language model that scores responses (reward ``judge``), behind an OpenAI-compatible endpoint; key in E2E_FP8_JUDGE_KEY."""

    url: str | None = Field(default=None, description="Base URL ending in /v1, as OpenAI clients take it.")
    model: str = Field(default="", description="Name of the model at the endpoint.")
    template: str = Field(
        default="Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\nHow good is the response, from 0 (wrong) "
        "to 10 (right)? Reason shortly, then end with a line 'Score: NUMBER'.",
        description="What the judge is asked; {prompt}, {answer} and {response} are filled in.",
    )
    best_score: float = Field(default=10.0, gt=0, description="Score that becomes reward 1; 0 becomes 0, scores beyond either are cut.")
    max_tokens: int = Field(default=256, ge=1, description="Longest answer of the judge.")
    timeout_s: float = Field(default=60.0, gt=0, description="Time of one request in seconds.")
    retries: int = Field(default=3, ge=0, description="Further tries after a time-out, a refused connection, status 429 or 5xx.")


class RewardModelConfig(Section):
    """A served reward model (reward ``reward_model``), such as ``vllm serve MODEL --runner pooling``; key in E2E_FP8_REWARD_MODEL_KEY."""

    url: str | None = Field(default=None, description="Address of the server without the endpoint, such as http://HOST:PORT.")
    model: str = Field(default="", description="Name of the model at the server.")
    endpoint: Literal["classify", "score", "pooling"] = Field(
        default="classify",
        description="classify: a class of a sequence classifier; score: a cross encoder's score of prompt and response; pooling: a number "
        "of a reward head, the last token's where it gives one a token.",
    )
    template: str = Field(
        default="{prompt}{response}",
        description="Text that classify and pooling see; {prompt}, {answer} and {response} are filled in.",
    )
    class_index: int = Field(default=-1, description="Which number of the answer is the reward, as Python counts; -1 is the last.")
    activation: bool | None = Field(
        default=None, description="Whether the server applies sigmoid or softmax; null leaves it to the server, which applies it."
    )
    factor: float = Field(default=1.0, description="Multiplies the number.")
    smallest: float = Field(default=-10.0, description="Rewards below are cut, after the factor.")
    largest: float = Field(default=10.0, description="Rewards above are cut, after the factor.")
    parallel: int = Field(default=16, ge=1, description="Requests under way at once, without reward_workers.")
    timeout_s: float = Field(default=60.0, gt=0, description="Time of one request in seconds.")
    retries: int = Field(default=3, ge=0, description="Further tries after a time-out, a refused connection, status 429 or 5xx.")


class CurriculumConfig(Section):
    """Difficulty that follows the success rate, for each reasoning-gym data set by itself; levels survive a resume."""

    levels: dict[str, list[dict[str, Any]]] = Field(
        default_factory=dict,
        description="Data set name to its levels from easy to hard, each the parameters it sets on top of the usual ones; empty: none.",
    )
    window: int = Field(default=4, ge=1, description="Steps at a level whose success rates decide together.")
    raise_above: float = Field(default=0.7, gt=0, le=1, description="Next harder level above this success rate.")
    lower_below: float = Field(default=0.2, ge=0, lt=1, description="Next easier level below this success rate.")
    pass_reward: float = Field(default=1.0, description="A response is a success at this reward or above.")


class ToolConfig(Section):
    """Tools that a response may call, in turns: the policy writes ``<tool>NAME: INPUT</tool>`` and reads ``<result>OUTPUT</result>``."""

    names: tuple[str, ...] = Field(
        default=(), description="Tools on offer: calculator, or package.module:function called as function(text) -> text; none: one turn."
    )
    max_turns: int = Field(default=4, ge=1, description="Turns of the policy in one response; rollout.max_response_tokens bounds each.")
    max_result_tokens: int = Field(default=64, ge=1, description="Tokens of one tool result; the rest is cut off.")


class TaskConfig(Section):
    """A procedural reasoning-gym data set, or prompts from a file."""

    kind: Literal["reasoning_gym", "file"] = Field(default="reasoning_gym", description="Source of prompts.")
    name: str = Field(default="chain_sum", description="reasoning-gym data set name (kind reasoning_gym).")
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reasoning-gym data set.")
    mixture: dict[str, float] = Field(
        default_factory=dict,
        description="Several reasoning-gym data sets instead of task.name: each name to its share of the prompts, up to a common factor.",
    )
    mixture_params: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Keyword arguments of the data sets of task.mixture, by name."
    )
    curriculum: CurriculumConfig = Field(default=CurriculumConfig(), description="Difficulty that follows the success rate.")
    path: str | None = Field(default=None, description="JSONL or parquet file with prompt and answer columns (kind file).")
    prompt_field: str = Field(default="prompt", description="Column with the prompt text (kind file).")
    answer_field: str = Field(default="answer", description="Column with the reference answer (kind file).")
    reward: str = Field(
        default="verifier",
        description="verifier (the task's own), math (math-verify), code (unit tests), judge (a language model), "
        "reward_model (a served reward model), or package.module:function.",
    )
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Several rewards at once instead of task.reward: each name to its weight; the reward is the weighted sum.",
    )
    reward_workers: int = Field(default=0, ge=0, description="Processes that compute rewards; 0 computes them in the trainer's process.")
    reward_timeout_s: float = Field(
        default=60.0, gt=0, description="Time of all rewards of one response, after which its worker is killed (with reward_workers)."
    )
    on_reward_timeout: Literal["refuse", "zero"] = Field(
        default="refuse", description="A reward that ran out of time: stop with an error that names the prompt, or count it and give 0."
    )
    tools: ToolConfig = Field(default=ToolConfig(), description="Tools that a response may call.")
    code: CodeConfig = Field(default=CodeConfig(), description="Unit tests of code responses.")
    judge: JudgeConfig = Field(default=JudgeConfig(), description="Language model as judge.")
    reward_model: RewardModelConfig = Field(default=RewardModelConfig(), description="Served reward model.")
    train_size: int = Field(default=2048, ge=1, description="Training prompts generated or read; of each data set and level if several.")
    held_out_size: int = Field(default=128, ge=1, description="Held-out prompts, disjoint from training; over all data sets and levels.")
    seed: int = Field(default=1, ge=0, description="Seed of the procedural generator and of the split.")
    tokenizer: str = Field(
        default="auto",
        description="auto takes the one of model.hf_path, or trains a small one on the task's text; otherwise an HF tokenizer directory.",
    )
