"""What a sweep runs: the same prompts for every configuration, chosen by dataset, lengths and seed."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import at_least, refuse
from specbatch.prompts import Prompt, read_prompts
from specbatch.request import SamplingParams

if TYPE_CHECKING:
    from specbatch.tokenizer import Tokenizer

LEAST_PROMPTS = 4  # of a point, so that its medians are medians of something


@dataclass(frozen=True)
class Workload:
    """Prompts and output lengths of every point.

    dataset     "random": seeded token ids of exactly input_len, outputs of exactly output_len;
                "gsp" (generated shared prefix, after SGLang's benchmark): `groups` of `group_prompts` seeded prompts,
                each of shared_len tokens that are its group's and input_len of its own, all in shuffled order;
                "gsm8k": its test questions, from `data` or the hub; or the path of a JSONL file as in
                `specbatch.prompts`
    input_len   tokens per random prompt; with "gsp" its own
    output_len  tokens per answer; for text the most, as an end token ends it
    prompts_per_concurrency  a point runs this many prompts per running request, and never fewer than four; with "gsp"
                it runs all groups
    request_rate  prompts that arrive in a second, at random (a Poisson process of this seed, the first one at once);
                inf: a closed loop, where a prompt is submitted when another one ends
    """

    dataset: str = "random"
    data: Path | None = None
    input_len: int = 128
    output_len: int = 128
    prompts_per_concurrency: int = 4
    seed: int = 0
    groups: int = 32
    group_prompts: int = 16
    shared_len: int = 2048
    request_rate: float = math.inf
    rows: tuple[Prompt, ...] = field(default=(), init=False, repr=False)  # of the file, for datasets of text

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "prompts_per_concurrency", "groups", "group_prompts", "shared_len"):
            at_least(name, getattr(self, name), 1)
        for name in ("groups", "group_prompts", "shared_len"):
            if not self.is_grouped and getattr(self, name) != getattr(Workload, name):
                raise refuse(name, getattr(self, name), "goes with --dataset gsp; leave it out")
        if not self.request_rate > 0:
            raise refuse("request_rate", self.request_rate, "use requests per second above 0, or inf for a closed loop")
        if self.data is not None and self.dataset != "gsm8k":
            raise refuse("data", str(self.data), "goes with --dataset gsm8k; name other files as --dataset FILE.jsonl")
        object.__setattr__(self, "rows", tuple(self._read()))

    @property
    def is_random(self) -> bool:
        return self.dataset in ("random", "gsp")

    @property
    def is_grouped(self) -> bool:
        return self.dataset == "gsp"

    @property
    def is_open(self) -> bool:
        """Do prompts arrive by a clock?"""
        return self.request_rate < math.inf

    @property
    def prompt_len(self) -> int | None:
        """Tokens of each prompt; None where they differ."""
        return self.input_len + self.shared_len * self.is_grouped if self.is_random else None

    @property
    def max_model_len(self) -> int | None:
        """What the prompts need; None where it takes the tokenizer to know."""
        return None if self.prompt_len is None else self.prompt_len + self.output_len

    @property
    def params(self) -> SamplingParams:
        """Greedy, so that every configuration must produce the same tokens."""
        return SamplingParams(temperature=0.0, max_new_tokens=self.output_len, ignore_eos=self.is_random)

    def count(self, concurrency: int) -> int:
        if self.is_grouped:
            return self.groups * self.group_prompts
        return max(self.prompts_per_concurrency * concurrency, LEAST_PROMPTS)

    def arrivals(self, count: int) -> list[float] | None:
        """Seconds at which the first `count` prompts arrive; None in a closed loop."""
        if not self.is_open:
            return None
        clock = random.Random(f"{self.seed}/arrivals")
        return list(accumulate((clock.expovariate(self.request_rate) for _ in range(count - 1)), initial=0.0))

    def prompts(self, tokenizer: Tokenizer, count: int) -> list[list[int]]:
        """The first `count` prompts as token ids. A file with fewer rows starts over."""
        if not self.is_random:
            encoded = [row.encode(tokenizer) for row in self.rows[:count]]
            return [encoded[index % len(encoded)] for index in range(count)]
        avoid = tokenizer.eos_ids | {tokenizer.bos_id}
        usable = [token for token in range(tokenizer.vocab_size) if token not in avoid]

        def draw(name: str, length: int) -> list[int]:
            return random.Random(f"{self.seed}/{name}").choices(usable, k=length)

        if not self.is_grouped:
            return [draw(f"{index}", self.input_len) for index in range(count)]
        shared = [draw(f"group {group}", self.shared_len) for group in range(self.groups)]
        order = [group for group in range(self.groups) for _ in range(self.group_prompts)]
        random.Random(f"{self.seed}/order").shuffle(order)
        return [shared[group] + draw(f"{index}", self.input_len) for index, group in enumerate(order[:count])]

    def describe(self, prompts: list[list[int]]) -> dict[str, Any]:
        """What a record says of the prompts of its point."""
        return {
            "dataset": self.dataset,
            "data": str(self.data) if self.data else None,
            "input_len": self.prompt_len,
            "output_len": self.output_len,
            "ignore_eos": self.is_random,
            "prompts": len(prompts),
            "distinct_prompts": len({tuple(prompt) for prompt in prompts}),
            "seed": self.seed,
            "shared": {name: getattr(self, name) for name in ("groups", "group_prompts", "shared_len")}
            if self.is_grouped
            else None,
            "request_rate": self.request_rate if self.is_open else None,
            "prompts_sha256": sha256_of(prompts),
        }

    def _read(self) -> list[Prompt]:
        if self.is_random:
            return []
        if self.dataset == "gsm8k":
            return read_prompts(self.data, "data") if self.data else _gsm8k_from_hub()
        if not self.dataset.endswith(".jsonl"):
            raise refuse("dataset", self.dataset, "use random, gsp, gsm8k or the path of a .jsonl file")
        return read_prompts(Path(self.dataset), "dataset")


def sha256_of(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()


def _gsm8k_from_hub() -> list[Prompt]:
    try:
        from datasets import load_dataset

        rows = load_dataset("openai/gsm8k", "main", split="test")
    except Exception as error:  # whatever the hub client raises when it is offline and has nothing cached
        raise refuse(
            "dataset",
            "gsm8k",
            "not in the local cache and the hub cannot be reached; pass --data FILE (JSONL of questions), "
            "run once with network access, or use --dataset random",
        ) from error
    return [Prompt(line=number, form="question", value=row["question"]) for number, row in enumerate(rows, start=1)]
