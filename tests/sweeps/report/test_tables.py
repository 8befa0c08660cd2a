"""The table of a sweep: means, ratios, break-even and the heading."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from made_runs import make_record, metrics_of
from sweep_tables import configured, full_batch, pair, record, simulated, text_of, timed
from swept import saved

from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.sweeps.report.compare import compare
from specbatch.sweeps.report.heading import run_on
from specbatch.sweeps.report.notes import losses_of
from specbatch.sweeps.report.points import SWEEP, View, bases, load_records
from specbatch.sweeps.report.tables import markdown, shown, table, write_summary


def test_ratio_and_its_interval_are_those_of_the_rounds():
    # Unpaired runs would show nothing; the machine slowed down between the repeats.
    speeds = {"baseline": [10.0, 20.0, 60.0], "v1": [15.0, 32.0, 90.0]}
    rows = table([record(name, repeat, speed) for name, row in speeds.items() for repeat, speed in enumerate(row, 1)])
    v1 = rows[rows.configuration == "v1"].iloc[0]
    assert v1.repeats == 3
    assert v1.output_throughput == pytest.approx(137 / 3)
    assert (v1.output_throughput_min, v1.output_throughput_max) == (15, 90)
    logs = [math.log(ratio) for ratio in (1.5, 1.6, 1.5)]
    assert (v1.ratio, v1.ratio_verdict) == (pytest.approx(math.exp(fmean(logs))), "pays")
    half = 4.303 * stdev(logs) / math.sqrt(3)  # t of 2 degrees of freedom
    assert (v1.ratio_low, v1.ratio_high) == pytest.approx([math.exp(fmean(logs) + s * half) for s in (-1, 1)], rel=1e-3)


def test_repeats_that_failed_are_in_no_number(tmp_path):
    """They are no throughput of 0. A point without any other repeat has no speedup and no sentence."""
    speeds = {"baseline": [100.0, 100.0, 100.0], "v1": [150.0, 0.0, 156.0], "v2": [0.0, 0.0, 0.0]}
    records = []
    for name, found in speeds.items():
        for repeat, speed in enumerate(found, 1):
            records.append(
                record(name, repeat, speed, **({} if speed else {"error": "every request failed: down (8)"}))
            )
    rows = table(records).set_index("configuration")
    assert rows.repeats.to_list() == [3, 2, 0]
    assert rows.output_throughput["v1"] == 153
    assert (rows.ratio["v1"], rows.ratio_verdict["v1"]) == (pytest.approx(math.sqrt(1.5 * 1.56)), "pays")
    assert rows.failed["v1"]
    assert math.isnan(rows.output_throughput["v2"])
    assert math.isnan(rows.ratio["v2"])
    text = text_of(records)
    assert "FAILED: v1 at concurrency 4: its numbers are of 2 of 3 repeats; the others failed" in text
    assert "v1 is 1.53 (" in text
    assert "v2 is" not in text
    assert "between v2" not in text
    saved(tmp_path, *records)
    result = compare(tmp_path / "baseline", tmp_path / "v1")
    (row,) = (row for row in result.rows if row.metric == "output_throughput")
    assert (row.ratio, row.repeats, row.verdict) == (pytest.approx(rows.ratio["v1"]), 2, "pays")
    assert any(note.endswith("1 of 3 repeats: every request failed: down (8)") for note in result.notes)
    with pytest.raises(SpecbatchError, match="every point of one of them failed"):
        compare(tmp_path / "baseline", tmp_path / "v2")


def test_repeat_without_its_baseline_has_no_ratio():
    rows = table([record("baseline", 1, 10.0), record("v1", 1, 20.0), record("v1", 2, 90.0)])
    assert rows.ratio.to_list() == [1.0, 2.0]


def test_without_a_baseline_the_ratio_is_over_the_first_configuration():
    records = [record("v1", 1, 10.0), record("v2", 1, 15.0)]
    assert table(records).ratio.to_list() == [1.0, 1.5]
    text = markdown(records, table(records))
    assert "speedup over v1 (95% interval)" in text
    assert "v2 is 1.50 times v1" in text


def test_a_view_compares_full_batches():
    view = View(("step_s", "decode_throughput", "full_batch_steps"), "decode_throughput", "full")
    records = [
        *(full_batch("baseline", time, repeat) for repeat, time in ((1, 0.004), (2, 0.005))),
        *(full_batch("v1", time, repeat) for repeat, time in ((1, 0.006), (2, 0.02))),
    ]
    rows = table(records, view)
    v1 = rows[rows.configuration == "v1"].iloc[0]
    assert v1.ratio == pytest.approx(math.sqrt((8 / 0.006) * (8 / 0.02) / ((4 / 0.004) * (4 / 0.005))))
    assert v1.break_even == pytest.approx(math.sqrt(6 / 4 * 20 / 5))  # not by the steps of all sizes
    assert (v1.step_s_min, v1.step_s_max) == pytest.approx((0.006, 0.02))
    headings, body = shown(rows, bases(records), view)
    assert headings[2:] == [
        "full-batch step (ms)", "decode tok/s", "full-batch steps", "break-even accept length (95% interval)",
        "speedup by steps (95% interval)", "by steps", "ratio of decode tok/s to baseline (95% interval)",
        "verdict",
    ]  # fmt: skip
    assert body[1][2] == "13.00 (6.00-20.00)"
    rows = table(records, replace(view, break_even=None))
    assert rows.break_even.isna().all()
    assert rows.step_ratio.isna().all()


def test_a_single_configuration_has_no_ratio():
    records = [record("v2", 1, 10.0)]
    assert table(records).ratio.isna().all()
    assert "ratio to" not in markdown(records, table(records))


def test_missing_measurements_are_dashes():
    records = [record("baseline", 1, None)]
    assert table(records)[list(SWEEP.columns)].isna().all().all()
    assert "nan" not in text_of(records)


def test_rows_are_ordered_by_concurrency_then_as_run(tmp_path):
    for name, concurrency in [("v1", 16), ("baseline", 16), ("v1", 2), ("baseline", 2)]:
        folder = tmp_path / name / f"c{concurrency}" / "r1"
        folder.mkdir(parents=True)
        record(name, 1, 5.0, concurrency=concurrency).save(folder)
    rows = table(load_records(tmp_path))
    assert list(zip(rows.concurrency, rows.configuration, strict=True)) == [
        (2, "baseline"), (2, "v1"), (16, "baseline"), (16, "v1"),
    ]  # fmt: skip


def test_settings_that_differ_are_shown_by_configuration():
    records = pair()
    assert "* prefix cache: on\n" in text_of(records)
    records[1].config["prefix_cache"] = False
    assert "* prefix cache: baseline: on; v1: off\n" in text_of(records)
    assert "FP8 activations" not in text_of(records)
    records[1].config["fp8_activations"] = False
    assert "* FP8 activations: off\n" in text_of(records)  # the effective value of both
    records[0].caps["fp8_activations"] = "on"
    assert "* FP8 activations: baseline: on; v1: off\n" in text_of(records)


def test_simulated_acceptance_is_marked_everywhere():
    records = pair()
    simulated(records[1], 6.35)
    rows = table(records)
    assert rows[rows.configuration == "v1"].simulated_accept_length.item() == 6.35
    assert rows[rows.configuration == "baseline"].simulated_accept_length.isna().all()
    text = markdown(records, rows)
    assert "v1: ngram, 7 drafted, schedule v1, simulated acceptance (geometric, mean 6.35)" in text
    assert "SIMULATED: v1: acceptance was drawn at random (geometric, mean 6.35);" in text
    assert rows[rows.configuration == "v1"].simulated_acceptance.item() == "geometric, mean 6.35"
    assert "SIMULATED" not in text_of(records[:1])
    profile = AcceptanceProfile("mine.json", (0.5, 0.5, *[0.0] * 5))
    configured(records[1], Speculation("ngram", "v1", draft_tokens=7, simulate_accept=profile))
    assert "SIMULATED: v1: acceptance was drawn at random (mine.json);" in text_of(records)
    assert table(records).simulated_accept_length.max() == 1.75
    simulated(records[1], 2.4).config["speculation"].pop("simulate_accept")  # as an earlier version wrote it
    assert "v1: acceptance was drawn at random (floor or ceiling of 2.4);" in text_of(records)
    assert records[1].speculation.simulated.conditional == (1, pytest.approx(0.4), 0, 0, 0, 0, 0)


def test_queue_time_is_beside_ttft_with_a_request_rate():
    closed, opened = pair(), pair(request_rate=5.0)
    for made in (*closed, *opened):
        made.metrics |= {"mean_queue_s": 0.5, "median_ttft_s": 1.0}
    assert "queue time" not in text_of(closed)
    assert "median TTFT (ms)   | mean queue time (ms)   |" in text_of(opened)


def test_spread_over_repeats_is_shown():
    once = pair(15.0)
    assert "| 1.50 " in text_of(once)
    assert "| 15.0 " in text_of(once)
    twice = [*once, record("baseline", 2, 10.0), record("v1", 2, 17.0)]
    assert "16.0 (15.0-17.0)" in text_of(twice)
    assert "1.60 (0.72-3.54)" in text_of(twice)


def test_heading_describes_the_run():
    records = pair()
    heading = text_of(records).split("|")[0]
    for name in ("model", "device", "dtype", "workload", "configurations", "versions", "effective caps"):
        assert f"* {name}: " in heading
    assert "v1: ngram, 4 drafted, schedule v1" in heading
    assert heading.count("kv_pages 32") == 1
    assert "state" not in heading
    records[1].caps = records[1].caps | {"kv_pages": 40, "state_bytes": 7, "cached_states": 3}
    heading = text_of(records).split("|")[0]
    assert "baseline: max_running 4, max_model_len 64, kv_pages 32" in heading
    assert "v1: max_running 4, max_model_len 64, kv_pages 40" in heading
    assert "state_bytes 7, cached_states 3" in heading


def test_folder_without_records_is_refused(tmp_path):
    with pytest.raises(SpecbatchError, match="holds no records"):
        write_summary(tmp_path)


def test_break_even_is_paired_by_repeat_and_concurrency():
    records = [
        *(timed("baseline", repeat, step) for repeat, step in enumerate((10, 20, 100), 1)),
        *(timed("v1", repeat, step, 1.7) for repeat, step in enumerate((20, 30, 110), 1)),
        *(timed("baseline", repeat, 1, concurrency=1) for repeat in (1, 2, 3)),
        timed("v1", 1, 8, 1.7, concurrency=1),
    ]
    rows = table(records).set_index(["concurrency", "configuration"])
    assert rows.break_even[4, "v1"] == pytest.approx((2 * 1.5 * 1.1) ** (1 / 3))  # not 160 / 130
    logs = [math.log(ratio) for ratio in (2, 1.5, 1.1)]
    low = sum(logs) / 3 - 4.303 * stdev(logs) / math.sqrt(3)
    assert rows.break_even_low[4, "v1"] == pytest.approx(math.exp(low), rel=1e-3)
    assert rows.break_even[1, "v1"] == pytest.approx(8.0)
    assert math.isnan(rows.break_even_low[1, "v1"])
    assert rows.break_even.isna()[4, "baseline"]
    unpaired = [*records[:3], timed("v1", 2, 30, 1.7), timed("v1", 3, 300, 1.7)]
    assert table(unpaired).break_even.dropna().item() == pytest.approx(math.sqrt(1.5 * 3.0))


def test_break_even_is_over_the_base_of_the_speedup():
    """Not over the fastest run without speculation, which has other prefill graphs here."""
    records = [timed(name, repeat, step) for repeat in (1, 2) for name, step in (("baseline", 10), ("plain", 5))]
    records += [timed(name, 1, 20, 1.7) for name in ("v1", "v1 graphs")]
    for one in records:
        if (name := one.workload["configuration"]) in ("plain", "v1 graphs"):
            one.config["graphs"]["prefill"] = "piecewise"
        if name == "plain":
            one.config["speculation"] = records[0].config["speculation"]
    rows = table(records).set_index("configuration")
    assert rows.break_even.dropna().to_dict() == {"v1": pytest.approx(2.0), "v1 graphs": pytest.approx(4.0)}
    assert rows.base["v1 graphs"] == "plain"
    assert "base" not in table([one for one in records if one.workload["configuration"] != "plain"])


@pytest.mark.parametrize(
    ("accept", "step", "gain"), [(1.8, 15, "1.20 (one repeat)"), (1.2, 15, "0.80 (one repeat)"), (None, 15, "-")]
)
def test_rows_with_drafts_show_break_even_and_gain(accept, step, gain):
    records = [timed("baseline", 1, 10), timed("v1", 1, step, accept)]
    text = text_of(records)
    plain, row = (line for line in text.partition("All columns")[2].splitlines() if line.startswith("| 4 "))
    assert [cell.strip() for cell in row.split("|")[-6:-4]] == ["1.500", gain]
    assert [cell.strip() for cell in plain.split("|")[-6:-4]] == ["-", "-"]
    assert "| break-even accept length " in text
    assert text.count("Break-even: the accept length at which") == 1


@pytest.mark.parametrize(
    "records",
    [[timed("v1", 1, 15, 1.2)], [timed("baseline", 1, 10)], [timed("baseline", 1, 10), timed("v1", 1, None, 1.2)]],
    ids=["no baseline", "no drafts", "no time"],
)
def test_unknown_break_even_is_not_shown(records):
    text = text_of(records)
    assert "reak-even" not in text
    assert "by steps" not in text
    assert losses_of(records) is None


def test_simulated_acceptance_is_compared_with_break_even():
    records = [timed("baseline", 1, 10), simulated(timed("v1", 1, 15, 1.2), 1.2)]
    assert "| 0.80 (one repeat) " in text_of(records)
    probe = [timed("baseline", 1, 10), simulated(timed("v1", 1, 15, 1.0), 1.0)]
    assert "| 1.500 " in text_of(probe)
    assert "| 0.67 (one repeat) " not in text_of(probe), "only the step was measured"
    assert losses_of(probe) is None


def test_acceptance_has_a_table_of_its_own():
    counts = {"drafted": [10, 10], "tried": [10, 6], "accepted": [6, 3], "context": [[64, 10, 19]]}
    records = [record("baseline", 1, 10.0), record("v1", 1, 20.0), record("v1", 2, 20.0)]
    for item in records[1:]:
        item.counters |= {"acceptance": counts, "emitted_histogram": [0, 4, 3, 3]}
    lines = text_of(records).splitlines()
    (place,) = (index for index, line in enumerate(lines) if "reached draft 1, 2, ..." in line)
    shown = [cell.strip() for cell in lines[place + 2].strip("|").split("|")]
    assert shown == ["4", "v1", "20", "60 30", "60 50", "40 30 30", "64+: 1.90"]
    assert lines[place + 3] == ""
    assert "reached draft" not in text_of(records[:1])


def test_heading_says_which_configurations_were_deterministic():
    ordinary, fixed = make_record([metrics_of()]), make_record([metrics_of()], configuration="v2")
    fixed.caps["deterministic"] = "on"
    found = [run_on(records).get("deterministic") for records in ([ordinary], [fixed], [ordinary, fixed])]
    assert found == [None, "yes", "v2 only"]
