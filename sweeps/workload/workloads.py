"""Workload of a sweep: prompts, output lengths and arrivals, the same for every configuration."""

from __future__ import annotations

import hashlib
import json
import math
import random
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.settings import setting
from specbatch.config.values import burst_of, length, lengths, one_or_several, rates
from specbatch.core.request import SamplingParams
from specbatch.core.sampling_params import SAMPLED, refuse_unsampled
from specbatch.errors import at_least, refuse
from specbatch.jobs.long_text import LongText, Window
from specbatch.jobs.prompts import Prompt, UnreadKeys, params_of
from specbatch.records.objectives import Objectives
from specbatch.servers.server import SENT
from specbatch.sweeps.workload.datasets import LM_EVAL, TaskReader, of_categories, read_dataset
from specbatch.sweeps.workload.defaults import INPUT_LEN, LEAST_PROMPTS
from specbatch.sweeps.workload.lengths import Length, bounds, check_length, shown
from specbatch.sweeps.workload.rounds import LOAD
from specbatch.sweeps.workload.row_sampling import check_rows, refuse_named
from specbatch.sweeps.workload.sharegpt import LEAST_TOKENS, SHAREGPT, read_sharegpt, with_lengths
from specbatch.sweeps.workload.token_ids import SCRAMBLES, draw_length, grouped_ids, random_ids, scrambled

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

RANDOM = ("random", "gsp")  # datasets of random token ids
TEMPLATE = "Chat template"  # a box of --help


@dataclass(frozen=True)
class Workload:
    """Prompts, output lengths and arrivals of every point.

    dataset     "random": seeded token ids of input_len, outputs of exactly output_len;
                "gsp" (generated shared prefix, after SGLang's benchmark): `groups` of `group_prompts` seeded prompts,
                each of shared_len tokens that are its group's and input_len of its own, all in shuffled order;
                "gsm8k": its test questions, which are bundled, or those of the file `data`;
                "sharegpt": the first messages of conversations in the file `data`, and answers as long as the second
                ones (`sweeps.workload.sharegpt`), with which output_len has no effect;
                "lm-eval:TASK": what that task asks, worked examples included, with the texts that end its answers, in
                its own order; `data` as for `specbatch eval`;
                "repository:FOLDER", "documents:FOLDER", "many-shot": long text, of which each prompt is the last
                input_len tokens of `window` tokens that are its own (`specbatch.jobs.long_text`);
                or the path of a JSONL file as in `specbatch.jobs.prompts`, whose lines may also hold the `turns` of
                MT-Bench and SPEED-Bench (`sweeps.run.conversations`). Rows with categories are taken in turn from
                each, so that the prompts of every point have all of them
    temperature, top_p, top_k, min_p   how answers are sampled; greedy by default, so that every configuration must
                produce the same tokens
    category    asks only the rows of this category
    replay      of a JSONL file: conversations are asked as they were recorded (`specbatch.jobs.replay`)
    turns       asks at most this many turns of a conversation; None: all
    input_len   tokens per prompt that is random or of long text; with "gsp" its own
    window      of long text, at least input_len; 0: input_len. With the same window, prompts of different lengths end
                at the same places of the text
    scramble    "shuffled": the tokens of each prompt in random order; "random": random ids in their place
    output_len  tokens per answer; for text the most, as an end token ends it
    prompts_per_concurrency  a point runs this many prompts per running request, and never fewer than least_prompts;
                with "gsp" it runs all groups
    num_prompts  a point runs this many prompts, whatever its concurrency
    request_rate  prompts that arrive in a second, at random (a Poisson process of this seed, the first one at once);
                inf: a closed loop, where a prompt is submitted when another one ends
    uncapped    nothing limits the requests in flight but the engine, which runs as many as it can hold; with
                request_rate=inf all prompts arrive at once
    sequential  a request is submitted after the previous one has left the device, so that each runs alone
    burst       prompts that arrive together, at the same mean rate; 0: all of a point at once, which takes no rate
    chat_template  None: messages are rendered by the model's template and all else is continued as text; True:
                texts become a message of the user; False: nothing is rendered
    thinking    the template's `enable_thinking`; None leaves it to the template
    slo         latency objectives that goodput counts by; None: it is not computed
    read_task   reads the prompts of lm-eval:TASK
    """

    dataset: str = setting(
        "random",
        "gsm8k, random, gsp (groups of random prompts with a shared prefix), sharegpt (--data FILE.json), lm-eval:TASK "
        "or FILE.jsonl, whose lines have the format of generate, or the turns of MT-Bench and SPEED-Bench. Long text: "
        "repository:FOLDER, documents:FOLDER, many-shot (GSM8K).",
    )
    data: Path | None = setting(
        None, "The conversations of --dataset sharegpt, or other questions for gsm8k and lm-eval:gsm8k."
    )
    input_len: Length = setting(
        INPUT_LEN,
        "Tokens per prompt of random ids or long text. Random ids also take a range; for gsp it is without the shared "
        "prefix. sweep takes several lengths: N,N,...",
        metavar="N|N-M",
        parse=lengths,
    )
    output_len: Length = setting(
        128, "Output tokens per answer, or a range; for text prompts, the maximum.", metavar="N|N-M", parse=length
    )
    prompts_per_concurrency: int = setting(4, "Prompts of a point, as a multiple of its concurrency.", panel=LOAD)
    seed: int = 0
    least_prompts: int = setting(
        LEAST_PROMPTS, "Least number of prompts of a point. Intervals over prompts need 10.", panel=LOAD
    )
    window: int = setting(
        0,
        "Long text: tokens that each prompt has for itself, of which it is the end. The same number gives prompts of "
        "different lengths the same ends.",
    )
    groups: int = setting(32, "gsp: number of groups.")
    group_prompts: int = setting(16, "gsp: prompts per group.")
    shared_len: Length = setting(
        2048,
        "gsp: tokens of the prefix that a group shares.",
        metavar="N|N-M",
        parse=length,
        flags=("--shared-len", "--system-len"),
    )
    request_rate: float = setting(
        math.inf,
        "Requests per second with random arrivals, and at most --concurrency in flight; without it, as many as arrive. "
        "inf: closed loop at --concurrency; without it, all requests at once.",
        panel=LOAD,
        metavar="RATE,...",
        parse=rates,
    )
    burst: int = setting(
        1,
        "Requests that arrive together, at that rate. all: all requests of a point at once.",
        panel=LOAD,
        metavar="N|all",
        parse=burst_of,
    )
    sequential: bool = False
    chat_template: bool | None = setting(
        None,
        "Render all texts with the model's chat template, or none. Default: only messages.",
        panel=TEMPLATE,
        flags=("--chat-template/--no-chat-template",),
    )
    thinking: bool | None = setting(
        None,
        "enable_thinking of the chat template. Default: the template's own.",
        panel=TEMPLATE,
        flags=("--thinking/--no-thinking",),
    )
    scramble: str = setting(
        SCRAMBLES[0],
        "The tokens of each prompt in random order (shuffled), or random ids in their place (random). sweep takes "
        "several: none,shuffled,random.",
        metavar="|".join(SCRAMBLES),
        parse=one_or_several,
    )
    category: str | None = setting(None, "FILE.jsonl: only the rows of this category. Default: all, in turn.")
    replay: bool = setting(
        False,
        "FILE.jsonl: ask at each message of the assistant in a row's messages, tool calls and results included. What "
        "follows is the recorded message, not the answer.",
        flags=("--replay",),
    )
    turns: int | None = setting(
        None,
        "FILE.jsonl: ask at most this many turns of each conversation. Later turns follow the configuration's own "
        "answers. Default: all.",
    )
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    num_prompts: int | None = setting(
        None,
        "Prompts of a point, whatever its concurrency. Default: those of --prompts-per-concurrency; for gsp, all.",
        panel=LOAD,
    )
    uncapped: bool = False
    slo: Objectives | None = setting(
        None,
        "Latency objectives for goodput, in seconds: some of ttft, tpot and e2e, such as ttft=0.5,tpot=0.03.",
        panel=LOAD,
        metavar="NAME=SECONDS,...",
        parse=Objectives.parse,
    )
    read_task: TaskReader | None = field(default=None, repr=False, compare=False)
    rows: tuple[Prompt, ...] = field(default=(), init=False, repr=False)  # of a dataset of text
    rows_sha256: str = field(default="", init=False, repr=False)
    stop: tuple[str, ...] = field(default=(), init=False)  # texts that end its answers
    long_text: LongText | None = field(default=None, init=False, repr=False)
    files_sha256: str | None = field(default=None, init=False)  # of long text

    def __post_init__(self) -> None:
        object.__setattr__(self, "long_text", LongText.named(self.dataset))
        self._check()
        if self.long_text is not None:
            object.__setattr__(self, "stop", self.long_text.stop)
            object.__setattr__(self, "files_sha256", self.long_text.digest())
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
        found._check()
        found._check_with_rows()
        return found

    def _check(self) -> None:
        """Refuse settings, whatever the rows are."""
        for name in ("input_len", "output_len", "shared_len"):
            check_length(name, getattr(self, name))
        for name in ("prompts_per_concurrency", "least_prompts", "groups", "group_prompts"):
            at_least(name, getattr(self, name), 1)
        for name in ("groups", "group_prompts", "shared_len"):
            if not self.is_grouped and getattr(self, name) != getattr(Workload, name):
                raise refuse(name, shown(getattr(self, name)), "goes with dataset='gsp'; leave it out")
        if self.num_prompts is not None:
            at_least("num_prompts", self.num_prompts, 1)
            if self.is_grouped:
                raise refuse("num_prompts", self.num_prompts, "dataset='gsp' runs all groups; use groups=N")
        self.params(1)  # refuses values that cannot be sampled with
        refuse_unsampled({name: getattr(self, name) for name in SAMPLED})
        if not self.request_rate > 0:
            raise refuse("request_rate", self.request_rate, "use requests per second above 0, or inf for a closed loop")
        if self.burst:  # 0: all
            at_least("burst", self.burst, 1)
        if self.burst == 0 and self.request_rate < math.inf:
            works = "all prompts arrive at once; leave it out, or give a number as burst"
            raise refuse("request_rate", self.request_rate, works)
        if self.burst > 1 and self.request_rate == math.inf:
            raise refuse("burst", self.burst, "goes with a finite request_rate; give one, or use all")
        if self.sequential and self.is_open:
            raise refuse("request_rate", self.request_rate, "sequential requests do not arrive by a clock")
        of_data = self.dataset in ("gsm8k", SHAREGPT) or self.dataset.startswith(LM_EVAL)
        if self.data is not None and not of_data:
            raise refuse(
                "data",
                str(self.data),
                "goes with the data sets gsm8k, sharegpt and lm-eval:TASK; name another file as the data set itself",
            )
        if self.window and (self.long_text is None or self.window < bounds(self.input_len)[0]):
            raise refuse("window", self.window, "goes with long text, and is at least input_len; leave it out")
        if self.scramble not in SCRAMBLES:
            raise refuse("scramble", self.scramble, f"use one of {', '.join(SCRAMBLES)}")
        if self.is_random:
            self._refuse_given("are not text")
            if self.scramble != SCRAMBLES[0]:
                raise refuse("scramble", self.scramble, f"{self.dataset} prompts are random already; leave it out")
            return
        if not isinstance(self.output_len, int):
            raise refuse(
                "output_len", shown(self.output_len), "answers of text end by themselves; give one number, the maximum"
            )
        if self.long_text is not None:
            self._refuse_given("are continued as they are")
            if not isinstance(self.input_len, int):
                raise refuse("input_len", shown(self.input_len), "prompts of long text have one length; give a number")
        if self.has_own_lengths and self.data is None:
            raise refuse("data", None, f"{SHAREGPT} is not bundled; name ShareGPT_V3_unfiltered_cleaned_split.json")

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

    def _refuse_given(self, why: str) -> None:
        for name in ("chat_template", "thinking", "category", "turns"):
            if getattr(self, name) is not None:
                raise refuse(name, getattr(self, name), f"{self.dataset} prompts {why}; leave it out")

    @property
    def is_random(self) -> bool:
        return self.dataset in RANDOM

    @property
    def has_own_lengths(self) -> bool:
        """Whether each row has its own output length, which takes the tokenizer to know (`for_engines`)."""
        return self.dataset == SHAREGPT

    @property
    def ignores_eos(self) -> bool:
        """Whether answers are as long as asked, whatever the model writes."""
        return self.is_random or self.has_own_lengths

    @property
    def is_grouped(self) -> bool:
        return self.dataset == "gsp"

    @property
    def is_open(self) -> bool:
        """Whether prompts arrive by a clock."""
        return self.request_rate < math.inf or self.is_at_once

    @property
    def is_at_once(self) -> bool:
        """Whether all prompts of a point arrive together."""
        return self.burst == 0 or (self.uncapped and self.request_rate == math.inf)

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
        return sum(len(str(row.value)) for row in self.rows) / len(self.rows) / 4

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

    def for_engines(self, tokenizer: Tokenizer, count: int, longest: int) -> Workload:
        """With the rows and their own lengths that a point of `count` prompts takes; of other datasets as it is.
        longest: most tokens of a prompt and its answer."""
        if not self.has_own_lengths:
            return self
        how = {"chat_template": self.chat_template is not False, "thinking": self.thinking}
        rows = tuple(with_lengths(self.rows, tokenizer, count, longest, **how))
        if not rows:
            works = f"of {LEAST_TOKENS} tokens or more each, that fit into a context of {longest} tokens together"
            raise refuse("data", str(self.data), f"has no conversation with a prompt and an answer {works}")
        found = copy(self)
        object.__setattr__(found, "rows", rows)
        return found

    def prompts(self, tokenizer: Tokenizer, count: int) -> list[list[int]]:
        """The first `count` prompts as token ids. A file with fewer rows starts over."""
        if self.is_grouped:
            parts = self.groups, self.group_prompts, self.shared_len, self.input_len
            return grouped_ids(tokenizer, count, *parts, self.seed)
        if self.is_random:
            return random_ids(tokenizer, count, self.input_len, self.seed)
        if self.long_text is not None:
            encoded = [window.end(tokenizer, bounds(self.input_len)[0]) for window in self.windows(tokenizer, count)]
        else:
            template = self.chat_template is not False
            encoded = [
                row.encode(tokenizer, chat_template=template, thinking=self.thinking) for row in self.rows[:count]
            ]
        encoded = scrambled(tokenizer, encoded, self.scramble, self.seed)
        return [encoded[index % len(encoded)] for index in range(count)]

    def windows(self, tokenizer: Tokenizer, count: int) -> list[Window]:
        """The windows of long text whose ends are the first `count` prompts; none where they are not long text."""
        size = max(self.window, bounds(self.input_len)[0])
        return self.long_text.windows(tokenizer, size, count, self.seed) if self.long_text else []

    def messages(self, count: int) -> list[list[dict[str, Any]] | None]:
        """What the chat template renders as the first `count` prompts; None for those of another kind."""
        rows = [row.value if row.form == "messages" and self.chat_template is not False else None for row in self.rows]
        return [rows[index % len(rows)] for index in range(count)] if rows else [None] * count
