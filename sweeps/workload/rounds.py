"""Rounds of a sweep: each configuration at each concurrency, and how often."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from specbatch.config.settings import setting
from specbatch.config.values import share, whole_numbers
from specbatch.errors import at_least, each_once, refuse

LOAD = "Load"  # a box of --help


@dataclass(frozen=True)
class Rounds:
    """Each configuration runs at each concurrency, `repeats` times.

    until_precise   adds rounds at each concurrency until the 95% interval of every ratio to the baseline, which is
                    valid at every number of rounds (`specbatch.records.estimates`), is at most this (0.02: ±2%), or
                    `most_repeats` rounds have run; None: adds none
    """

    concurrency: tuple[int, ...] = setting(
        (1, 8, 32, 128), "Maximum numbers of requests in flight, separated by commas.", panel=LOAD, parse=whole_numbers
    )
    repeats: int = setting(
        1,
        "Rounds over the configurations, interleaved: A B C C B A. Use 3 or more: one has no intervals, and those of 2 "
        "are 3.6 times as wide as those of 3.",
        panel=LOAD,
    )
    _: KW_ONLY
    until_precise: float | None = setting(
        None,
        "Add rounds, after --repeats, until the 95% interval of every ratio of output tok/s to the baseline, valid at "
        "every number of rounds, is at most ±P%.",
        panel=LOAD,
        metavar="P%",
        parse=share,
    )
    most_repeats: int = setting(10, "--until-precise: maximum number of rounds at a concurrency.", panel=LOAD)

    def __post_init__(self) -> None:
        for number in self.concurrency:
            if number < 1:
                raise refuse("concurrency", number, "use whole numbers of at least 1, for example 1,8,32,128")
        each_once("concurrency", self.concurrency)
        at_least("repeats", self.repeats, 1)
        if self.until_precise is not None:
            at_least("repeats", self.repeats, 2)  # of one there is no interval
            at_least("most_repeats", self.most_repeats, self.repeats)
