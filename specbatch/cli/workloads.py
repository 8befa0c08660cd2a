"""Workloads of `specbatch sweep` and `specbatch advise`: the defaults of their options, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.cli.output import say
from specbatch.errors import each_once, refuse
from specbatch.jobs.long_text import DOCUMENTS, MANY_SHOT, REPOSITORY, LongText
from specbatch.sweeps.workload.defaults import CPU, GPU, INPUT_LEN, REPEATS, Lengths, default_dataset
from specbatch.sweeps.workload.lengths import shown
from specbatch.sweeps.workload.settings import RANDOM
from specbatch.sweeps.workload.sharegpt import SHAREGPT
from specbatch.sweeps.workload.workloads import Workload

PANEL = "Workload"  # a box of --help
AXES = ("input_len", "scramble", "request_rate")  # of which sweep takes several values
DEFAULTS = {  # as --help shows them
    "concurrency": f"{GPU.concurrency}; {CPU.concurrency} on a CPU",
    "repeats": f"{REPEATS}",
    "dataset": f"{default_dataset(input_len_given=False)}; with --input-len {default_dataset(input_len_given=True)}",
    "input_len": f"{INPUT_LEN}",
    "window": "the longest --input-len",
    "output_len": f"{GPU.output_len}; {CPU.output_len} on a CPU",
    "request_rate": "inf",
    "prompts_per_concurrency": f"{GPU.prompts_per_concurrency}; {CPU.prompts_per_concurrency} on a CPU",
}


def axis_of(options: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """The option of a workload that was given several values, and these; None without one. Refuses two."""
    from specbatch.sweeps.report.parts import label_of

    several = {name: value for name in AXES if isinstance(value := options.get(name), list)}
    for name, value in several.items():
        each_once(name, [label_of(one) for one in value])
    if len(several) > 1:
        first, other = several
        raise refuse(other, ",".join(map(str, several[other])), f"{first} has several, too; give one value")
    return next(iter(several.items()), None)


def asked_workload(
    options: Mapping[str, Any], lengths: Lengths, *, seed: int, uncapped: bool = False, **sampling: Any
) -> Workload:
    """The workload of a command, whose notes are shown. options: those of `Workload`, None where not given; lengths:
    the defaults of the machine; uncapped: as in `Workload`."""
    from specbatch.evals.prompts import task_prompts

    given = {name: value for name, value in options.items() if value is not None}
    if (axis := axis_of(given)) is not None:
        raise refuse(axis[0], ",".join(map(str, axis[1])), "sweep alone takes several values; give one")
    usual: dict[str, Any] = {
        "dataset": default_dataset(input_len_given="input_len" in given),
        "output_len": lengths.output_len,
        "prompts_per_concurrency": lengths.prompts_per_concurrency,
    }
    if uncapped and given.get("dataset", usual["dataset"]) != "gsp":
        usual["num_prompts"] = lengths.num_prompts
        if "prompts_per_concurrency" in given:
            works = "there is no concurrency without --concurrency; use num_prompts"
            raise refuse("prompts_per_concurrency", given["prompts_per_concurrency"], works)
    elif "num_prompts" in given and "prompts_per_concurrency" in given:
        raise refuse("num_prompts", given["num_prompts"], "--prompts-per-concurrency sets it, too; leave one out")
    if given.get("dataset") == SHAREGPT:
        if "output_len" in given:
            works = "answers of sharegpt are as long as those of its rows; leave it out"
            raise refuse("output_len", shown(given["output_len"]), works)
        del usual["output_len"]
    given = usual | given
    if "input_len" in given and given["dataset"] not in RANDOM and LongText.named(given["dataset"]) is None:
        works = f"goes with --dataset random, gsp, {REPOSITORY}FOLDER, {DOCUMENTS}FOLDER and {MANY_SHOT}; leave it out"
        raise refuse("input_len", shown(given["input_len"]), works)
    asked = Workload(**given, **sampling, seed=seed, uncapped=uncapped, read_task=task_prompts)
    for note in asked.notes():
        say(note)
    return asked
