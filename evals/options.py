"""The options of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specbatch.config.settings import Rule, check_fields, is_number, is_whole, setting, whole
from specbatch.config.values import read_samples
from specbatch.core.sampling_params import SAMPLED, SamplingParams
from specbatch.errors import at_least, each_once, refuse
from specbatch.sweeps.workload.defaults import LEAST_PROMPTS

MAX_NEW_TOKENS = 256  # if neither the user nor the task sets a limit, as in lm-eval
RESAMPLES = 1000  # lm-eval's default is 100,000, which takes minutes; the error of a mean has a closed form
_PARAMS = {item.name: item.metadata for item in fields(SamplingParams)}


def _of_task(name: str) -> Any:
    """A field that replaces the task's value of a sampling parameter."""
    return setting(None, f"{_PARAMS[name]['help']} Default: the task's.", _PARAMS[name]["rule"])


def _is_limit(value: Any) -> bool:
    return is_number(value) and (0 < value < 1 or (value >= 1 and value == int(value) and whole(1).fits(int(value))))


@dataclass(frozen=True)
class EvalOptions:
    """Which tasks to evaluate, and how.

    Details beyond the help texts of the fields:

    task          gsm8k, gsm8k_platinum, one_digit_sums, another lm-eval task or group, reasoning_gym:NAME, or the path
                  of a task's YAML file; several are separated by commas (`specbatch.evals.several`)
    samples       by task: the numbers of the questions to ask, from 0, in any order; of other tasks all are asked
    include_path  folders with tasks of the user, which replace lm-eval's tasks of the same name
    data          only GSM8K tasks take other questions
    fewshot_data  None: the rows that lm-eval's task names; where `data` has some of these, its other rows
    thinking      reasoning is never scored
    gen_kwargs    `specbatch.evals.generation` lists the arguments
    temperature, top_p, top_k, min_p   how answers are sampled; None: as gen_kwargs, else the task's arguments say
    concurrency   most requests that are submitted and unfinished at a time; None: all
    seed          draws the few-shot examples; with lm-eval's default of 1234 the prompts equal lm-eval's
    output        folder for the results: new, empty, or of an interrupted evaluation, which continues
    overwrite     drop the answers of an interrupted evaluation
    """

    task: str
    limit: float | None = setting(
        None,
        "Use only N questions of each task: the first ones, or those from --offset on. Below 1: this share of them.",
        Rule(_is_limit, "use a whole number of at least 1, or a share between 0 and 1"),
    )
    offset: int = setting(
        0, "Skip the first N questions of each task; the prompts of the others stay as they are.", whole(0)
    )
    num_fewshot: int | None = setting(
        None, "Few-shot examples before each question. Default: the task's number.", whole(0)
    )
    data: Path | None = setting(None, "JSONL of question and answer to score. Default: the task's data set.")
    fewshot_data: Path | None = setting(
        None, "JSONL of question and answer for the examples, or the bundled gsm8k_train. Default: as the task says."
    )
    chat_template: bool = setting(False, "Ask with the model's chat template.")
    thinking: bool | None = setting(None, "enable_thinking of the chat template. Default: the template's own.")
    system_instruction: str | None = setting(
        None, "Text before the task's description; a system message with --chat-template."
    )
    fewshot_as_multiturn: bool | None = setting(
        None, "With --chat-template: examples as turns of the conversation (the default) or as text of one turn."
    )
    add_bos_token: bool | None = setting(
        None,
        "Begin prompts with the bos token, or not. Default: as lm-eval with HF models, where the tokenizer adds it to "
        "texts, also to rendered chat prompts, unless they begin with it.",
    )
    truncate_prompts: bool = setting(
        False,
        "Drop the beginning of prompts that are too long, as lm-eval does, instead of refusing them.",
        flags=("--truncate-prompts",),
    )
    think_end_token: str | None = setting(
        None, "Text that ends reasoning, if the model's own is not known: stop strings apply to what follows."
    )
    max_new_tokens: int | None = setting(
        None, f"Maximum number of tokens per answer. Default: the task's limit, else {MAX_NEW_TOKENS}.", whole(1)
    )
    gen_kwargs: str | None = setting(
        None,
        "Generation arguments that replace the task's, as lm-eval takes them: temperature=0.8,do_sample=True or JSON. "
        "--max-new-tokens, --temperature and the like replace both.",
    )
    temperature: float | None = _of_task("temperature")
    top_p: float | None = _of_task("top_p")
    top_k: int | None = _of_task("top_k")
    min_p: float | None = _of_task("min_p")
    concurrency: int | None = setting(None, "", whole(1))
    bootstrap_iters: int = setting(
        RESAMPLES,
        "Resamples for the standard error of a metric that is no mean, such as perplexity. 0: no standard errors.",
        whole(0),
    )
    predict_only: bool = setting(False, "Save the answers without scoring them.", flags=("--predict-only",))
    write_out: bool = setting(
        False, "Print the prompt and the target of the first question of each task.", flags=("--write-out",)
    )
    confirm_run_unsafe_code: bool = setting(
        False,
        "Run Python of --include-path and of tasks that execute the model's answers (humaneval), without a sandbox.",
        flags=("--confirm-run-unsafe-code",),
    )
    include_path: tuple[Path, ...] = ()
    samples: Mapping[str, Sequence[int]] | None = setting(
        None,
        "Ask these questions of a task, from 0: '{\"gsm8k\": [0, 5]}'. Their examples are drawn as if there were no "
        "others, as by lm-eval.",
        metavar="JSON|FILE",
        parse=read_samples,
    )
    seed: int = 1234
    output: Path | None = None
    overwrite: bool = setting(False, "Start an interrupted eval over instead of continuing it.", flags=("--overwrite",))

    def __post_init__(self) -> None:
        if is_number(self.limit) and self.limit == int(self.limit or 0):  # the command line has no other whole numbers
            object.__setattr__(self, "limit", int(self.limit))
        check_fields(self)
        each_once("task", self.names)
        if self.samples is not None:
            self._check_samples(self.samples)
        if self.think_end_token == "":
            raise refuse("think_end_token", "", "name the text that ends reasoning, such as </think>, or leave it out")
        if self.thinking is not None and not self.chat_template:
            raise refuse("thinking", self.thinking, "is a switch of the chat template; add chat_template=True")
        if self.fewshot_as_multiturn and not self.chat_template:
            works = "turns need a chat template; add chat_template=True, or leave it out"
            raise refuse("fewshot_as_multiturn", True, works)

    @property
    def as_multiturn(self) -> bool:
        """Whether examples are turns of the conversation."""
        return self.chat_template if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn

    @property
    def of_model(self) -> dict[str, Any]:
        """Arguments of `SpecBatchLM`."""
        own = ("max_new_tokens", "chat_template", "thinking", "think_end_token", "add_bos_token", "truncate_prompts")
        return {name: getattr(self, name) for name in own} | {"sampling": self.sampling}

    @property
    def names(self) -> list[str]:
        """The names in `task`."""
        return [name for part in self.task.split(",") if (name := part.strip())]

    def questions(self, task: str, size: int) -> Sequence[int]:
        """The numbers of the questions to ask of a task that has `size` of them, in ascending order."""
        if self.samples is not None and task in self.samples:
            return sorted(self.samples[task])
        count = size if self.limit is None else math.ceil(size * self.limit) if self.limit < 1 else int(self.limit)
        return range(self.offset, min(self.offset + count, size))

    def at_most(self, count: int) -> EvalOptions:
        """The same options with the first `count` questions of each task, of those that `samples` names if it is
        given."""
        if self.samples is not None:
            return replace(self, samples={task: sorted(numbers)[:count] for task, numbers in self.samples.items()})
        whole = self.limit is not None and self.limit >= 1
        return replace(self, limit=min(count, self.limit) if whole and self.limit is not None else count)

    def _check_samples(self, samples: Mapping[str, Sequence[int]]) -> None:
        for name in ("limit", "offset"):
            if getattr(self, name):
                raise refuse(name, getattr(self, name), "samples name the questions to ask; leave one of them out")
        for task, numbers in samples.items():
            works = f"of task {task}: use a list of different question numbers, from 0"
            fits = isinstance(numbers, list | tuple | range) and len(numbers) > 0
            if not fits or not all(is_whole(one) and one >= 0 for one in numbers) or len({*numbers}) < len(numbers):
                raise refuse("samples", numbers, works)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that are not the task's."""
        return {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class GridOptions:
    """Each configuration answers the questions of `task` at each concurrency, `repeats` times. The concurrency and the
    folder of `task` are ignored.

    prompts_per_concurrency  a point has at most this many questions per concurrent request, the first ones, and at
                             least `LEAST_PROMPTS`. None: all questions
    """

    task: EvalOptions
    concurrency: tuple[int, ...]
    repeats: int = setting(
        1,
        "With --configs: rounds over the configurations, interleaved: A B C C B A. Speedups have an interval from 2 "
        "on; use 3 or more, because that of 2 is 3.6 times as wide as that of 3.",
        whole(1),
    )
    prompts_per_concurrency: int | None = setting(
        None,
        "With --configs: questions of a point, as a multiple of its concurrency, but at least 4; the first ones. "
        "Default: all questions at every concurrency.",
        whole(1),
    )

    def __post_init__(self) -> None:
        for number in self.concurrency:
            at_least("concurrency", number, 1)
        each_once("concurrency", self.concurrency)
        check_fields(self)
        if self.prompts_per_concurrency is not None and self.task.limit is not None and self.task.limit < 1:
            raise refuse("limit", self.task.limit, "with prompts_per_concurrency use a whole number")
        for name in ("predict_only", "write_out"):
            if getattr(self.task, name):
                raise refuse(name, True, "goes with one configuration; leave it out")

    def at(self, concurrency: int) -> EvalOptions:
        """The options of a point."""
        options = replace(self.task, concurrency=concurrency, output=None)
        if self.prompts_per_concurrency is None:
            return options
        return options.at_most(max(self.prompts_per_concurrency * concurrency, LEAST_PROMPTS))
