"""Workload of a sweep: prompts, output lengths and arrivals, the same for every configuration."""

from __future__ import annotations

import hashlib
import json
import random
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from specbatch.config.job_size import JobSize
from specbatch.core.sampling_params import SAMPLED, SamplingParams
from specbatch.errors import at_least, refuse
from specbatch.jobs.long_text import Window
from specbatch.jobs.prompts import Prompt, UnreadKeys, params_of
from specbatch.progress.bars import Report
from specbatch.servers.server import SENT
from specbatch.sweeps.workload.checks import check_settings
from specbatch.sweeps.workload.datasets import of_categories, read_dataset
from specbatch.sweeps.workload.lengths import bounds
from specbatch.sweeps.workload.row_sampling import check_rows, refuse_named
from specbatch.sweeps.workload.settings import WorkloadSettings
from specbatch.sweeps.workload.sharegpt import LEAST_TOKENS, read_sharegpt, with_lengths
from specbatch.sweeps.workload.token_ids import SCRAMBLES, draw_length, grouped_ids, random_ids, scrambled

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload(WorkloadSettings):
    """Prompts, output lengths and arrivals of every point, from its settings.

    rows          of a dataset of text
    rows_sha256   of all that is in them
    stop          texts that end its answers
    files_sha256  of long text
    """

    rows: tuple[Prompt, ...] = field(default=(), init=False, repr=False)
    rows_sha256: str = field(default="", init=False, repr=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    files_sha256: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_settings(self)
        if (text := self.long_text) is not None:
            object.__setattr__(self, "stop", text.stop)
            object.__setattr__(self, "files_sha256", text.digest())
        elif not self.is_random:
            self._read()
        self._check_with_rows()
        rows = json.dumps([{item.name: getattr(row, item.name) for item in fields(row)} for row in self.rows])
        object.__setattr__(self, "rows_sha256", hashlib.sha256(rows.encode()).hexdigest())

    def varied(self, **own: Any) -> Workload:
        """With other values of fields that its rows do not depend on. Its files are not read again."""
        found = copy(self)
        for name, value in own.items():
            object.__setattr__(found, name, value)
        check_settings(found)
        found._check_with_rows()
        return found

    def _read(self) -> None:
        """Read the rows, and refuse what they set themselves."""
        if self.data is not None and self.has_own_lengths:
            rows, stop = list[Prompt](read_sharegpt(self.data, self.seed)), tuple[str, ...]()
        else:
            form = {"as_messages": bool(self.chat_template), "replay": self.replay}
            rows, stop = read_dataset(self.dataset, self.data, self.read_task, **form)
        rows = of_categories(rows, self.category)
        if self.turns is not None:
            at_least("turns", self.turns, 1)
            if not any(row.later for row in rows):
                raise refuse("turns", self.turns, "the prompts have a single turn; leave it out")
            rows = [replace(row, later=row.later[: self.turns - 1]) for row in rows]
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "rows", tuple(row.as_message() if self.chat_template else row for row in rows))
        check_rows(self.rows, self.data or self.dataset, self._params)

    def _check_with_rows(self) -> None:
        """Refuse settings that do not go with the rows."""
        if self.thinking is not None and not self.is_rendered:
            works = "no prompt is rendered by a chat template, which has that switch; add chat_template=True"
            raise refuse("thinking", self.thinking, works)
        if self.most_turns == 1:
            return
        if self.scramble != SCRAMBLES[0]:
            raise refuse("scramble", self.scramble, "later turns are rendered from text; use turns=1")
        if self.is_open:
            works = "later turns wait for answers and cannot arrive by a clock; use turns=1"
            name, value = ("burst", "all") if self.burst == 0 else ("request_rate", self.request_rate)
            raise refuse(name, value, works)

    @property
    def most_turns(self) -> int:
        """Turns of the longest conversation; 1 without conversations."""
        return 1 + max((len(row.later) for row in self.rows), default=0)

    @property
    def is_rendered(self) -> bool:
        """Whether the chat template renders some of the prompts."""
        return self.chat_template is not False and any(row.form == "messages" for row in self.rows)

    @property
    def input_range(self) -> tuple[int, int] | None:
        """Fewest and most tokens of a prompt; None where it takes the tokenizer to know."""
        if not self.is_random and self.long_text is None:
            return None
        parts = [bounds(self.input_len), *([bounds(self.shared_len)] if self.is_grouped else [])]
        return sum(least for least, _ in parts), sum(most for _, most in parts)

    @property
    def mean_input(self) -> float:
        """Mean tokens of a prompt; of text, an estimate of four characters a token."""
        if self.input_range is not None:
            return sum(self.input_range) / 2
        each = (len(row.value) if row.form == "prompt_token_ids" else len(str(row.value)) / 4 for row in self.rows)
        return sum(each) / len(self.rows)

    def size(self, requests: int) -> JobSize:
        """What an engine that chooses its capacity should know of so many requests."""
        shared = bounds(self.shared_len)[0] if self.is_grouped and self.groups == 1 else 0
        new = sum(params.max_new_tokens for params in self.params(requests)) / requests
        return JobSize(requests, self.mean_input, new, shared)

    @property
    def max_model_len(self) -> int | None:
        """What the prompts need; None where it takes the tokenizer to know."""
        return None if self.input_range is None else self.input_range[1] + bounds(self.output_len)[1]

    def params(self, count: int) -> list[SamplingParams]:
        """Of the first `count` prompts: those of the workload, with what the row of a file sets in its `sampling`. Each
        has its own seed, the same in all configurations and repeats. Special tokens of text are shown, so that what
        should not be there is seen."""
        return [self._params(index) for index in range(count)]

    def _params(self, index: int) -> SamplingParams:
        params = SamplingParams(
            **{name: getattr(self, name) for name in SAMPLED},
            max_new_tokens=draw_length(self.seed, "output", index, self.output_len),
            ignore_eos=self.ignores_eos,
            stop=self.stop,
            skip_special_tokens=self.is_random,
        )
        if self.rows:
            params = params_of(self.rows[index % len(self.rows)], params)
        if params.seed is None and params.temperature:
            params = params.with_seed(random.Random(f"{self.seed}/sampling {index}").getrandbits(31))
        return params

    def notes(self) -> list[str]:
        """What to log of names in the rows of a file that have no effect, each once."""
        found: list[str] = []
        unread = UnreadKeys(self.data or self.dataset, found.append)
        for row in self.rows:
            unread.add(row)
        return found

    def refuse_unsent(self) -> None:
        """Refuse parameters in a row that are not sent to servers."""
        refuse_named(self.rows, self.data or self.dataset, SENT, "is not sent to a server; leave it out")

    def count(self, concurrency: int) -> int:
        if self.is_grouped:
            return self.groups * self.group_prompts
        return self.num_prompts or max(self.prompts_per_concurrency * concurrency, self.least_prompts)

    def held(self, concurrency: int) -> int:
        """How many requests an engine must hold at once: uncapped, what does not fit waits."""
        return 1 if self.uncapped else concurrency

    def requests(self, concurrency: int) -> int:
        """Requests of a point: a prompt has one for each of its turns."""
        return self.requests_of(self.count(concurrency))

    def requests_of(self, count: int) -> int:
        """Requests of the first `count` prompts."""
        return count + sum(len(self.rows[index % len(self.rows)].later) for index in range(count if self.rows else 0))

    def arrivals(self, count: int) -> list[float] | None:
        """Seconds at which the first `count` prompts arrive; None in a closed loop."""
        if not self.is_open:
            return None
        if self.is_at_once:
            return [0.0] * count
        clock, rate = random.Random(f"{self.seed}/arrivals"), self.request_rate / self.burst
        bursts = -(-count // self.burst)
        times = accumulate((clock.expovariate(rate) for _ in range(bursts - 1)), initial=0.0)
        return [time for time in times for _ in range(self.burst)][:count]

    def for_engines(self, tokenizer: Tokenizer, count: int, longest: int, report: Report | None = None) -> Workload:
        """With the rows and their own lengths that a point of `count` prompts takes; of other datasets as it is.
        longest: most tokens of a prompt and its answer; report: of the rows"""
        if not self.has_own_lengths:
            return self
        how = {"chat_template": self.chat_template is not False, "thinking": self.thinking}
        rows = tuple(with_lengths(self.rows, tokenizer, count, longest, report, **how))
        if not rows:
            works = f"of {LEAST_TOKENS} tokens or more each, that fit into a context of {longest} tokens together"
            raise refuse("data", str(self.data), f"has no conversation with a prompt and an answer {works}")
        found = copy(self)
        object.__setattr__(found, "rows", rows)
        return found

    def prompts(self, tokenizer: Tokenizer, count: int, report: Report | None = None) -> list[list[int]]:
        """The first `count` prompts as token ids. A file with fewer rows starts over. report: of texts that are
        tokenized"""
        if self.is_grouped:
            parts = self.groups, self.group_prompts, self.shared_len, self.input_len
            return grouped_ids(tokenizer, count, *parts, self.seed)
        if self.is_random:
            return random_ids(tokenizer, count, self.input_len, self.seed)
        if self.long_text is not None:
            windows = self.windows(tokenizer, count, report)
            encoded = [window.end(tokenizer, bounds(self.input_len)[0]) for window in windows]
        else:
            encoded, template = [], self.chat_template is not False
            for row in (rows := self.rows[:count]):
                encoded.append(row.encode(tokenizer, chat_template=template, thinking=self.thinking))
                if report is not None:
                    report(len(encoded), len(rows))
        encoded = scrambled(tokenizer, encoded, self.scramble, self.seed)
        return [encoded[index % len(encoded)] for index in range(count)]

    def windows(self, tokenizer: Tokenizer, count: int, report: Report | None = None) -> list[Window]:
        """The windows of long text whose ends are the first `count` prompts; none where they are not long text."""
        size, named = max((bounds(self.input_len)[0], "input_len"), (self.window, "window"), key=itemgetter(0))
        text = self.long_text
        return [] if text is None else text.windows(tokenizer, size, count, self.seed, report, named)

    def messages(self, count: int) -> list[list[dict[str, Any]] | None]:
        """What the chat template renders as the first `count` prompts; None for those of another kind."""
        rows = [row.value if row.form == "messages" and self.chat_template is not False else None for row in self.rows]
        return [rows[index % len(rows)] for index in range(count)] if rows else [None] * count
