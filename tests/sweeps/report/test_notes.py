"""Notes below the table of a sweep."""

from __future__ import annotations

import math

import pytest
from sweep_tables import configured, full_batch, pair, record, simulated, text_of, timed

from specbatch.config.speculation import Speculation
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.report.notes import losses_of, notes
from specbatch.sweeps.report.points import View
from specbatch.sweeps.report.tables import markdown, table


def test_a_step_without_enough_iterations_is_a_note_where_it_is_shown():
    records = [full_batch("v1", None, steps=19)]
    view = View(("step_s",), "step_s", None)
    note = "NOT MEASURED: v1 at concurrency 4, repeat 1: only 19 full-batch steps; 20 are needed"
    assert any(str(item).startswith(note) for item in notes(records, table(records, view), view=view))
    assert note not in markdown(records, table(records))


def test_a_failed_point_is_a_note_and_leaves_the_others_alone():
    records = [record("baseline", 1, 10.0), record("v1", 1, 15.0, error="no memory"), record("v2", 1, 15.0)]
    records[1].metrics, records[1].caps = {}, {}
    rows = table(records)
    assert rows.repeats.to_list() == [1, 0, 1]
    assert rows.failed.isna().to_list() == [True, False, True]
    assert rows.ratio.to_list() == pytest.approx([1.0, math.nan, 1.5], nan_ok=True)
    assert "FAILED: v1 at concurrency 4, repeat 1: no memory" in markdown(records, rows)


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


def test_answers_that_differ_are_counted_for_each_configuration():
    """Tokens of engines of any algorithm, and texts where one side is a server."""
    records = [record(name, repeat, 10.0) for repeat in (1, 2) for name in ("baseline", "v1", "v2")]
    answers = {"baseline": "abc", "v1": "abX", "v2": "aYX"}
    for one in records:
        name = one.workload["configuration"]
        one.config |= {"server": "s"} if name == "v2" else {}
        kinds = ("text_digest",) if name == "v2" else ("text_digest", "token_digest")
        one.requests = [
            {"index": place, "finish_reason": "stop", **dict.fromkeys(kinds, answer)}
            for place, answer in enumerate(answers[name])
        ]
        one.workload["output_sha256"] = answers[name] + str("server" in one.config)
    assert (
        "TOKENS DIFFER: configurations generated other answers than baseline to the same greedy prompts: "
        "at concurrency 4 v1 (1 of 3), v2 (2 of 3) (expected only below FP32" in text_of(records)
    )
    for one in records:
        one.config["load_format"] = "dummy"  # the server's random weights are other ones
    assert "at concurrency 4 v1 (1 of 3) (expected" in text_of(records)


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


def test_run_without_drafts_has_a_note():
    records = [record("v1", 1, 10.0)]
    records[0].metrics["drafted_tokens"] = 0
    assert "NO DRAFTS: v1" in text_of(records)


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


def test_simulated_output_is_not_compared():
    records = pair(output_sha256="other")
    simulated(records[1], 6.35)
    text = text_of(records)
    assert "TOKENS DIFFER" not in text
    assert "same output tokens" not in text
    assert "ngram without a match, --draft-tokens auto) accept fewer, so the mean reached" in text


def test_sampling_is_stated_and_may_change_tokens():
    records = pair(output_sha256="other")
    counts = {"drafted": [4], "tried": [4], "accepted": [2], "context": [[8, 4, 6]]}
    records[1].counters = {"acceptance": counts, "emitted_histogram": [0, 2, 2]}
    assert "Acceptance, greedy:\n\n| concurrency" in text_of(records)
    for made in records:
        made.workload["sampling"] = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
    text = text_of(records)
    assert "Acceptance, temperature 0.6, top-p 0.95:" in text
    assert "output exactly 4, temperature 0.6, top-p 0.95, seed 0" in text
    assert "TOKENS DIFFER" not in text
    assert "Configurations generated different tokens from the same seeds, with the same distribution" in text


def test_graphs_that_were_never_replayed_are_named():
    records = [record("baseline", 1, 10.0)]
    records[0].config["graphs"] = {"decode": "whole", "prefill": "piecewise"}
    graphs = {"decode": {"replays": 5}, "target_prefill": {"replays": 0}, "draft_prefill": {"replays": 0}}
    records[0].counters["graphs"] = graphs
    records[0].metrics["graph_coverage"] = 0.9
    text = text_of(records)
    assert "NO REPLAYS: baseline at concurrency 4, repeat 1: target prefill graphs were requested and none" in text
    assert "repeat 1: draft prefill graphs were requested and none" in text
    assert "decode graphs" not in text


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


def test_repeated_prompts_are_noted():
    records = [record(name, 1, 10.0, distinct_prompts=1) for name in ("baseline", "v1")]
    text = text_of(records)
    assert "* REPEATED: only 1 different prompt; " in text
    assert "(baseline at concurrency 4, repeat 1, and 1 other point).\n" in text
    records = [record("baseline", 1, 10.0, distinct_prompts=2)]
    assert "REPEATED" not in text_of(records)


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (4.40e12, None),  # within 3%
        (3.90e12, "LIMITS CHANGED: read bandwidth of the GPU: 4.49 TB/s before baseline at concurrency 4, repeat 1 and "
         "3.90 TB/s after v1 at concurrency 4, repeat 1, 15.1% apart; clock 1400 to 1980 MHz, memory 70 to 95 C, "
         "power cap in up to 50% of the samples of a point"),
    ],
)  # fmt: skip
def test_limits_that_changed_are_a_note(last: float, note: str | None):
    records = pair()
    for one, (before, after) in zip(records, ((4.49e12, 4.45e12), (4.45e12, last)), strict=True):
        gpu = {"samples": 4, "sm_clock_mhz": [1400, 1700, 1980], "memory_temperature_c": [70, 80, 95]}
        one.conditions = {
            "limits": {"before": {"read_bytes_s": before}, "after": {"read_bytes_s": after}},
            "gpus": {"0": gpu | {"throttle": {"power cap": 0.5}}},
        }
    found = [str(item) for item in notes(records, table(records)) if item.warning == "LIMITS CHANGED"]
    assert found == ([] if note is None else [f"{note}; compare points of the same round only"])


def test_limits_that_failed_are_no_change():
    records = pair()
    for one in records:
        one.conditions = {"limits": {"before": {"error": "CUDA out of memory"}, "after": {}}, "gpus": {}}
    assert not [item for item in notes(records, table(records)) if item.warning == "LIMITS CHANGED"]
