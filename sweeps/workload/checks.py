"""Refuses settings of a workload that do not go together."""

from __future__ import annotations

import math

from specbatch.core.sampling_params import SAMPLED, SamplingParams, refuse_unsampled
from specbatch.errors import at_least, refuse
from specbatch.sweeps.workload.datasets import LM_EVAL
from specbatch.sweeps.workload.lengths import bounds, check_length, shown
from specbatch.sweeps.workload.settings import WorkloadSettings
from specbatch.sweeps.workload.sharegpt import SHAREGPT
from specbatch.sweeps.workload.token_ids import SCRAMBLES


def check_settings(work: WorkloadSettings) -> None:
    """Refuse settings that do not go together, whatever the rows are."""
    for name in ("input_len", "output_len", "shared_len"):
        check_length(name, getattr(work, name))
    for name in ("prompts_per_concurrency", "least_prompts", "groups", "group_prompts"):
        at_least(name, getattr(work, name), 1)
    for name in ("groups", "group_prompts", "shared_len"):
        if not work.is_grouped and getattr(work, name) != getattr(WorkloadSettings, name):
            raise refuse(name, shown(getattr(work, name)), "goes with dataset='gsp'; leave it out")
    if work.num_prompts is not None:
        at_least("num_prompts", work.num_prompts, 1)
        if work.is_grouped:
            raise refuse("num_prompts", work.num_prompts, "dataset='gsp' runs all groups; use groups=N")
    sampled = {name: getattr(work, name) for name in SAMPLED}
    SamplingParams(**sampled)  # refuses values that cannot be sampled with
    refuse_unsampled(sampled)
    if not work.request_rate > 0:
        raise refuse("request_rate", work.request_rate, "use requests per second above 0, or inf for a closed loop")
    if work.burst:  # 0: all
        at_least("burst", work.burst, 1)
    if work.burst == 0 and work.request_rate < math.inf:
        works = "all prompts arrive at once; leave it out, or give a number as burst"
        raise refuse("request_rate", work.request_rate, works)
    if work.burst > 1 and work.request_rate == math.inf:
        raise refuse("burst", work.burst, "goes with a finite request_rate; give one, or use all")
    if work.sequential and work.is_open:
        raise refuse("request_rate", work.request_rate, "sequential requests do not arrive by a clock")
    of_data = work.dataset in ("gsm8k", SHAREGPT) or work.dataset.startswith(LM_EVAL)
    if work.data is not None and not of_data:
        raise refuse(
            "data",
            str(work.data),
            "goes with the data sets gsm8k, sharegpt and lm-eval:TASK; name another file as the data set itself",
        )
    if work.window and (work.long_text is None or work.window < bounds(work.input_len)[0]):
        raise refuse("window", work.window, "goes with long text, and is at least input_len; leave it out")
    if work.scramble not in SCRAMBLES:
        raise refuse("scramble", work.scramble, f"use one of {', '.join(SCRAMBLES)}")
    if work.is_random:
        _refuse_given(work, "are not text")
        if work.scramble != SCRAMBLES[0]:
            raise refuse("scramble", work.scramble, f"{work.dataset} prompts are random already; leave it out")
        return
    if not isinstance(work.output_len, int):
        raise refuse(
            "output_len", shown(work.output_len), "answers of text end by themselves; give one number, the maximum"
        )
    if work.long_text is not None:
        _refuse_given(work, "are continued as they are")
        if not isinstance(work.input_len, int):
            raise refuse("input_len", shown(work.input_len), "prompts of long text have one length; give a number")
    if work.has_own_lengths and work.data is None:
        raise refuse("data", None, f"{SHAREGPT} is not bundled; name ShareGPT_V3_unfiltered_cleaned_split.json")


def _refuse_given(work: WorkloadSettings, why: str) -> None:
    for name in ("chat_template", "thinking", "category", "turns"):
        if getattr(work, name) is not None:
            raise refuse(name, getattr(work, name), f"{work.dataset} prompts {why}; leave it out")
