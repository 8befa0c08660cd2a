"""Notes below the table of a sweep."""

from __future__ import annotations

import pytest
from sweep_tables import configured, pair, record, simulated, text_of, timed

from specbatch.config.speculation import Speculation
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.report.notes import losses_of
from specbatch.sweeps.report.tables import markdown, table


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"output_sha256": "other"}, "TOKENS DIFFER: configurations generated other answers than"),
        ({"prompts": 3}, "INCOMPLETE: v1 at concurrency 4, repeat 1: 2 of 3 prompts finished"),
        ({}, "same output tokens at every point"),
    ],
)
def test_notes(change, note):
    records = pair(**change)
    assert note in text_of(records)


def test_notes_of_many_points_are_one_line():
    names = ("baseline", *(f"own {number}" for number in range(4)))
    records = [record(name, 1, 10.0, concurrency=size) for size in (1, 4, 8) for name in names]
    for number, one in enumerate(records):
        name, size = one.workload["configuration"], one.workload["concurrency"]
        one.workload["output_sha256"] = "same" if name in ("baseline", "own 2") or size == 1 else "other"
        one.metrics |= {"cached_tokens": number if size != 8 or name == "own 0" else 0, "input_tokens": 100}
        one.counters["states"] = {"kept": 2, "loaded": 1, "evicted": 0} if size == 8 else None
    text = text_of(records)
    assert text.count("CACHED") == 1
    assert (
        "* CACHED: input tokens that came from the prefix cache: 1.0% to 4.0% of all but baseline at concurrency 1; "
        "5.0% to 9.0% at concurrency 4; 11.0% of own 0 at concurrency 8 (2 states of prefixes kept, 1 loaded, 0 "
        "evicted).\n" in text
    )
    assert "same greedy prompts: at concurrency 4 and 8 all but own 2 (expected only" in text
    records[1].workload["output_sha256"] = records[2].workload["output_sha256"] = "other"
    assert "prompts: at concurrency 1 own 0 and own 1; at concurrency 4 and 8 all but own 2 (" in text_of(records)
    missing = [Point(name, 2, size, 0) for size in (4, 8) for name in names[: size // 2 + 1]]
    assert (
        "UNFINISHED: 8 points without a record (1 of baseline at concurrency 4, 1 of own 0 at concurrency 4, 1 of own "
        "1 at concurrency 4, 1 of each configuration at concurrency 8): " in markdown(records, table(records), missing)
    )


@pytest.mark.parametrize(("states", "is_said"), [((64, 40), True), ((64, 0), True), ((64, 64), False)])
def test_caches_of_different_sizes_are_one_line(states, is_said):
    records = [record(name, 1, 10.0, concurrency=size) for size in (1, 4) for name in ("baseline", "v1")]
    for number, one in enumerate(records):
        one.caps |= {"state_bytes": 9, "cached_states": states[number % 2]}
    text, line = text_of(records), f"have memory for the states of {states[0]} (baseline), {states[1]} (v1) prefixes; "
    assert text.count(line) == text.count("CACHES DIFFER") == int(is_said)


def test_chosen_draft_lengths_are_shown():
    """All repeats together."""
    records = [record("baseline", 1, 10.0), record("v1", 1, 10.0), record("v1", 2, 10.0)]
    for one in records[1:]:
        configured(one, Speculation("ngram", "v1", draft_tokens="auto"))
        one.counters = {"draft_lengths": {"4": {"0": 49, "4": 1}}}
        one.caps["draft_length_s"] = {"4": {"0": 0.01, "4": 0.02}}
    text = text_of(records)
    assert "ngram, up to 4 drafted, schedule v1" in text
    shown = "drafted 0 in 98%, 4 in 2% of 100 steps (ms at start with 0: 10.00, 4: 20.00)"
    assert text.count("batch 4: ") == text.count(f"* v1 at concurrency 4, batch 4: {shown}.\n") == 1


@pytest.mark.parametrize(("drafts", "mean", "warns"), [("auto", 0.98, False), ("auto", 0.96, True), (4, 0.98, True)])
def test_cost_of_choosing_a_draft_length_is_no_low_acceptance(drafts, mean, warns):
    records = pair(9.9)
    configured(records[1], Speculation("ngram", "v1", draft_tokens=drafts))
    for one, time in zip(records, (1.0, 1.02), strict=True):
        one.metrics |= {"accept_length": mean * 1.02}
        one.counters = {**one.counters, "steps_by_rows": {"1": [1, time]}}
    assert (losses_of(records) is not None) is warns
    assert f"| {mean:.2f} (one repeat) " in text_of(records)


def test_losses_name_their_points_and_likely_causes():
    records = [
        timed("baseline", 1, 10),
        timed("v1", 1, 15, 1.2),
        timed("v2", 1, 11, 1.2),
        timed("baseline", 1, 10, concurrency=9),
        timed("v2", 1, 30, 1.2, concurrency=9),
    ]
    losses = losses_of(records)
    assert losses is not None
    text = losses.log_text
    assert "v1 at concurrency 4 (accept length 1.20, 1.50 needed); v2 at concurrency 9 (" in text
    assert "v2 at concurrency 4" not in text
    assert "likely causes: the output repeats little" in text
    assert text.count("\n") == 1
    for made in (records[1], records[4]):
        configured(made, Speculation("standalone", "v1", draft="x"))
    assert "rope theta" in str(losses_of(records))
    losses = losses_of([records[0], simulated(timed("v1", 1, 15, 1.2), 1.2)])
    assert losses is not None
    assert "causes" not in str(losses)
    assert losses_of([records[0], timed("v1", 1, 15, 1.5)]) is None


@pytest.mark.parametrize(("accept", "speed", "noted"), [(1.6, 9.0, True), (1.4, 11.0, True), (1.6, 11.0, False)])
def test_disagreement_of_step_times_and_throughput_is_noted(accept, speed, noted):
    records = [timed("baseline", 1, 10), timed("v1", 1, 15, accept)]
    records[1].metrics["output_throughput"] = speed
    assert ("STEP SPEEDUP DIFFERS: v1 at concurrency 4" in text_of(records)) == noted
