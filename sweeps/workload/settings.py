"""Settings of a workload: where its prompts come from, how long they and the answers are, and when they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from specbatch.config.settings import setting
from specbatch.config.values import burst_of, length, lengths, one_or_several, rates
from specbatch.jobs.long_text import LongText
from specbatch.records.objectives import Objectives
from specbatch.sweeps.workload.datasets import TaskReader
from specbatch.sweeps.workload.defaults import INPUT_LEN, LEAST_PROMPTS
from specbatch.sweeps.workload.lengths import Length
from specbatch.sweeps.workload.rounds import LOAD
from specbatch.sweeps.workload.sharegpt import SHAREGPT
from specbatch.sweeps.workload.token_ids import SCRAMBLES

RANDOM = ("random", "gsp")  # datasets of random token ids
TEMPLATE = "Chat template"  # a box of --help


@dataclass(frozen=True)
class WorkloadSettings:
    """What a workload can be.

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

    @property
    def is_random(self) -> bool:
        return self.dataset in RANDOM

    @cached_property  # its folder is walked
    def long_text(self) -> LongText | None:
        """The long text that prompts are the ends of, if they are. Refused: a folder that does not exist."""
        return LongText.named(self.dataset)

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
