"""The sentences that summarize a sweep's table."""

from __future__ import annotations

import pandas as pd

from specbatch.records.intervals import Interval
from specbatch.sweeps.report.conclusion import conclusion

COLUMNS = ("concurrency", "configuration", "repeats", "ratio", "ratio_min", "ratio_max")


def rows(*cells: tuple[object, ...]) -> pd.DataFrame:
    return pd.DataFrame(cells, columns=COLUMNS)


def test_faster_slower_and_no_difference() -> None:
    found = conclusion(
        rows(
            (1, "baseline", 3, 1.0, 1.0, 1.0),
            (1, "v1", 3, 1.83, 1.77, 1.85),
            (1, "v2", 3, 0.8, 0.7, 0.9),
            (4, "baseline", 3, 1.0, 1.0, 1.0),
            (4, "v1", 3, 1.02, 1.01, 1.05),
        ),
        "baseline",
        {(1, "v1"): Interval(9.0, 11.0, ""), (1, "v2"): Interval(-3.0, -1.0, ""), (4, "v1"): Interval(-0.1, 0.5, "")},
    )
    assert found == [
        "Concurrency 1, output tok/s: v1 is 1.83 times the baseline (1.77-1.85), v2 is 0.80 times the baseline "
        "(0.70-0.90).",
        "Concurrency 4, output tok/s: no difference is shown between v1 and the baseline (ratio 1.01-1.05).",
    ]


def test_one_repeat_shows_no_spread() -> None:
    found = conclusion(rows((1, "baseline", 1, 1.0, 1.0, 1.0), (1, "v2", 1, 1.5, 1.5, 1.5)), "baseline", {})
    assert found[0] == "Concurrency 1, output tok/s: v2 is 1.50 times the baseline."
    assert "--repeats 3" in found[1]


def test_ratios_over_the_first_configuration() -> None:
    found = conclusion(rows((1, "v1", 1, 1.0, 1.0, 1.0), (1, "v2", 1, 1.5, 1.5, 1.5)), "v1", {})
    assert found[0] == "Concurrency 1, output tok/s: v2 is 1.50 times v1."


def test_a_single_configuration_has_no_conclusion() -> None:
    assert conclusion(rows((1, "v2", 1, float("nan"), float("nan"), float("nan"))), None, {}) == []
