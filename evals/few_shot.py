"""The four lines that few-shot benchmarks of SGLang print (sglang/test/few_shot_gsm8k.py of 0.5.23).

    Accuracy: 0.500
    Invalid: 0.250
    Latency: 2.000 s
    Output throughput: 100.000 token/s

Accuracy is the score of the filter that takes the last number of an answer, as theirs does (flexible-extract), else of
the first filter. Invalid is the share of answers in which it found nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.records.answers import Score
from specbatch.records.run_record import RunRecord

FILTER = "flexible-extract"


def few_shot_lines(scores: Sequence[Score], record: RunRecord) -> str:
    """The lines, after the name of the filter; empty for a task without answers that can be invalid, and for times that
    are not known because the run was interrupted."""
    found = [score for score in scores if score.unparsed is not None and score.better == "higher"]
    if not found:
        return ""
    score = next((score for score in found if score.filter == FILTER), found[0])
    seconds, speed = (record.metrics.get(name) for name in ("duration_s", "output_throughput"))
    if seconds is None or speed is None:
        return ""
    lines = (
        f"Accuracy: {score.value:.3f}",
        f"Invalid: {score.unparsed:.3f}",
        f"Latency: {seconds:.3f} s",
        f"Output throughput: {speed:.3f} token/s",
    )
    return "\n".join([f"As few-shot benchmarks print it ({score.filter}):", "", "```", *lines, "```"])
