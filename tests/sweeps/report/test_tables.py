"""The table of a sweep: medians, paired ratios, and what is said beneath it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from specbatch.config import EngineConfig, Speculation
from specbatch.errors import SpecbatchError
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import summarize
from specbatch.sweeps.report.tables import COLUMNS, load_records, losses_of, markdown, table, write_summary

CAPS = {"max_running": 4, "max_model_len": 64, "kv_pages": 32, "page_size": 16, "prefill_chunk": 64}


def record(configuration: str, repeat: int, speed: float | None, *, concurrency: int = 4, **work: object) -> RunRecord:
    spec = Speculation() if configuration == "baseline" else Speculation(algorithm="ngram", schedule=configuration)
    metrics = dict.fromkeys(summarize([], 0.0)) | {
        "requests": 2,
        "output_throughput": speed,
        "drafted_tokens": 8,
    }
    place = ["baseline", "v1", "v2"].index(configuration)
    workload = {
        "dataset": "random", "input_len": 8, "output_len": 4, "ignore_eos": True, "seed": 0, "prompts": 2,
        "output_sha256": "same", "configuration": configuration, "place": place, "repeat": repeat,
        "concurrency": concurrency,
    }  # fmt: skip
    return RunRecord(
        config=asdict(EngineConfig(speculation=spec)),
        caps=CAPS | {"device": "cpu", "dtype": "float32"},
        metrics=metrics,
        counters={},
        requests=[],
        workload=workload | work,
    )


def test_the_ratio_is_the_median_of_paired_ratios():
    # Unpaired medians would say 30 / 20 = 1.5; the machine slowed down between the repeats.
    speeds = {"baseline": [10.0, 20.0, 100.0], "v1": [20.0, 30.0, 110.0]}
    rows = table([record(name, repeat, speed) for name, row in speeds.items() for repeat, speed in enumerate(row, 1)])
    v1 = rows[rows.configuration == "v1"].iloc[0]
    assert v1.repeats == 3
    assert v1.output_tok_s == 30.0
    assert (v1.ratio_min, v1.ratio, v1.ratio_max) == pytest.approx((1.1, 1.5, 2.0))


def test_a_repeat_without_its_baseline_has_no_ratio():
    rows = table([record("baseline", 1, 10.0), record("v1", 1, 20.0), record("v1", 2, 90.0)])
    assert rows.ratio.to_list() == [1.0, 2.0]


def test_without_a_baseline_there_are_no_ratios():
    records = [record("v2", 1, 10.0)]
    assert table(records).ratio.isna().all()
    assert "| - " in markdown(records, table(records))


def test_what_was_not_measured_is_a_dash():
    records = [record("baseline", 1, None)]
    assert table(records)[list(COLUMNS)].isna().all().all()
    assert "nan" not in markdown(records, table(records))


def test_rows_are_ordered_by_concurrency_then_as_run(tmp_path):
    for name, concurrency in [("v1", 16), ("baseline", 16), ("v1", 2), ("baseline", 2)]:
        folder = tmp_path / name / f"c{concurrency}" / "r1"
        folder.mkdir(parents=True)
        record(name, 1, 5.0, concurrency=concurrency).save(folder)
    rows = table(load_records(tmp_path))
    assert list(zip(rows.concurrency, rows.configuration, strict=True)) == [
        (2, "baseline"), (2, "v1"), (16, "baseline"), (16, "v1"),
    ]  # fmt: skip


def test_a_prefix_cache_that_only_some_have_is_said_by_name():
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0)]
    assert "* prefix cache: on\n" in markdown(records, table(records))
    records[1].config["prefix_cache"] = False  # the states of a draft took its place
    assert "* prefix cache: baseline: on; v1: off\n" in markdown(records, table(records))
    assert "FP8 activations" not in markdown(records, table(records))
    records[1].config["float8_activations"] = False
    assert "* FP8 activations: off\n" in markdown(records, table(records))  # as both were in effect
    records[0].caps["float8_activations"] = "on"
    assert "* FP8 activations: baseline: on; v1: off\n" in markdown(records, table(records))


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            {"output_sha256": "other"},
            "TOKENS DIFFER: configurations generated different output tokens",
        ),
        ({"prompts": 3}, "INCOMPLETE: v1 at concurrency 4, repeat 1: 2 of 3 prompts finished"),
        ({}, "same output tokens at every point"),
    ],
)
def test_notes(change, note):
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0, **change)]
    assert note in markdown(records, table(records))


def test_a_row_that_drafted_nothing_says_so():
    records = [record("v1", 1, 10.0)]
    records[0].metrics["drafted_tokens"] = 0
    assert "NO DRAFTS: v1" in markdown(records, table(records))


def test_what_was_drafted_is_told_where_it_was_chosen():
    """All repeats together."""
    records = [record("baseline", 1, 10.0), record("v1", 1, 10.0), record("v1", 2, 10.0)]
    for one in records[1:]:
        one.config = asdict(EngineConfig(speculation=Speculation("ngram", "v1", draft_tokens="auto")))
        one.counters = {"draft_lengths": {"4": {"0": 49, "4": 1}}}
        one.caps["draft_length_s"] = {"4": {"0": 0.01, "4": 0.02}}
    text = markdown(records, table(records))
    assert "ngram, up to 4 drafted, schedule v1" in text
    shown = "drafted 0 in 98%, 4 in 2% of 100 steps (ms at start with 0: 10.00, 4: 20.00)"
    assert text.count("batch 4: ") == text.count(f"* v1 at concurrency 4, batch 4: {shown}.\n") == 1


@pytest.mark.parametrize(("asked", "mean", "said"), [("auto", 0.98, False), ("auto", 0.96, True), (4, 0.98, True)])
def test_what_choosing_costs_is_no_low_acceptance(asked, mean, said):
    records = [record("baseline", 1, 10.0), record("v1", 1, 9.9)]
    records[1].config = asdict(EngineConfig(speculation=Speculation("ngram", "v1", draft_tokens=asked)))
    for one, time in zip(records, (1.0, 1.02), strict=True):
        one.metrics |= {"accept_length": mean * 1.02}
        one.counters = {**one.counters, "steps_by_rows": {"1": [1, time]}}
    assert (losses_of(records) is not None) is said
    assert f"{mean - 1:+.1%} (one repeat)" in markdown(records, table(records))


def test_a_simulated_acceptance_is_in_every_part_of_the_table():
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0)]
    spec = Speculation("ngram", "v1", draft_tokens=7, simulate_accept_length=6.35)
    records[1].config = asdict(EngineConfig(speculation=spec))
    rows = table(records)
    assert rows[rows.configuration == "v1"].simulated_accept_length.item() == 6.35
    assert rows[rows.configuration == "baseline"].simulated_accept_length.isna().all()
    text = markdown(records, rows)
    assert "v1: ngram, 7 drafted, schedule v1, simulated accept length 6.35" in text
    assert "SIMULATED: v1: accept lengths were drawn at random with mean 6.35;" in text
    assert "SIMULATED" not in markdown(records[:1], table(records[:1]))


def test_simulated_text_is_compared_with_nothing():
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0, output_sha256="other")]
    spec = Speculation("ngram", "v1", draft_tokens=7, simulate_accept_length=6.35)
    records[1].config = asdict(EngineConfig(speculation=spec))
    text = markdown(records, table(records))
    assert "TOKENS DIFFER" not in text
    assert "same output tokens" not in text
    assert "ngram without a match) accept none, so the mean reached may be lower" in text


def test_each_kind_of_graphs_that_replayed_none_is_named():
    records = [record("baseline", 1, 10.0)]
    records[0].config["graphs"] = {"decode": "whole", "prefill": "piecewise"}
    graphs = {"decode": {"replays": 5}, "target_prefill": {"replays": 0}, "draft_prefill": {"replays": 0}}
    records[0].counters["graphs"] = graphs
    records[0].metrics["graph_coverage"] = 0.9
    text = markdown(records, table(records))
    assert "NO REPLAYS: baseline at concurrency 4, repeat 1: target prefill graphs were requested and none" in text
    assert "repeat 1: draft prefill graphs were requested and none" in text
    assert "decode graphs" not in text


def test_the_spread_is_shown_where_there_are_repeats():
    once = [record("baseline", 1, 10.0), record("v1", 1, 15.0)]
    assert "| 1.50 " in markdown(once, table(once))
    twice = [*once, record("baseline", 2, 10.0), record("v1", 2, 17.0)]
    assert "1.60 (1.50-1.70)" in markdown(twice, table(twice))


def test_the_heading_says_what_was_run_on_what():
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0)]
    heading = markdown(records, table(records)).split("|")[0]
    for name in ("model", "device", "dtype", "workload", "configurations", "versions", "effective caps"):
        assert f"* {name}: " in heading
    assert "v1: ngram, 4 drafted, schedule v1" in heading
    assert heading.count("kv_pages 32") == 1
    assert "state" not in heading
    records[1].caps = records[1].caps | {"kv_pages": 40, "state_bytes": 7, "cached_states": 3}
    heading = markdown(records, table(records)).split("|")[0]
    assert "baseline: max_running 4, max_model_len 64, kv_pages 32" in heading
    assert "v1: max_running 4, max_model_len 64, kv_pages 40" in heading
    assert "state_bytes 7, cached_states 3" in heading


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(SpecbatchError, match="holds no records"):
        write_summary(tmp_path)


# -- where drafts lose ------------------------------------------------------------------------------------------------


def timed(name: str, repeat: int, step_ms: float | None, accept: float | None = None, **work: object) -> RunRecord:
    """A point with a step time; those that draft have an accept length too."""
    made = record(name, repeat, 10.0, **work)
    made.metrics |= {"accept_length": accept}
    made.counters = {**made.counters, "steps_by_rows": {} if step_ms is None else {"1": [10, step_ms / 100]}}
    return made


def simulate(made: RunRecord, mean: float) -> RunRecord:
    spec = Speculation("ngram", "v1", draft_tokens=7, simulate_accept_length=mean)
    made.config = asdict(EngineConfig(speculation=spec))
    return made


def test_break_even_is_paired_by_repeat_and_concurrency():
    records = [
        *(timed("baseline", repeat, step) for repeat, step in enumerate((10, 20, 100), 1)),
        *(timed("v1", repeat, step, 1.7) for repeat, step in enumerate((20, 30, 110), 1)),
        *(timed("baseline", repeat, 1, concurrency=1) for repeat in (1, 2, 3)),
        timed("v1", 1, 8, 1.7, concurrency=1),
    ]
    rows = table(records).set_index(["concurrency", "configuration"])
    assert rows.break_even[4, "v1"] == pytest.approx(1.5)  # unpaired medians would say the same of 30 / 20: see below
    assert rows.break_even[1, "v1"] == pytest.approx(8.0)
    assert rows.break_even.isna()[4, "baseline"]
    unpaired = [*records[:3], timed("v1", 2, 30, 1.7), timed("v1", 3, 300, 1.7)]
    assert table(unpaired).break_even.dropna().item() == pytest.approx((1.5 + 3.0) / 2)


@pytest.mark.parametrize(
    ("accept", "step", "said"),
    [(1.8, 15, "+20.0% (one repeat)"), (1.2, 15, "-20.0% (one repeat)"), (None, 15, "-")],
)
def test_every_row_that_drafts_says_whether_it_pays(accept, step, said):
    records = [timed("baseline", 1, 10), timed("v1", 1, step, accept)]
    text = markdown(records, table(records))
    plain, row = (line for line in text.splitlines() if line.startswith("| 4 "))
    assert [cell.strip() for cell in row.split("|")[-4:-2]] == ["1.500", said]
    assert [cell.strip() for cell in plain.split("|")[-4:-2]] == ["-", "-"]
    assert "| break-even accept length " in text
    assert text.count("Break-even: the accept length at which") == 1


@pytest.mark.parametrize(
    "records",
    [[timed("v1", 1, 15, 1.2)], [timed("baseline", 1, 10)], [timed("baseline", 1, 10), timed("v1", 1, None, 1.2)]],
    ids=["no baseline", "no drafts", "no time"],
)
def test_where_break_even_is_not_known_nothing_is_said_of_it(records):
    text = markdown(records, table(records))
    assert "reak-even" not in text
    assert "loses" not in text
    assert losses_of(records) is None


def test_simulated_acceptance_is_held_against_break_even_too():
    records = [timed("baseline", 1, 10), simulate(timed("v1", 1, 15, 1.2), 1.2)]
    assert "-20.0% (one repeat)" in markdown(records, table(records))
    probe = [timed("baseline", 1, 10), simulate(timed("v1", 1, 15, 1.0), 1.0)]
    assert "pays above 1.50" in markdown(probe, table(probe))
    assert losses_of(probe) is None


def test_losses_name_their_points_and_likely_causes():
    records = [
        timed("baseline", 1, 10),
        timed("v1", 1, 15, 1.2),
        timed("v2", 1, 11, 1.2),
        timed("baseline", 1, 10, concurrency=9),
        timed("v2", 1, 30, 1.2, concurrency=9),
    ]
    said = losses_of(records)
    assert said is not None
    said = said.log_text
    assert "v1 at concurrency 4 (accept length 1.20, 1.50 needed); v2 at concurrency 9 (" in said
    assert "v2 at concurrency 4" not in said
    assert "likely causes: the output repeats little" in said
    assert said.count("\n") == 1
    standalone = Speculation("standalone", "v1", draft="x")
    records[1].config = records[4].config = asdict(EngineConfig(speculation=standalone))
    assert "rope theta" in str(losses_of(records))
    coin = [records[0], simulate(timed("v1", 1, 15, 1.2), 1.2)]
    assert "causes" not in str(losses_of(coin) or "causes")
    assert losses_of([records[0], timed("v1", 1, 15, 1.5)]) is None


@pytest.mark.parametrize(("accept", "speed", "noted"), [(1.6, 9.0, True), (1.4, 11.0, True), (1.6, 11.0, False)])
def test_steps_that_say_another_thing_than_the_run_are_noted(accept, speed, noted):
    records = [timed("baseline", 1, 10), timed("v1", 1, 15, accept)]
    records[1].metrics["output_throughput"] = speed
    assert ("NOT BY STEPS ALONE: v1 at concurrency 4" in markdown(records, table(records))) == noted


def test_where_drafts_are_accepted_is_a_table_of_its_own():
    counts = {"drafted": [10, 10], "tried": [10, 6], "accepted": [6, 3], "context": [[64, 10, 19]]}
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0), record("v1", 2, 20.0)]
    for item in records[1:]:
        item.counters |= {"acceptance": counts, "emitted_histogram": [0, 4, 3, 3]}
    lines = markdown(records, table(records)).splitlines()
    (place,) = (index for index, line in enumerate(lines) if "reached draft 1, 2, ..." in line)
    shown = [cell.strip() for cell in lines[place + 2].strip("|").split("|")]
    assert shown == ["4", "v1", "20", "60 30", "60 50", "40 30 30", "64+: 1.90"]
    assert lines[place + 3] == ""
    assert "reached draft" not in markdown(records[:1], table(records[:1]))


def test_prompts_that_are_asked_again_are_told():
    records = [record(name, 1, 10.0, distinct_prompts=1) for name in ("baseline", "v1")]
    text = markdown(records, table(records))
    assert "* REPEATED: only 1 prompts are different; " in text
    assert "(baseline at concurrency 4, repeat 1, and 1 other points).\n" in text
    records = [record("baseline", 1, 10.0, distinct_prompts=2)]
    assert "REPEATED" not in markdown(records, table(records))
