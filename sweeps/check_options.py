"""The options of `specbatch check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbatch.core.request import SamplingParams
from specbatch.settings import check_fields, number, setting, whole


@dataclass(frozen=True)
class CheckOptions:
    """What is compared.

    source: JSONL as in `specbatch.jobs.prompts`; None: random ids, in every second prompt the first half twice, so that
    there is something to look up. Random prompts continue past the model's end tokens.
    """

    source: Path | None = None
    prompts: int | None = setting(None, "Number of prompts. Default: all of the file, or 32 random ones.", whole(1))
    input_len: int = setting(64, "Tokens per random prompt.", whole(1))
    max_new_tokens: int = setting(
        64, "Maximum number of tokens per answer; for random prompts, exactly that many.", whole(1)
    )
    margin: float | None = setting(
        None,
        "Largest gap between the baseline's logits that counts as a near tie. Default: 0.1; 0.001 in float32.",
        number(lambda gap: gap >= 0, "use 0 or a positive number of logits"),
    )
    concurrency: int = setting(8, "Maximum number of requests in flight.", whole(1))
    chat_template: bool = setting(True, "Render messages with the model's chat template.")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=self.source is None)

    @property
    def max_model_len(self) -> int | None:
        """Length that random prompts need; None if it depends on the tokenizer."""
        return self.input_len + self.max_new_tokens if self.source is None else None
