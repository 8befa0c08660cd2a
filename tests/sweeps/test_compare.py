"""compare: pairing, intervals, directions, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.errors import SpecbatchError
from specbatch.metrics import RunRecord, summarize
from specbatch.request import Completion, RequestMetrics
from specbatch.sweeps.compare import BETTER, ONE_RUN, SAME, UNJUDGED, WORSE, Comparison, Row, compare
from specbatch.sweeps.intervals import Sample, over_prompts, over_runs, sample
from specbatch.sweeps.measures import MEASURES
from specbatch.sweeps.points import Place, load_run


def metrics_of(index: int, *, verifies: int = 10, emitted: int = 20, ttft: float = 0.1, **more: Any) -> RequestMetrics:
    tpot = more.pop("tpot_s", 0.01)
    return RequestMetrics(
        prompt_tokens=8, output_tokens=emitted + 1, ttft_s=ttft, tpot_s=tpot, e2e_s=1.0, verify_steps=verifies,
        emitted=emitted, drafted=40, accepted=emitted - verifies, accept_length=emitted / verifies, **more,
    )  # fmt: skip


def make_record(
    rows: list[RequestMetrics],
    *,
    configuration: str | None = "v1",
    concurrency: int = 4,
    repeat: int = 1,
    duration: float = 2.0,
    config: EngineConfig | None = None,
    created: str = "2030-01-01T00:00:00+00:00",
    finish: str = "length",
    **work: Any,
) -> RunRecord:
    """What an engine would have recorded of requests with these numbers."""
    done = [Completion(index, [], [], "", finish, row) for index, row in enumerate(rows)]
    place = {"configuration": configuration, "concurrency": concurrency, "repeat": repeat, "place": 0}
    workload = {"dataset": "random", "output_len": 4, "prompts": len(rows), "prompts_sha256": "same", **work}
    return RunRecord(
        config=asdict(config or EngineConfig(speculation=Speculation("ngram", "v1"))),
        caps={"device": "cpu", "dtype": "float32", "max_running": 4},
        metrics=summarize(done, duration, concurrency),
        counters={},
        requests=[item.as_row() for item in done],
        workload=workload | (place if configuration else {}),
        versions={"torch": "2.13"},
        hardware={"cpu": "abacus", "cores": 2},
        created=created,
    )


def put(folder: Path, *records: RunRecord) -> Path:
    for record in records:
        work = record.workload
        place = folder / work["configuration"] / f"c{work['concurrency']}" / f"r{work['repeat']}"
        place.mkdir(parents=True)
        record.save(place)
    return folder


def row_of(result: Comparison, metric: str, size: int = 4) -> Row:
    (row,) = (row for row in result.rows if row.metric == metric and row.size == size)
    return row


# Intervals


@given(
    before=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=10, max_size=30),
    extra=st.integers(0, 3),
    median=st.booleans(),
)
def test_of_itself_no_difference_is_shown_and_a_shift_of_all_is(before, extra, median):
    top, bottom = (np.array(column, float) for column in zip(*before, strict=True))
    indices = tuple(range(len(top)))
    old, new = Sample(top, bottom, indices), Sample(top + extra * bottom, bottom, indices)
    found = over_prompts(old, new, median=median)
    assert (found.low, found.high) == pytest.approx((extra, extra))  # paired: every resample differs by as much


def test_pairs_cancel_what_the_prompts_have_in_common():
    rng = np.random.default_rng(3)
    hard = rng.gamma(1.0, 10.0, 40)
    ones = np.ones(40)
    change = 1 + 0.1 * rng.normal(size=40)
    pairs = [Sample(part, ones, tuple(range(40))) for part in (hard, hard + change)]
    paired = over_prompts(*pairs)
    assert paired.low < change.mean() < paired.high
    assert paired.low > 0.9
    assert paired.over == "40 prompts, paired"
    apart = over_prompts(pairs[0], Sample(pairs[1].top, ones, None))
    assert apart.low < 0 < apart.high
    assert apart.over == "40 and 40 prompts, unpaired"
    others = over_prompts(pairs[0], Sample(pairs[1].top, ones, tuple(range(1, 41))))
    assert others.over.endswith("unpaired")


def test_the_bootstrap_is_the_distribution_of_all_resamples():
    """Of ten prompts of which one differs, a resample holds it k times with a binomial probability."""
    top = np.zeros(10)
    new = top.copy()
    new[3] = 10.0  # the mean difference of a resample is k
    samples = [Sample(part, np.ones(10), tuple(range(10))) for part in (top, new)]
    exact = stats.binom(10, 0.1).ppf([0.025, 0.975])
    found = over_prompts(*samples)
    assert (found.low, found.high) == tuple(exact) == (0.0, 3.0)
    assert over_prompts(*samples) == found  # a fixed seed


def test_few_prompts_have_no_interval():
    part = np.ones(9)
    found = over_prompts(*[Sample(part, part, tuple(range(9)))] * 2)
    assert (found.low, found.high, found.over) == (None, None, "fewer than 10 prompts")


def test_what_hardly_any_prompt_has_gets_no_interval():
    bottom = np.zeros(12)
    bottom[0] = 1.0  # many resamples lack the only prompt that drafted
    found = over_prompts(*[Sample(bottom, bottom, tuple(range(12)))] * 2)
    assert (found.low, found.over) == (None, "too few prompts have it")


def test_intervals_over_runs_by_hand():
    old, new = [10.0, 12.0, 14.0], [20.0, 21.0, 25.0]
    found = over_runs(old, new)
    a, b = np.var(old, ddof=1) / 3, np.var(new, ddof=1) / 3
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 2)  # Welch and Satterthwaite
    half = stats.t.ppf(0.975, freedom) * np.sqrt(a + b)
    assert (found.low, found.high) == pytest.approx((10 - half, 10 + half))
    within = over_runs(old, new, paired=True)
    half = stats.t.ppf(0.975, 2) * np.std([10, 9, 11], ddof=1) / np.sqrt(3)
    assert (within.low, within.high) == pytest.approx((10 - half, 10 + half))
    assert (found.over, within.over) == ("3 and 3 runs", "3 runs, paired by round")
    assert over_runs([2.0, 2.0], [3.0, 3.0]).low == 1.0  # without variance there is no t
    assert over_runs([2.0, 5.0], [3.0, 6.0], paired=True).high == 1.0


# Samples are what the record's own numbers are made of


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(10, 30), st.floats(0.01, 2)), min_size=1, max_size=12))
def test_sums_of_rows_are_the_metrics_of_the_record(rows):
    made = [metrics_of(0, verifies=v, emitted=e, ttft=t) for v, e, t in rows]
    made[-1].tpot_s = None  # one token has none
    record = make_record(made)
    for name, measure in MEASURES.items():
        if measure.rows is None or record.metrics[name] is None:
            continue
        found = sample(measure.rows, [record])
        assert found is not None
        of = np.nanmedian(found.top / np.where(found.bottom, found.bottom, np.nan)) if measure.median else None
        assert (of if measure.median else found.top.sum() / found.bottom.sum()) == pytest.approx(record.metrics[name])


def test_repeats_are_summed_by_prompt_and_orders_do_not_matter():
    first, second = (make_record([metrics_of(0, ttft=t) for t in times]) for times in ([1, 2, 3], [10, 20, 30]))
    second.requests.reverse()
    found = sample(("ttft_s", None), [first, second])
    assert found is not None
    assert found.top.tolist() == [11, 22, 33]
    assert found.bottom.tolist() == [2, 2, 2]
    first.requests[0]["finish_reason"] = "abort"
    found = sample(("ttft_s", None), [first, second])
    assert found is not None
    assert (found.top[0], found.bottom[0]) == (10, 1)


def test_rows_without_their_prompt_do_not_pair():
    record = make_record([metrics_of(0), metrics_of(0)])
    for row in record.requests:
        row["index"] = 0  # requests sent one by one
    found = sample(("ttft_s", None), [record])
    assert found is not None
    assert found.indices is None
    assert sample(("nothing", None), [record]) is None
    record.requests = []
    assert sample(("ttft_s", None), [record]) is None


# The table


@pytest.mark.parametrize(
    ("emitted", "ttft", "length", "first"),
    [(22, 0.2, BETTER, ONE_RUN[WORSE]), (18, 0.05, WORSE, ONE_RUN[BETTER]), (20, 0.1, SAME, SAME)],
)
def test_directions(tmp_path, emitted, ttft, length, first):
    old = put(tmp_path / "a", make_record([metrics_of(0) for _ in range(12)]))
    new = put(tmp_path / "b", make_record([metrics_of(0, emitted=emitted, ttft=ttft) for _ in range(12)]))
    result = compare(old, new)
    accept, mean = row_of(result, "accept length"), row_of(result, "mean TTFT")
    assert (accept.verdict, mean.verdict) == (length, first)
    assert (accept.before, accept.after) == (2.0, emitted / 10)
    assert accept.gain_percent == pytest.approx(100 * (emitted / 20 - 1))
    assert (mean.before, mean.after, mean.unit) == (pytest.approx(100), pytest.approx(1000 * ttft), "ms")
    assert row_of(result, "output throughput").verdict == UNJUDGED  # one run a side
    assert ("(regression)" in result.markdown()) == (length == WORSE)
    assert ("IN ONE RUN" in result.markdown()) == (first != SAME)


def test_every_measure_knows_its_direction():
    higher = {name for name, measure in MEASURES.items() if measure.better == "higher"}
    assert higher == {"output_throughput", "accept_length", "accept_rate", "graph_coverage"}
    for measure in MEASURES.values():
        assert (measure.worsened(1.0, 2.0) > 0) == (measure.better == "lower")


def test_times_are_judged_over_repeats(tmp_path):
    def runs(name: str, times: list[float], hour: int) -> Path:
        made = [
            make_record([metrics_of(0, ttft=t)] * 3, repeat=n, created=f"2030-01-01T{hour:02}:00:0{n}+00:00")
            for n, t in enumerate(times, 1)
        ]
        return put(tmp_path / name, *made)

    old, slow, alike = runs("a", [1.0, 1.1, 1.2], 1), runs("b", [1.5, 1.6, 1.7], 1), runs("c", [1.0, 1.2, 1.4], 2)
    row = row_of(compare(old, slow), "mean TTFT")
    assert (row.verdict, row.over) == (WORSE, "3 and 3 runs")
    assert row.before == pytest.approx(1100)  # the mean
    assert row_of(compare(slow, old), "p99 TTFT").verdict == BETTER
    assert row_of(compare(old, alike), "mean TTFT").verdict == SAME
    assert "NOT IN TURNS" in compare(old, alike).markdown()
    assert "NOT IN TURNS" not in compare(old, slow).markdown()


def test_rounds_of_one_run_pair(tmp_path):
    """The machine slows down threefold; within a round v2 is always a little slower."""
    for n, t in enumerate([1.0, 2.0, 3.0], 1):
        put(tmp_path, make_record([metrics_of(0, ttft=t)], repeat=n))
        put(tmp_path, make_record([metrics_of(0, ttft=t + 0.1 + n / 1000)], repeat=n, configuration="v2"))
    row = row_of(compare(tmp_path / "v1", tmp_path / "v2"), "mean TTFT")
    assert (row.verdict, row.over) == (WORSE, "3 runs, paired by round")


def test_repeats_may_come_from_several_runs(tmp_path):
    for side, number in product("ab", "12"):
        put(tmp_path / side / number, make_record([metrics_of(0)]))
    assert row_of(compare(tmp_path / "a", tmp_path / "b"), "mean TTFT").over == "2 and 2 runs"


def test_points_pair_by_place_and_others_are_named(tmp_path):
    rows = [metrics_of(0)] * 10
    old = put(
        tmp_path / "a", *(make_record(rows, configuration=n, concurrency=c) for n in ("v1", "v2") for c in (1, 4))
    )
    new = put(
        tmp_path / "b", make_record(rows, configuration="v2"), make_record(rows, configuration="v2", concurrency=9)
    )
    put(tmp_path / "b", make_record(rows, configuration="baseline"))
    result = compare(old, new)
    assert {(row.configuration, row.size) for row in result.rows} == {("v2", 4)}
    assert [note for note in result.notes if note.startswith("ONLY")] == [
        f"ONLY IN {old}: v1 concurrency 1",
        f"ONLY IN {old}: v2 concurrency 1",
        f"ONLY IN {old}: v1 concurrency 4",
        f"ONLY IN {new}: baseline concurrency 4",
        f"ONLY IN {new}: v2 concurrency 9",
    ]
    assert {row.configuration for row in compare(old / "v1", old / "v2").rows} == {""}  # these are what is compared


def test_markdown_csv_and_json_say_the_same(tmp_path):
    old = put(tmp_path / "a", make_record([metrics_of(0)] * 12))
    new = put(tmp_path / "b", make_record([metrics_of(0, emitted=18)] * 12))
    result = compare(old, new)
    lines = [line for line in result.markdown().splitlines() if line.startswith("| 4 ")]
    (shown,) = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "accept length" in line)
    assert shown == [
        "4", "accept length (tokens)", "2.000", "1.800", "-0.200", "-10.0% (regression)", "-0.200 to -0.200",
        "12 prompts, paired",
    ]  # fmt: skip
    table = list(csv.DictReader(io.StringIO(result.csv())))
    body = json.loads(json.dumps(result.as_dict()))
    assert list(table[0]) == list(body["rows"][0]) == [
        "section", "configuration", "size", "metric", "unit", "better", "before", "after", "delta", "gain_percent",
        "low", "high", "over", "verdict",
    ]  # fmt: skip
    (line,) = (row for row in table if row["metric"] == "accept length")
    assert (float(line["delta"]), line["verdict"]) == (pytest.approx(-0.2), "regression")
    assert set(body) == {"before", "after", "model", "confidence", "differs", "rows", "notes"}
    assert len(lines) == len(table) == len(body["rows"])


def test_what_else_differs_is_said(tmp_path):
    v2 = EngineConfig(speculation=Speculation("ngram", "v2"))
    other = make_record([metrics_of(0)] * 12, config=v2)
    other.versions["torch"], other.hardware["cpu"], other.caps["max_running"] = "2.14", "slide rule", 3
    result = compare(put(tmp_path / "a", make_record([metrics_of(0)] * 12)), put(tmp_path / "b", other))
    assert result.differs == {
        "speculation.schedule": ["v1 -> v2"],
        "effective max_running": ["4 -> 3"],
        "torch version": ["2.13 -> 2.14"],
        "hardware": ["abacus, 2 cores -> slide rule, 2 cores"],
    }
    assert "DIFFERENT HARDWARE" in result.markdown()


def test_chance_is_counted(tmp_path):
    folder = put(tmp_path / "a", *(make_record([metrics_of(0)] * 12, concurrency=c) for c in range(1, 9)))
    result = compare(folder, folder)
    judged = [row for row in result.rows if row.low is not None]
    assert f"Of {len(judged)} intervals at 95%, about {round(len(judged) / 20)} would" in result.markdown()


# What is refused, and what is noted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts_sha256": "other"}, "prompts_sha256 same and other"),
        ({"prompts": 3}, "prompts 12 and 3"),
        ({"output_len": 9}, "output_len 4 and 9"),
        ({"command": "check"}, "command None and check"),
        ({"config": EngineConfig(model="toy")}, "model smollm2-135m and toy"),
        ({"config": EngineConfig(load_format="dummy")}, "load_format auto and dummy"),
    ],
)
def test_other_models_and_workloads_are_refused_with_what_differs(tmp_path, change, said):
    old = put(tmp_path / "a", make_record([metrics_of(0)] * 12))
    new = put(tmp_path / "b", make_record([metrics_of(0)] * 12, **change))
    with pytest.raises(SpecbatchError, match=said) as error:
        compare(old, new)
    assert "\n" not in str(error.value)
    assert "at v1" not in str(error.value)
    assert "concurrency 4" in str(error.value)


def test_random_weights_of_another_seed_are_another_model(tmp_path):
    a, b = (make_record([metrics_of(0)], config=EngineConfig(load_format="dummy", seed=seed)) for seed in (1, 2))
    with pytest.raises(SpecbatchError, match="seed of the weights 1 and 2"):
        compare(put(tmp_path / "a", a), put(tmp_path / "b", b))
    a.config["load_format"] = b.config["load_format"] = "auto"
    assert compare(put(tmp_path / "c", a), put(tmp_path / "d", b)).differs["seed"] == ["1 -> 2"]


def test_runs_without_a_common_point_are_refused(tmp_path):
    old = put(tmp_path / "a", make_record([metrics_of(0)], concurrency=1))
    new = put(tmp_path / "b", make_record([metrics_of(0)], concurrency=2))
    with pytest.raises(SpecbatchError, match="no point in common: concurrency 1, and concurrency 2"):
        compare(old, new)


def test_a_folder_of_different_runs_is_refused(tmp_path):
    put(tmp_path / "a", make_record([metrics_of(0)]))
    put(tmp_path / "b", make_record([metrics_of(0)], config=EngineConfig(speculation=Speculation("ngram", "v2"))))
    with pytest.raises(SpecbatchError, match=r"speculation\.schedule v1 and v2"):
        load_run("before", tmp_path)
    put(tmp_path / "c" / "1", make_record([metrics_of(0)]))
    put(tmp_path / "c" / "2", make_record([metrics_of(0)], prompts_sha256="other"))
    with pytest.raises(SpecbatchError, match="prompts_sha256 same and other"):
        load_run("before", tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "TypeError"), ('{"schema": 2}', "TypeError")],
)
def test_a_damaged_record_is_one_line(tmp_path, text, said):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(SpecbatchError, match=said) as error:
        load_run("before", tmp_path)
    assert "\n" not in str(error.value)


def test_no_record_and_another_schema_are_refused(tmp_path):
    with pytest.raises(SpecbatchError, match=r"holds no record\.json"):
        load_run("before", tmp_path)
    with pytest.raises(SpecbatchError, match=r"holds no record\.json"):
        load_run("before", tmp_path / "nowhere")
    record = make_record([metrics_of(0)])
    record.schema = 2
    with pytest.raises(SpecbatchError, match="schema 2, and this version reads 1"):
        load_run("before", put(tmp_path, record))


def test_failed_unfinished_and_unreplayed_points_are_noted(tmp_path):
    graphs = EngineConfig(device="cuda", graphs=Graphs(decode="whole"))
    good = make_record([metrics_of(0)] * 12, config=graphs)
    good.metrics["requests"] = 11
    good.counters = {"graphs": {"decode": {"replays": 0, "fallbacks": {}, "padded": 0}}}
    bad = RunRecord(good.config, {}, {}, {}, [], {**good.workload, "error": "no memory", "concurrency": 8})
    other = make_record([metrics_of(0)] * 12, config=graphs, concurrency=8)
    other.counters = {"graphs": {"decode": {"replays": 5, "fallbacks": {}, "padded": 0}}}
    old, new = put(tmp_path / "a", good, other), put(tmp_path / "b", good, bad)
    notes = compare(old, new).notes
    assert f"NO REPLAYS: {old} concurrency 4: decode graphs were asked for and none was replayed." in notes
    assert f"INCOMPLETE: {new} concurrency 4: 11 of 12 prompts finished" in notes
    assert f"FAILED: {new} concurrency 8: no memory" in notes
    assert {row.size for row in compare(old, new).rows} == {4}
    with pytest.raises(SpecbatchError, match="no number in common"):
        compare(old / "v1" / "c8", new / "v1" / "c8")


def test_places_of_a_bench(tmp_path):
    for section, size in (("decode", 1), ("machine", 0)):
        record = make_record([metrics_of(0)] * 10, section=section, size=size, output_len=4)
        record.metrics["step_s"] = 0.004
        folder = tmp_path / section / "v1" / str(size) / "r1"
        folder.mkdir(parents=True)
        record.save(folder)
    assert list(load_run("before", tmp_path).points) == [Place("decode", "v1", 1)]
    row = row_of(compare(tmp_path, tmp_path), "step", 1)
    assert (row.section, row.before) == ("decode", pytest.approx(4.0))


def test_the_output_of_generate(tmp_path):
    record = make_record([metrics_of(0)] * 12, configuration=None, command="generate")
    kept = ("index", "finish_reason", "accept_length", "verify_steps", "ttft_s", "tpot_s", "e2e_s", "output_tokens")
    rows = [{name: row[name] for name in kept} for row in record.requests]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.record.json").write_text(record.summary())
    result = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl.record.json")
    accept, rate = row_of(result, "accept length", ""), row_of(result, "accept rate", "")
    assert (accept.before, accept.verdict, accept.over) == (2.0, SAME, "12 prompts, paired")
    assert (rate.verdict, rate.over) == (UNJUDGED, "no rows")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")  # the record is of a part of the rows
    assert row_of(compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), "accept length", "").over == "no rows"
