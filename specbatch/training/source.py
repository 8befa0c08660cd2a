"""Source of the answers that a draft head is trained on: prompts and how they are answered, or earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbatch.config.settings import check_fields, setting, whole
from specbatch.core.sampling_params import SamplingParams, refuse_unsampled
from specbatch.errors import refuse
from specbatch.jobs.prompts import Prompt

ANSWER_TOKENS = 512  # default limit of an answer


@dataclass(frozen=True)
class Source:
    """The first `limit` prompts in `data`, answered as asked, or `answers`, a file of an earlier run.

    task     asks the questions of `data`: its prompts are `prompts` and the texts that end its answers `stop`
    """

    data: Path | None = setting(
        None, "JSONL or Parquet of prompt, question, messages or prompt_token_ids. The model generates the answers."
    )
    answers: Path | None = setting(None, "Instead of --data: answers.jsonl of an earlier run for this model.")
    task: str | None = setting(
        None,
        "Ask the questions in --data as this lm-eval task does, such as gsm8k: as text, after few-shot examples, and "
        "with its stop strings.",
    )
    num_fewshot: int | None = setting(None, "With --task: examples before each question. Default: the task's number.")
    limit: int | None = setting(None, "Use only the first N prompts.", whole(1))
    max_new_tokens: int = setting(ANSWER_TOKENS, "Maximum number of tokens per answer.")
    temperature: float = setting(0.0, "Sampling temperature of the answers; 0 is greedy.")
    top_p: float = setting(1.0, "Nucleus sampling of the answers; 1 is off.")
    chat_template: bool = setting(True, "Render messages with the model's chat template.")
    prompts: Sequence[Prompt] | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task is None and self.num_fewshot is not None:
            raise refuse("num_fewshot", self.num_fewshot, "goes with task='NAME'; leave it out")
        if self.task is not None and self.data is None:
            raise refuse(
                "task", self.task, "asks the questions of data='FILE', such as those of a training set; give one"
            )
        params = self.params  # refuses values that cannot be sampled with
        refuse_unsampled({"temperature": self.temperature, "top_p": self.top_p})
        if (self.data is None) == (self.answers is None):
            found = None if self.data is None else str(self.data)
            raise refuse("data", found, "give either --data (prompts) or --answers (of an earlier run)")
        check_fields(self)
        if self.answers is not None and (
            params != SamplingParams(max_new_tokens=ANSWER_TOKENS) or not self.chat_template
        ):
            how = "temperature, top-p, max-new-tokens, chat template"
            raise refuse(
                "answers",
                str(self.answers),
                f"no prompts are answered in this run; leave out the settings of generation ({how})",
            )

    @property
    def params(self) -> SamplingParams:
        """How the prompts are answered."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens, stop=self.stop
        )

    @property
    def asked(self) -> dict[str, object] | None:
        """The task and its examples, for the record."""
        return None if self.task is None else {"task": self.task, "num_fewshot": self.num_fewshot}
