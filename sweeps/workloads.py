"""What a sweep runs: the same prompts for every configuration, chosen by dataset, lengths and seed."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
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
                "gsm8k": its test questions, from `data` or the hub; or the path of a JSONL file as in
                `specbatch.prompts`
    input_len   tokens per random prompt
    output_len  tokens per answer; for text the most, as an end token ends it
    prompts_per_concurrency  a point runs this many prompts per running request, and never fewer than four
    """

    dataset: str = "random"
    data: Path | None = None
    input_len: int = 128
    output_len: int = 128
    prompts_per_concurrency: int = 4
    seed: int = 0
    rows: tuple[Prompt, ...] = field(default=(), init=False, repr=False)  # of the file, for datasets of text

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "prompts_per_concurrency"):
            at_least(name, getattr(self, name), 1)
        if self.data is not None and self.dataset != "gsm8k":
            raise refuse("data", str(self.data), "goes with --dataset gsm8k; name other files as --dataset FILE.jsonl")
        object.__setattr__(self, "rows", tuple(self._read()))

    @property
    def is_random(self) -> bool:
        return self.dataset == "random"

    @property
    def max_model_len(self) -> int | None:
        """What the prompts need; None where it takes the tokenizer to know."""
        return self.input_len + self.output_len if self.is_random else None

    @property
    def params(self) -> SamplingParams:
        """Greedy, so that every configuration must produce the same tokens."""
        return SamplingParams(temperature=0.0, max_new_tokens=self.output_len, ignore_eos=self.is_random)

    def count(self, concurrency: int) -> int:
        return max(self.prompts_per_concurrency * concurrency, LEAST_PROMPTS)

    def prompts(self, tokenizer: Tokenizer, count: int) -> list[list[int]]:
        """The first `count` prompts as token ids. A file with fewer rows starts over."""
        if not self.is_random:
            encoded = [row.encode(tokenizer) for row in self.rows[:count]]
            return [encoded[index % len(encoded)] for index in range(count)]
        avoid = tokenizer.eos_ids | {tokenizer.bos_id}
        usable = [token for token in range(tokenizer.vocab_size) if token not in avoid]
        return [random.Random(f"{self.seed}/{index}").choices(usable, k=self.input_len) for index in range(count)]

    def describe(self, prompts: list[list[int]]) -> dict[str, Any]:
        """What a record says of the prompts of its point."""
        return {
            "dataset": self.dataset,
            "data": str(self.data) if self.data else None,
            "input_len": self.input_len if self.is_random else None,
            "output_len": self.output_len,
            "ignore_eos": self.is_random,
            "prompts": len(prompts),
            "distinct_prompts": len({tuple(prompt) for prompt in prompts}),
            "seed": self.seed,
            "prompts_sha256": sha256_of(prompts),
        }

    def _read(self) -> list[Prompt]:
        if self.is_random:
            return []
        if self.dataset == "gsm8k":
            return read_prompts(self.data, "data") if self.data else _gsm8k_from_hub()
        if not self.dataset.endswith(".jsonl"):
            raise refuse("dataset", self.dataset, "use random, gsm8k or the path of a .jsonl file")
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
