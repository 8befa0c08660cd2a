"""Settings of a batch job: how its input is read, what happens to failed rows, and when it stops."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specbatch.config.settings import check_fields, setting, whole
from specbatch.config.values import duration
from specbatch.errors import refuse


@dataclass(frozen=True)
class JobSettings:
    """split, column: as in `scan_prompts`. overwrite: nothing is changed before `BatchJob.run` has checked the prompts.
    retry_failed: rows of the output or of the partial output."""

    split: str | None = setting(None, "Split of a data set: test, or for the hub also train[:100].")
    column: str | None = setting(
        None,
        "Key or column of the prompt, which is text, chat messages or token ids. Default: the one of prompt, "
        "prompt_token_ids, question and messages that is present.",
    )
    skip_bad: bool = setting(
        False, "Skip and report malformed lines instead of stopping with an error.", flags=("--skip-bad",)
    )
    retry_failed: bool = setting(
        False, "Run the failed rows of an existing or partial output again.", flags=("--retry-failed",)
    )
    overwrite: bool = setting(False, "Replace an existing output.", flags=("--overwrite",))
    chat_template: bool = setting(True, "Render messages with the model's chat template.")

    def __post_init__(self) -> None:
        if self.overwrite and self.retry_failed:
            raise refuse("retry_failed", True, "keeps the rows of the output that succeeded; leave overwrite=True out")


@dataclass(frozen=True)
class Limits:
    """When a job stops before it is finished.

    max_tokens_total  output tokens of this run, after which no further prompt starts
    time_limit        seconds from `started` (of `time.monotonic`), after which requests that run are dropped
    """

    max_tokens_total: int | None = setting(
        None, "After N output tokens no further prompt starts; exit status 3.", whole(1), metavar="N"
    )
    time_limit: float | None = setting(
        None, "Stop after a time such as 90s, 30m or 1h30m; exit status 3.", metavar="TIME", parse=duration
    )
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def deadline(self) -> float | None:
        """Of `time.monotonic`."""
        return None if self.time_limit is None else self.started + self.time_limit


USUAL = JobSettings()
NO_LIMITS = Limits()
