"""The options of `specbatch bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbatch.config.settings import check_fields, setting, whole
from specbatch.config.values import names, whole_numbers
from specbatch.errors import at_least, each_once, refuse
from specbatch.records.bases import BASELINE

MACHINE = "machine"
LENGTHS = {  # section: the options that determine its lengths, the one of prompt tokens first
    "decode": ("decode_tokens", "new_tokens"),
    "closed": ("input_len", "output_len"),
    "ttft": ("ttft_tokens",),
    "verify": ("decode_tokens", "new_tokens"),
    "onebatch": ("input_len", "output_len"),
}
SECTIONS = (MACHINE, *LENGTHS)
USUAL = tuple(name for name in SECTIONS if name != "onebatch")
COMPARED = (BASELINE, "v1", "v2", "v2+piecewise")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, `repeats` times each. configs: None: all that the device supports.

    sampling: parameters of `Workload`; greedy without any
    given: options of `LENGTHS`, and "sections", that the user gave
    """

    sections: tuple[str, ...] = setting(
        USUAL,
        "Sections to run: machine, decode, closed, ttft, verify; and onebatch, the lines of SGLang's bench_one_batch, "
        "which runs only if it is named.",
        parse=names,
    )
    configs: tuple[str, ...] | None = setting(
        None,
        "Configurations for sections closed, ttft, decode and onebatch: v1, v2, v2+piecewise; with speculation also "
        "baseline. Section verify always runs v2. Default: all that the device supports.",
        parse=names,
    )
    batch: tuple[int, ...] = setting(
        (1, 32, 128), "Batch sizes of a decode step, and of section onebatch.", parse=whole_numbers
    )
    verify_batch: tuple[int, ...] = setting(
        (1, 32), "Batch sizes of the verify step (15 draft tokens + root per request).", parse=whole_numbers
    )
    decode_tokens: int = setting(512, "Context length at which decode and verify steps are measured.", whole(1))
    new_tokens: int = setting(288, "Tokens that a decode or verify step is averaged over.", whole(1))
    concurrency: tuple[int, ...] = setting(
        (1, 8, 32, 128), "Maximum numbers of requests in flight in a closed loop.", parse=whole_numbers
    )
    input_len: int = setting(1024, "Prompt tokens in a closed loop, and in section onebatch.", whole(1))
    output_len: int = setting(256, "New tokens in a closed loop, and in section onebatch.", whole(1))
    ttft_tokens: tuple[int, ...] = setting((128, 1024, 8192), "Prompt tokens of a single request.", parse=whole_numbers)
    repeats: int = setting(3, "Rounds over the configurations, interleaved: A B C C B A.", whole(1))
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for option, allowed in (("sections", SECTIONS), ("configs", COMPARED)):
            for name in getattr(self, option) or ():
                if name not in allowed:
                    raise refuse(option, name, f"use some of {', '.join(allowed)}")
        for option in ("sections", "configs", "batch", "verify_batch", "concurrency", "ttft_tokens"):
            values = getattr(self, option)
            if values is not None:
                each_once(option, values)
        for option in ("batch", "verify_batch", "concurrency", "ttft_tokens"):
            for number in getattr(self, option):
                at_least(option, number, 1)
        check_fields(self)
