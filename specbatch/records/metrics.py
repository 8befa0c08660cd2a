"""Metric registry: the name, unit, definition, formula, direction and columns of every number of a run.

Records, tables, plots, `compare`, `gate` and the documentation take them from here, so that a new number is an entry in
`request_metrics`, `step_metrics` or `bench_metrics`.
"""

from __future__ import annotations

from typing import Literal

from specbatch.records.bench_metrics import OF_BENCH
from specbatch.records.metric import Metric
from specbatch.records.request_metrics import OF_REQUESTS
from specbatch.records.step_metrics import OF_STEPS

METRICS: dict[str, Metric] = {metric.key: metric for metric in (*OF_REQUESTS, *OF_STEPS, *OF_BENCH)}

# Numbers that take the run of a baseline, too. No record holds them.
RELATIVE: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric(
            "break_even",
            "break-even accept length",
            "",
            "The accept length at which drafting is as fast as no speculation: drafting pays above it. The geometric "
            "mean over repeats, with its 95% interval. The baseline is that of the speedup.",
            "step time with drafts / step time of the baseline, both with the same number of requests",
            better="lower",
            decimals=3,
        ),
        Metric(
            "step_ratio",
            "speedup by steps",
            "",
            "How much faster the steps of speculation emit tokens than those of the baseline, prompts left out. The "
            "geometric mean over repeats, with its 95% interval.",
            "accept length / break-even accept length",
            better="higher",
            decimals=2,
        ),
        Metric(
            "ratio",
            "speedup",
            "",
            "Output throughput over that of the baseline: the geometric mean of the ratios of the rounds that both "
            "measured, with its 95% interval (a t interval of their logarithms; with --until-precise a confidence "
            "sequence). The baseline is the configuration without speculation that has the same prefill graphs and "
            "number of devices; where there is none, and for configurations without speculation, the one named "
            "`baseline`, else the first without speculation, else the first. It counts prompts, which drafting does "
            "not make faster. Sections of `bench` compare decode tok/s, full-batch steps or TTFT instead.",
            "output tok/s / output tok/s of the baseline",
            better="higher",
            decimals=2,
        ),
    )
}
# Columns of the acceptance table: title -> definition.
ACCEPTANCE: dict[str, str] = {
    "verifies": "Verifies from which at least one token was kept. Formula: sum over requests.",
    "reached draft 1, 2, ... (%)": "Share of the verifies that drafted at least j tokens in which draft j and all "
    "drafts before it were accepted.",
    "accepted where tried (%)": "Share of the verifies that accepted all drafts before draft j in which draft j was "
    'accepted, too. For drafts of equal length, "reached" is the cumulative product of these.',
    "emitted 1, 2, ... tokens (%)": "Share of the verifies that emitted that many tokens, bonus token included.",
    "accept length by context": "Accept length of the verifies after 2^k to 2^(k+1) - 1 tokens of prompt and output.",
}


def keys_by_place(table: Literal["sweep", "compare"]) -> tuple[str, ...]:
    """The metrics that have a place in a table, in the order of their places."""
    found = {key: place for key, metric in METRICS.items() if (place := getattr(metric, table)) is not None}
    return tuple(sorted(found, key=lambda key: found[key]))


def glossary() -> list[tuple[str, str]]:
    """(name, definition with formula) of every quantity, each once, in the order of the registry."""
    found: dict[str, str] = {}
    for metric in (*METRICS.values(), *RELATIVE.values()):
        found.setdefault(metric.quantity or metric.title, f"{metric.definition} Formula: {metric.formula}.")
    return list((found | ACCEPTANCE).items())
