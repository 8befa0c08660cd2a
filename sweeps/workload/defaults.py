"""Default workload of a sweep: GSM8K questions, with fewer prompts, shorter answers and less concurrency on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """concurrency: as the option has it. output_len: tokens per answer. prompts_per_concurrency: prompts of a point per
    concurrent request. num_prompts: of a point without a cap on the requests in flight."""

    concurrency: str
    output_len: int
    prompts_per_concurrency: int
    num_prompts: int


GPU = Lengths("1,8,32,128", 128, 4, 256)
CPU = Lengths("1,8,32", 32, 1, 8)  # the bundled model takes about ten minutes on two cores
LEAST_PROMPTS = 4  # of a point, so that medians mean something
REPEATS = 3
INPUT_LEN = 128  # tokens of a random prompt
LONG_RUN = (
    f"--output-len {GPU.output_len} --prompts-per-concurrency {GPU.prompts_per_concurrency} "
    f"--concurrency {GPU.concurrency}"
)


def default_dataset(*, input_len_given: bool) -> str:
    """GSM8K's questions, because random token ids flatter n-gram drafts; --input-len is an option of random prompts."""
    return "random" if input_len_given else "gsm8k"
