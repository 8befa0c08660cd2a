"""The options of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specbatch.core.sampling_params import SAMPLED, SamplingParams
from specbatch.errors import refuse
from specbatch.settings import check_fields, setting, whole

MAX_NEW_TOKENS = 512  # if neither the user nor the task sets a limit; lm-eval's 256 truncates chains of thought
_PARAMS = {item.name: item.metadata for item in fields(SamplingParams)}


def _of_task(name: str) -> Any:
    """A field that replaces the task's value of a sampling parameter."""
    return setting(None, f"{_PARAMS[name]['help']} Default: the task's.", _PARAMS[name]["rule"])


@dataclass(frozen=True)
class EvalOptions:
    """Which task to evaluate, and how.

    Details beyond the help texts of the fields:

    task          gsm8k, gsm8k_platinum, one_digit_sums, another lm-eval task or group, or reasoning_gym:NAME
    data          only GSM8K tasks take other questions
    fewshot_data  None: the rows that lm-eval's task names; where `data` has some of these, its other rows
    thinking      reasoning is never scored
    temperature, top_p, top_k, min_p   how answers are sampled; None: as the task's generation arguments say
    concurrency   most requests that are submitted and unfinished at a time; None: all
    seed          draws the few-shot examples; with lm-eval's default of 1234 the prompts equal lm-eval's
    output        folder for the results: new, empty, or of an interrupted evaluation, which continues
    overwrite     drop the answers of an interrupted evaluation
    """

    task: str
    limit: int | None = setting(None, "Use only the first N questions; of a group, of each of its tasks.", whole(1))
    num_fewshot: int | None = setting(
        None, "Few-shot examples before each question. Default: the task's number.", whole(0)
    )
    data: Path | None = setting(None, "JSONL of question and answer to score. Default: the task's data set.")
    fewshot_data: Path | None = setting(
        None, "JSONL of question and answer for the examples, or the bundled gsm8k_train. Default: as the task says."
    )
    chat_template: bool = setting(False, "Ask with the model's chat template.")
    thinking: bool | None = setting(None, "enable_thinking of the chat template. Default: the template's own.")
    think_end_token: str | None = setting(
        None, "Text that ends reasoning, if the model's own is not known: stop strings apply to what follows."
    )
    max_new_tokens: int | None = setting(
        None, f"Maximum number of tokens per answer. Default: the task's limit, else {MAX_NEW_TOKENS}.", whole(1)
    )
    temperature: float | None = _of_task("temperature")
    top_p: float | None = _of_task("top_p")
    top_k: int | None = _of_task("top_k")
    min_p: float | None = _of_task("min_p")
    concurrency: int | None = setting(None, "", whole(1))
    seed: int = 1234
    output: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.think_end_token == "":
            raise refuse("think_end_token", "", "name the text that ends reasoning, such as </think>, or leave it out")
        if self.thinking is not None and not self.chat_template:
            raise refuse("thinking", self.thinking, "is a switch of the chat template; add chat_template=True")

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that are not the task's."""
        return {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
