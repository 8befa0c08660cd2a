"""Default workload of a sweep: GSM8K questions, with fewer prompts, shorter answers and less concurrency on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbatch.errors import counted

if TYPE_CHECKING:
    from specbatch.sweeps.run.runner import SweepOptions


@dataclass(frozen=True)
class Lengths:
    """concurrency: as the option has it. output_len: tokens per answer. prompts_per_concurrency: prompts of a point per
    concurrent request."""

    concurrency: str
    output_len: int
    prompts_per_concurrency: int


GPU = Lengths("1,8,32,128", 128, 4)
CPU = Lengths("1,8,32", 32, 1)  # the bundled model takes about ten minutes on two cores
INPUT_LEN = 128  # tokens of a random prompt
LONG_RUN = (
    f"--output-len {GPU.output_len} --prompts-per-concurrency {GPU.prompts_per_concurrency} "
    f"--concurrency {GPU.concurrency}"
)


def default_dataset(*, input_len_given: bool) -> str:
    """GSM8K's questions, because random token ids flatter n-gram drafts; --input-len is an option of random prompts."""
    return "random" if input_len_given else "gsm8k"


def resolved(options: SweepOptions, configurations: Iterable[str], *, shortened: bool) -> str:
    """The settings that a sweep runs with; `shortened`: defaults for a CPU are among them."""
    from specbatch.records.sweep_plan import LEAST_PROMPTS
    from specbatch.sweeps.workload.workloads import lines_of  # not imported for the help of `sweep`

    workload = options.workload
    lengths = lines_of(workload.describe([]))["workload"]
    count = workload.prompts_per_concurrency
    prompts = f"{counted(count, 'prompt')} per concurrent request (at least {LEAST_PROMPTS})"
    if workload.is_grouped:
        prompts = f"{workload.groups * workload.group_prompts} prompts"
    rate = "" if workload.request_rate == math.inf else f", {workload.request_rate:g} requests/s"
    least = "" if options.until_precise is None else "at least "
    repeats = f"{least}{counted(options.repeats, 'repeat')}"
    line = (
        f"settings: {lengths}; {prompts}{rate}; concurrency {', '.join(map(str, options.concurrency))}; "
        f"{repeats}; configurations {', '.join(configurations)}"
    )
    return f"{line}\nshort run, the default on a CPU; for a long one add {LONG_RUN}" if shortened else line
