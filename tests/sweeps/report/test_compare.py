"""`compare`: pairing, directions, verdicts, and Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from made_runs import make_record, make_report, metrics_of
from swept import saved

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.records.differences import shortened_pair
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.verdicts import LOSES, NOT_INTERLEAVED, NOT_JUDGED, ONE_REPEAT, PAYS, UNDECIDED
from specbatch.sweeps.report.compare import COMPARED, Comparison, Row, compare, reading_notes
from specbatch.sweeps.report.points import load_records, speedups_of
from specbatch.sweeps.report.tables import write_summary


def row_of(result: Comparison, metric: str, size: int | str = 4) -> Row:
    (row,) = (row for row in result.rows if row.metric == metric and row.size == size)
    return row


@pytest.mark.parametrize(
    ("emitted", "ttft", "length", "first"),
    [(22, 0.2, PAYS, ONE_REPEAT), (18, 0.05, LOSES, ONE_REPEAT), (20, 0.1, UNDECIDED, ONE_REPEAT)],
)
def test_directions(tmp_path, emitted, ttft, length, first):
    old = saved(tmp_path / "a", make_record([metrics_of() for _ in range(12)]))
    new = saved(tmp_path / "b", make_record([metrics_of(emitted=emitted, ttft=ttft) for _ in range(12)]))
    result = compare(old, new)
    accept, mean = row_of(result, "accept_length"), row_of(result, "mean_ttft_s")
    assert (accept.verdict, mean.verdict) == (length, first)
    assert (accept.before, accept.after) == (2.0, emitted / 10)
    assert accept.relative_change == pytest.approx(emitted / 20 - 1)
    assert (mean.before, mean.after) == (pytest.approx(0.1), pytest.approx(ttft))
    cells = next(line for line in result.markdown().splitlines() if "mean TTFT (ms)" in line).split("|")
    assert cells[3].strip() == f"{ttft / 0.1:.2f} (one repeat)"
    assert [float(cell) for cell in cells[4:6]] == [100, 1000 * ttft]
    assert row_of(result, "output_throughput").verdict == ONE_REPEAT
    assert "NOT INTERLEAVED" in result.markdown()


def test_every_compared_metric_has_a_direction():
    assert all(METRICS[key].better for key in COMPARED)
    assert {METRICS[key].better for key in COMPARED if key.endswith("_s")} == {"lower"}
    lengths_and_speeds = [key for key in COMPARED if key.endswith(("throughput", "goodput", "accept_length", "rate"))]
    assert {METRICS[key].better for key in (*lengths_and_speeds, "slo_share", "graph_coverage")} == {"higher"}
    assert {METRICS[key].better for key in ("device_idle_share", "host_waits_per_step")} == {"lower"}


def test_times_are_compared_over_repeats(tmp_path):
    def runs(name: str, times: list[float], hour: int) -> Path:
        made = [
            make_record([metrics_of(ttft=t)] * 100, repeat=n, created=f"2030-01-01T{hour:02}:00:0{n}+00:00")
            for n, t in enumerate(times, 1)
        ]
        return saved(tmp_path / name, *made)

    old, slow, alike = runs("a", [1.0, 1.1, 1.2], 1), runs("b", [1.5, 1.6, 1.7], 1), runs("c", [1.0, 1.2, 1.4], 2)
    row = row_of(compare(old, slow), "mean_ttft_s")
    assert (row.verdict, row.over) == (LOSES, "3 and 3 runs")
    assert row.before == pytest.approx(1.1)  # the mean
    assert row_of(compare(slow, old), "p99_ttft_s").verdict == PAYS
    late = runs("d", [1.5, 1.6, 1.7], 2)
    for pair in ((old, late), (late, old)):
        assert row_of(compare(*pair), "mean_ttft_s").verdict == NOT_INTERLEAVED
        assert "NOT INTERLEAVED" in compare(*pair).markdown()
    assert row_of(compare(old, alike), "mean_ttft_s").verdict == UNDECIDED
    assert "NOT INTERLEAVED" not in compare(old, slow).markdown()


def test_accept_rates_of_other_algorithms_have_no_verdict(tmp_path):
    """20 drafted tokens per request of n-gram lookup, 60 of a draft model, of which as many are accepted."""
    folders = []
    for name, drafted, spec in (
        ("old", 20, Speculation("ngram", "v1")),
        ("new", 60, Speculation("standalone", draft="x/y")),
    ):
        rows = [metrics_of(emitted=20 + number % 3) for number in range(40)]
        for row in rows:
            row.drafted = drafted
        folders.append(saved(tmp_path / name, make_record(rows, config=EngineConfig(speculation=spec))))
    result = compare(*folders)
    rate = row_of(result, "accept_rate")
    assert (rate.verdict, rate.low, rate.ratio) == (NOT_JUDGED, None, pytest.approx(1 / 3))
    assert row_of(result, "accept_length").verdict == UNDECIDED
    assert "no interval (rates of other drafts (drafted tokens)): accept rate." in result.markdown()


def test_equal_answers_have_an_interval_around_zero(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        make_report("1" * 10 + "0" * 30).save(tmp_path / name)
    row = row_of(compare(tmp_path / "old", tmp_path / "new"), "loose match", size="")
    assert (row.change, row.verdict) == (0, UNDECIDED)
    assert (row.low, row.high) == pytest.approx((-0.0876, 0.0876), abs=1e-4)
    assert row.cell == "+0.00 (-8.76 to +8.76) undecided"


def test_rounds_of_one_run_pair(tmp_path):
    """The machine slows down threefold; within a round v2 is always a little slower."""
    for n, t in enumerate([1.0, 2.0, 3.0], 1):
        saved(tmp_path, make_record([metrics_of(ttft=t)], repeat=n))
        saved(tmp_path, make_record([metrics_of(ttft=t * (1.1 + n / 1000))], repeat=n, configuration="v2"))
    row = row_of(compare(tmp_path / "v1", tmp_path / "v2"), "mean_ttft_s")
    assert (row.verdict, row.over) == (LOSES, "3 runs, paired by round")


def test_repeats_may_come_from_several_runs(tmp_path):
    for side, number in product("ab", "12"):
        saved(tmp_path / side / number, make_record([metrics_of()]))
    assert row_of(compare(tmp_path / "a", tmp_path / "b"), "mean_ttft_s").over == "2 and 2 runs"


def test_repeats_against_a_single_run(tmp_path):
    """Sums by prompt over the repeats, against the only run."""
    old = saved(tmp_path / "a", *(make_record([metrics_of(ttft=n)] * 12, repeat=n) for n in (1, 2, 3)))
    new = saved(tmp_path / "b", make_record([metrics_of(ttft=4)] * 12))
    row = row_of(compare(old, new), "mean_ttft_s")
    assert (row.verdict, row.over, row.low) == (ONE_REPEAT, "12 prompts, paired", pytest.approx(2))
    assert row_of(compare(new, old), "output_throughput").over == "needs two runs per side"


def test_points_pair_by_place_and_the_rest_is_noted(tmp_path):
    rows = [metrics_of()] * 10
    old = saved(
        tmp_path / "a", *(make_record(rows, configuration=n, concurrency=c) for n in ("v1", "v2") for c in (1, 4))
    )
    new = saved(
        tmp_path / "b", make_record(rows, configuration="v2"), make_record(rows, configuration="v2", concurrency=9)
    )
    saved(tmp_path / "b", make_record(rows, configuration="baseline"))
    result = compare(old, new)
    assert {(row.configuration, row.size) for row in result.rows} == {("v2", 4)}
    assert [note for note in result.notes if note.startswith("ONLY")] == [
        f"ONLY IN {old}: v1 concurrency 1",
        f"ONLY IN {old}: v2 concurrency 1",
        f"ONLY IN {old}: v1 concurrency 4",
        f"ONLY IN {new}: baseline concurrency 4",
        f"ONLY IN {new}: v2 concurrency 9",
    ]
    assert {row.configuration for row in compare(old / "v1", old / "v2").rows} == {""}  # each is one configuration


def test_markdown_csv_and_json_agree(tmp_path):
    old = saved(tmp_path / "a", make_record([metrics_of()] * 12))
    new = saved(tmp_path / "b", make_record([metrics_of(emitted=18)] * 12))
    result = compare(old, new)
    lines = [line for line in result.markdown().splitlines() if line.startswith("| 4 ")]
    (shown,) = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "accept length" in line)
    assert shown == ["4", "accept length", "0.90 (0.90-0.90) loses", "2.000", "1.800"]
    table = list(csv.DictReader(io.StringIO(result.csv())))
    body = json.loads(json.dumps(result.as_dict()))
    assert list(table[0]) == list(body["rows"][0]) == [
        "run", "section", "configuration", "size", "metric", "better", "before", "after", "change", "relative_change",
        "low", "high", "ratio", "ratio_low", "ratio_high", "over", "verdict", "repeats",
    ]  # fmt: skip
    (line,) = (row for row in table if row["metric"] == "accept_length")
    assert (line["run"], float(line["change"]), line["verdict"]) == ("b", pytest.approx(-0.2), "loses")
    assert set(body) == {"base", "runs", "model", "confidence", "differs", "rows", "notes"}
    assert len(lines) == len(table) == len(body["rows"])


def test_three_runs_in_one_table(tmp_path):
    """Each against the first, with the verdicts and the sentences of the sweep's own summary."""
    speeds = {"baseline": (100, 101, 99), "v1": (90, 93, 91), "v2": (150, 149, 153)}
    for repeat in (1, 2, 3):
        for name, found in speeds.items():
            made = make_record([metrics_of()] * 4, repeat=repeat, configuration=name)
            made.workload |= {"ignore_eos": True, "output_sha256": "same", "seed": 0, "input_len": 8, "output_len": 4}
            made.workload["place"] = list(speeds).index(name)
            made.metrics["output_throughput"] = float(found[repeat - 1])
            saved(tmp_path, made)
    result = compare(*(tmp_path / name for name in speeds))
    rows = {row.run: row for row in result.rows if row.metric == "output_throughput"}
    assert {name: row.verdict for name, row in rows.items()} == {"v1": LOSES, "v2": PAYS}
    records = load_records(tmp_path)
    swept = speedups_of(records)
    assert {name: row.speedup for name, row in rows.items()} == {name: swept[4, name] for name in rows}
    assert all(sentence in write_summary(tmp_path) for sentence in result.sentences())
    (line,) = (line for line in result.markdown().splitlines() if "output tok/s" in line and line.startswith("|"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == [f"{swept[4, 'v1']} loses", f"{swept[4, 'v2']} pays", "100.0", "91.3", "150.7"]
    assert "| v1 / baseline" in result.markdown()


def test_other_differences_are_listed(tmp_path):
    v2 = EngineConfig(speculation=Speculation("ngram", "v2"))
    other = make_record([metrics_of()] * 12, config=v2)
    other.versions["torch"], other.hardware["cpu"], other.caps["max_running"] = "2.14", "slide rule", 3
    result = compare(saved(tmp_path / "a", make_record([metrics_of()] * 12)), saved(tmp_path / "b", other))
    assert result.differs["b"] == {
        "speculation.schedule": ["v1 -> v2"],
        "effective max_running": ["4 -> 3"],
        "torch version": ["2.13 -> 2.14"],
        "hardware": ["abacus, 2 cores -> slide rule, 2 cores"],
    }
    assert "DIFFERENT HARDWARE" in result.markdown()


def test_gpus_of_one_name_are_told_apart(tmp_path):
    """By records that say which GPU they are of."""
    records = {name: make_record([metrics_of()] * 12) for name in ("a", "b", "old")}
    for name, one in records.items():
        one.caps["device"] = "cuda:0"
        one.hardware = {"gpu": "NVIDIA H200"} | ({} if name == "old" else {"gpu_id": name})
    a, b, old = (saved(tmp_path / name, one) for name, one in records.items())
    assert compare(a, b).differs["b"] == {"GPU": ["a -> b"]}
    assert compare(a, old).differs["old"] == {}


def test_long_differences_show_the_words_that_differ(tmp_path):
    before, after = (make_record([metrics_of()] * 12) for _ in range(2))
    for record, send in ((before, "ids"), (after, "text")):
        record.config["server"] = f"server (vllm 0.33.0) at http://127.0.0.1:8000, prompts as {send}"
    result = compare(saved(tmp_path / "a", before), saved(tmp_path / "b", after))
    assert shortened_pair("/m" * 30, "/m" * 31) == (f"...{'/m' * 10}", f"...{'/m' * 11}")
    assert result.differs["b"] == {"server": ["...ids -> ...text"]}


def test_expected_false_positives_are_noted(tmp_path):
    folder = saved(tmp_path / "a", *(make_record([metrics_of()] * 12, concurrency=c) for c in range(1, 9)))
    result = compare(folder, folder)
    judged = [row for row in result.rows if row.low is not None]
    many = f"Of {len(judged)} intervals at 95%, about {round(len(judged) / 20)} would exclude"
    assert f"{many} 1 by chance" in result.markdown()
    differences = [replace(row, ratio=None) for row in judged]
    assert f"{many} zero by chance" in "".join(reading_notes(differences, {}))
    mixed = reading_notes([judged[0], *differences[1:]], {})
    assert f"{many} 1 (those of differences: zero) by chance" in "".join(mixed)


def test_failed_unfinished_and_unreplayed_points_are_noted(tmp_path):
    graphs = EngineConfig(device="cuda", graphs=Graphs(decode="whole"))
    good = make_record([metrics_of()] * 12, config=graphs)
    good.metrics["requests"] = 11
    good.counters = {"graphs": {"decode": {"replays": 0, "fallbacks": {}, "padded": 0}}}
    bad = RunRecord(good.config, {}, {}, {}, [], {**good.workload, "error": "no memory", "concurrency": 8})
    other = make_record([metrics_of()] * 12, config=graphs, concurrency=8)
    other.counters = {"graphs": {"decode": {"replays": 5, "fallbacks": {}, "padded": 0}}}
    old, new = saved(tmp_path / "a", good, other), saved(tmp_path / "b", good, bad)
    notes = compare(old, new).notes
    assert f"NO REPLAYS: {old} concurrency 4: decode graphs were requested and none was replayed." in notes
    assert f"INCOMPLETE: {new} concurrency 4: 11 of 12 prompts finished" in notes
    assert f"FAILED: {new} concurrency 8: no memory" in notes
    assert {row.size for row in compare(old, new).rows} == {4}
    with pytest.raises(SpecbatchError, match="no metric in common"):
        compare(old / "v1" / "c8", new / "v1" / "c8")


def test_output_of_generate(tmp_path):
    record = make_record([metrics_of()] * 12, configuration=None, command="generate")
    kept = ("index", "finish_reason", "accept_length", "verify_steps", "ttft_s", "tpot_s", "e2e_s", "output_tokens")
    rows = [{name: row[name] for name in kept} for row in record.requests]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.record.json").write_text(record.summary())
    result = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl.record.json")
    accept, rate = row_of(result, "accept_length", ""), row_of(result, "accept_rate", "")
    assert (accept.before, accept.verdict, accept.over) == (2.0, UNDECIDED, "12 prompts, paired")
    assert (rate.verdict, rate.over) == (NOT_JUDGED, "no numbers of single requests")
    assert not any(note.startswith(("RESUMED", "ANSWERS")) for note in result.notes)
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")  # a row is missing
    accept = row_of(compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), "accept_length", "")
    assert accept.over == "no numbers of single requests"


def test_answers_are_compared_question_by_question(tmp_path):
    for name, right in (("old", "1" * 20 + "0" * 20), ("new", "0" * 10 + "1" * 12 + "0" * 18)):
        (tmp_path / name).mkdir()
        make_report(right).save(tmp_path / name)
    result = compare(tmp_path / "old", tmp_path / "new")
    loose, strict = row_of(result, "loose match", ""), row_of(result, "strict match", "")
    assert (loose.before, loose.after, loose.verdict) == (0.5, 0.3, LOSES)
    assert loose.over == "40 questions, paired: 10 lost, 2 gained, p = 0.0386"
    assert (strict.verdict, strict.low, strict.high) == (PAYS, pytest.approx(-loose.high), pytest.approx(-loose.low))
    assert row_of(result, "truncated answers", "").verdict == NOT_JUDGED
    assert {row.verdict for row in compare(tmp_path / "old", tmp_path / "old").rows} == {
        UNDECIDED,
        ONE_REPEAT,
        NOT_JUDGED,
    }


def test_partial_scores_have_no_exact_test(tmp_path):
    report = make_report("1100")
    report.questions[0]["scores"]["loose"]["match"] = 0.4
    report.save(tmp_path)
    row = row_of(compare(tmp_path, tmp_path), "loose match", "")
    assert (row.verdict, row.over) == (NOT_JUDGED, "not right or wrong")
