"""The sentences that summarize a sweep's table."""

from __future__ import annotations

import math

from specbatch.records.verdicts import LOSES, NOT_INTERLEAVED, ONE_REPEAT, PAYS, UNDECIDED, Speedup
from specbatch.sweeps.report.sentences import conclusion, precision_sentences


def test_faster_slower_and_no_difference() -> None:
    found = conclusion(
        {
            (1, "v1"): Speedup(1.83, 1.77, 1.85, PAYS, 3),
            (1, "v2"): Speedup(0.8, 0.7, 0.9, LOSES, 3),
            (4, "v1"): Speedup(1.02, 0.99, 1.05, UNDECIDED, 3),
            (4, "v2+piecewise"): Speedup(1.2, 1.1, 1.3, PAYS, 3),
        },
        {"v1": "baseline", "v2": "baseline", "v2+piecewise": "baseline+piecewise"},
    )
    assert found == [
        "Concurrency 1, output tok/s: v1 is 1.83 (1.77-1.85) times the baseline, v2 is 0.80 (0.70-0.90) times the "
        "baseline.",
        "Concurrency 4, output tok/s: no difference is shown between v1 and the baseline (0.99-1.05 times), "
        "v2+piecewise is 1.20 (1.10-1.30) times baseline+piecewise.",
    ]


def test_runs_that_were_not_interleaved_are_marked() -> None:
    found = conclusion({(1, "v2"): Speedup(1.5, 1.4, 1.6, NOT_INTERLEAVED, 3)}, {"v2": "baseline"})
    assert found == ["Concurrency 1, output tok/s: v2 is 1.50 (1.40-1.60) times the baseline (not interleaved)."]


def test_unknown_precision_is_not_within_what_was_wanted() -> None:
    (found,) = precision_sentences({(1, "v1"): 0.01, (1, "v2"): math.inf}, 0.02)
    assert "STILL NOT WITHIN ±2%: v1 ±1%, v2 unknown;" in found


def test_one_repeat_shows_no_interval() -> None:
    found = conclusion({(1, "v2"): Speedup(1.5, None, None, ONE_REPEAT, 1)}, {"v2": "v1"})
    assert found[0] == "Concurrency 1, output tok/s: v2 is 1.50 times v1."
    assert "--repeats 3" in found[1]


def test_a_single_configuration_has_no_conclusion() -> None:
    assert conclusion({}, {}) == []
