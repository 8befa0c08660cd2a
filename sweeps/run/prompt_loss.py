"""The model's loss on the prompts of a sweep, which shows whether they are text or random ids.

For tokens drawn uniformly from a vocabulary of V the expected loss of any model is at least log V nats per token
(Gibbs' inequality), and of a trained model clearly more. On text it is a few nats: acceptance measured on prompts with
a loss near log V is not that of text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.workload.workloads import Workload

PROMPTS, TOKENS = 16, 256  # that are scored, and the most of each


@dataclass
class PromptLoss:
    """Adds `prompt_loss` and `random_prompt_loss` (nats per token) to the workload of records, once measured with the
    first engine of this package that runs a point. Called as `Benchmark.measured`. Servers do not score prompts."""

    workload: Workload
    found: dict[str, float] = field(default_factory=dict)

    def __call__(self, engine: Any, point: Point, record: RunRecord) -> None:
        if "server" in record.config or self.workload.is_random:
            return
        if not self.found:
            prompts = self.workload.prompts(engine.tokenizer, PROMPTS)
            pairs = [(prompt[:1], prompt[1 : 1 + TOKENS]) for prompt in prompts if len(prompt) > 1]
            if not pairs:
                return
            total = sum(found.logprob for found in engine.score(pairs))
            self.found["prompt_loss"] = -total / sum(len(tokens) for _, tokens in pairs)
            self.found["random_prompt_loss"] = math.log(engine.tokenizer.vocab_size)
        record.workload |= self.found
