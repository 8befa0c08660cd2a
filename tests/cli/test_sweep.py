"""`specbatch sweep`: points, order, records, summary, interruption."""

from __future__ import annotations

import csv
import json
from collections import Counter
from datetime import datetime

import pytest

from specbatch.cli.output import fresh_folder
from specbatch.errors import SpecbatchError, refuse
from specbatch.memory.planner import MemoryShare
from specbatch.sweeps.report.compare import compare
from specbatch.sweeps.report.points import load_records, precision_of
from specbatch.sweeps.report.tables import write_summary
from specbatch.sweeps.run.benchmark import BenchmarkPrompts

from .conftest import TINY_SWEEP


@pytest.fixture
def sweep(run, tmp_path):
    """`sweep(options)` writes to tmp_path / "out"."""
    return lambda options, *more: run(
        "sweep", "--repeats", 1, *options.split(), "--output", tmp_path / "out", *TINY_SWEEP, *more
    )


def read(tmp_path, name):
    return json.loads((tmp_path / "out" / name / "record.json").read_text())


def test_points_records_and_summary(sweep, tmp_path):
    result = sweep("--concurrency 1,4 --repeats 2")
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    records = sorted(str(path.parent.relative_to(out)) for path in out.glob("*/c*/r*/record.json"))
    assert records == [f"{name}/c{c}/r{r}" for name in ("baseline", "v1", "v2") for c in (1, 4) for r in (1, 2)]
    assert (out / "v1/c4/r2/requests.jsonl").read_text().count("\n") == 8
    record = read(tmp_path, "v1/c4/r2")
    assert record["workload"]["configuration"] == "v1"
    assert record["workload"]["prompts"] == 8
    assert len(record["workload"]["prompts_sha256"]) == 64
    assert record["metrics"]["requests"] == 8  # the warm-up is not among them

    table = list(csv.DictReader((out / "summary.csv").open()))
    assert [(row["concurrency"], row["configuration"]) for row in table] == [
        (c, name) for c in ("1", "4") for name in ("baseline", "v1", "v2")
    ]
    assert table[3]["repeats"] == "2"
    assert float(table[3]["output_throughput"]) == 20.0  # 8 x 5 tokens in the stub's 2 s
    assert float(table[3]["per_user_throughput"]) == 5.0
    assert float(table[4]["mean_ttft_s"]) == 0.25
    assert float(table[4]["ratio"]) == 1.0
    assert table[3]["accept_rate"] == ""

    written = {name: (out / name).read_text() for name in ("summary.md", "summary.csv")}
    assert all(text in written["summary.md"] for text in result.stdout.split("\n\n")[1:3])  # table, conclusion
    assert "model: smollm2-135m" in written["summary.md"]
    assert "same output tokens at every point" in written["summary.md"]
    for name in written:
        (out / name).unlink()
    write_summary(out)  # from the records
    assert {name: (out / name).read_text() for name in written} == written


def test_repeats_are_interleaved_after_a_warm_up_of_each(sweep, engine):
    sweep("--concurrency 3 --configs v2,baseline --repeats 2")
    v2, baseline = "ngram/v2/3", "none/v2/3"
    assert engine.order == [v2, baseline, *(v2, baseline), *(baseline, v2)]
    assert len(engine.built) == 2


def test_engines_share_the_memory_and_fit_the_workload(sweep, engine):
    sweep("--concurrency 2 --memory-fraction 0.9")
    assert engine.shares == [MemoryShare(0, 3), MemoryShare(1, 3), MemoryShare(2, 3)]
    settings = {
        (item.memory_fraction, item.max_model_len, item.prefix_cache, item.max_running) for item in engine.built
    }
    assert settings == {(0.9, 11, False, 2)}
    first, *others = engine.lenders
    assert first is None
    assert [lender.config.speculation.algorithm for lender in others] == ["none"] * 2  # the first engine's weights


def test_configurations(sweep, engine):
    sweep("--concurrency 2 --draft self:skip=1-2 --draft-tokens 3")
    found = [(spec.algorithm, spec.schedule, spec.num_drafts) for spec in (item.speculation for item in engine.built)]
    assert found == [("none", "v2", 0), ("standalone", "v1", 3), ("standalone", "v2", 3)]


def test_same_command_continues(sweep, engine, tmp_path):
    command = "--concurrency 1 --repeats 2"
    engine.interrupt_after = 3 * 1 + 4 + 2  # warm-ups, one point, half of the next
    result = sweep(command)
    assert result.exit_code == 130
    assert "interrupted; kept 1 finished point " in result.stderr
    assert next(csv.DictReader((tmp_path / "out/summary.csv").open()))["configuration"] == "baseline"
    engine.interrupt_after = None
    (tmp_path / "out/baseline/c1/r1/kept").touch()
    engine.order.clear()
    result = sweep(command)
    assert result.exit_code == 0, result.output
    baseline, v1, v2 = "none/v2/1", "ngram/v1/1", "ngram/v2/1"
    warm_up = [v1, v2, baseline]
    assert engine.order == [*warm_up, v1, v2, *(v2, v1, baseline)]
    assert len(list(tmp_path.glob("out/*/c1/r*/record.json"))) == 6
    assert (tmp_path / "out/baseline/c1/r1/kept").exists()
    engine.order.clear()
    result = sweep(command)
    assert (result.exit_code, "6 of 6 points are finished\n" in result.stderr) == (0, True)
    assert engine.order == []
    other = sweep(command, "--seed", 3)
    assert (other.exit_code, "seed (0 there, 3 now)" in other.stderr) == (2, True)


@pytest.fixture
def no_room_for_v1(engine):
    """The engine of v1 cannot be built, until the list is emptied."""
    reasons = ["kv_pages=9: out of memory"]

    def build(config):
        if config.speculation.schedule == "v1" and reasons:
            raise SpecbatchError(reasons[0])

    engine.building = build
    return reasons


def test_failed_configuration_does_not_end_the_sweep(sweep, run, engine, no_room_for_v1, tmp_path, no_plots):
    result = sweep("--concurrency 1,2 --json")
    assert result.exit_code == 1, result.output
    assert result.stderr.count("v1: --kv-pages=9: out of memory") == 1
    assert "failed: " not in result.stderr  # of each point that v1 would have had
    rows = json.loads(result.stdout)["rows"]
    assert [(row["configuration"], row["failed"]) for row in rows if row["concurrency"] == 2] == [
        ("baseline", None), ("v1", "--kv-pages=9: out of memory"), ("v2", None),
    ]  # fmt: skip
    summary = (tmp_path / "out/summary.md").read_text()
    assert summary.count("out of memory") == 1
    assert "FAILED: v1 at concurrency 1, repeat 1, and 1 other point: --kv-pages=9: out of memory" in summary
    assert run("report", tmp_path / "out").exit_code == 0
    assert "--kv-pages=9: out of memory" in (tmp_path / "out/report.html").read_text()
    engine.order.clear()
    no_room_for_v1.clear()
    again = sweep("--concurrency 1,2")
    assert again.exit_code == 0, again.output
    assert set(engine.order) == {"ngram/v1/1", "ngram/v1/2"}, "the points that failed run again, and no other"
    assert "FAILED" not in (tmp_path / "out/summary.md").read_text()


@pytest.mark.parametrize("settings", ["algorithm = 'eagle3'\ndraft = '/nope/m'", "algorithm='ngram'\ncorpus='/nope/m'"])
def test_unknown_draft_or_corpus_fails_its_configuration_unless_all_have_it(settings, sweep, engine, tmp_path):
    unknown, setting = f"[bad]\n{settings}\n", "corpus" if "corpus" in settings else "draft"

    def prepare(config):
        if "/nope/m" in (config.speculation.draft, config.speculation.corpus):
            raise refuse(setting, "/nope/m", "no such folder")

    engine.preparing = prepare
    (grid := tmp_path / "grid.toml").write_text("[baseline]\n[ng]\nalgorithm = 'ngram'\n" + unknown)
    result = sweep(f"--concurrency 1 --configs {grid} --json")
    assert result.exit_code == 1, result.output
    assert [(row["configuration"], row["failed"]) for row in json.loads(result.stdout)["rows"]] == [
        ("baseline", None), ("ng", None), ("bad", f"{setting}='/nope/m': no such folder"),
    ]  # fmt: skip
    grid.write_text("[baseline]\n" + unknown)
    other = sweep(f"--concurrency 1 --configs {grid}", "--out", tmp_path / "other")
    assert (other.exit_code, f"bad': {setting}='/nope/m': no such folder" in other.stderr) == (2, True)


def test_engine_that_fails_while_it_runs_fails_its_point(sweep, engine, tmp_path):
    def fails(config, concurrency):
        if config.speculation.schedule == "v1" and concurrency == 2:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    engine.streaming = fails
    assert sweep("--concurrency 1,2").exit_code == 1
    errors = {
        str(path.parent.relative_to(tmp_path / "out")): json.loads(path.read_text())["workload"].get("error")
        for path in tmp_path.glob("out/*/c*/r1/record.json")
    }
    assert {name: error for name, error in errors.items() if error} == {
        "v1/c2/r1": "RuntimeError: CUDA error: an illegal memory access"
    }
    assert len(errors) == 6


def test_what_fails_in_all_configurations_is_refused(sweep, engine, tmp_path):
    def build(config):
        raise SpecbatchError("model='typo': no such model")

    engine.building = build
    result = sweep("--concurrency 1")
    assert result.exit_code == 2
    assert "error: --model=typo: no such model" in result.stderr
    assert not (tmp_path / "out").exists()


def test_json_rows(sweep):
    (line,) = sweep("--concurrency 1 --configs v1 --json").stdout.splitlines()
    (row,) = json.loads(line)["rows"]
    assert (row["configuration"], row["ratio"]) == ("v1", None)


@pytest.mark.parametrize(
    ("words", "output_len", "prompts", "short"),
    [((), 32, 5, True), (("--output-len", 7, "--prompts-per-concurrency", 3), 7, 15, False)],
)
def test_default_workload_on_a_cpu(run, jsonl, tmp_path, words, output_len, prompts, short):
    questions = jsonl({"question": "2 + 2?", "answer": "4"})
    where = ("--data", questions, "--device", "cpu", "--out", tmp_path / "out")
    result = run("sweep", "--concurrency", 5, "--configs", "v1", *where, *words)
    assert result.exit_code == 0, result.output
    work = read(tmp_path, "v1/c5/r1")["workload"]
    assert (work["dataset"], work["output_len"], work["prompts"]) == ("gsm8k", output_len, prompts)
    assert f"settings: gsm8k, text, output at most {output_len}" in result.stderr
    assert ("for a long one add --output-len 128" in result.stderr) == short


def test_file_of_prompts(run, engine, jsonl, tmp_path):
    source = jsonl(*({"question": f"{number}?"} for number in range(3)))
    words = ("--prompts-per-concurrency", 2, "--output", tmp_path / "out")
    assert run("sweep", "--concurrency", 4, "--configs", "v1", "--dataset", source, *words).exit_code == 0
    work = read(tmp_path, "v1/c4/r1")["workload"]
    assert (work["prompts"], work["distinct_prompts"], work["ignore_eos"]) == (8, 3, False)
    assert engine.built[0].max_model_len is None


def test_default_outputs_are_fresh_folders(run, tmp_path, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr("specbatch.cli.output.datetime", Clock)
    for _ in range(2):  # within a second
        assert run("sweep", "--concurrency", "1", "--configs", "baseline, v2", *TINY_SWEEP).exit_code == 0
    folders = {folder.name for folder in (tmp_path / "out").iterdir()}
    assert folders == {"sweep-20300102-030405", "sweep-20300102-030405-2"}
    assert (tmp_path / "out/sweep-20300102-030405/summary.md").exists()


def test_output_folder_is_locked(sweep, tmp_path):
    with fresh_folder(tmp_path / "out", "sweep"):
        result = sweep("")
    assert result.exit_code == 2
    assert "another run is writing to it" in result.stderr


def test_shared_prefixes_with_a_request_rate(sweep, engine, tmp_path):
    groups = "--dataset gsp --groups 3 --group-prompts 2 --shared-len 20"
    result = sweep(f"--concurrency 2 --configs baseline,v2 {groups} --request-rate 50")
    assert result.exit_code == 0, result.output
    work = read(tmp_path, "v2/c2/r1")["workload"]
    assert (work["prompts"], work["distinct_prompts"], work["input_len"], work["request_rate"]) == (6, 6, 26, 50)
    assert work["shared"] == {"groups": 3, "group_prompts": 2, "shared_len": 20}
    assert {(config.prefix_cache, config.max_model_len) for config in engine.built} == {(True, 31)}
    warm, measured = engine.arrived[:2], engine.arrived[2:]
    assert warm == [None, None]
    assert measured[0] == measured[1]
    assert [len(times) for times in measured] == [6, 6]
    assert engine.forgot == 2  # once per point, after the warm-ups
    summary = (tmp_path / "out/summary.md").read_text()
    assert "gsp, 26 input tokens each (20 of them shared by the 2 of each of 3 groups)" in summary
    assert "arrivals: 50 requests per second at random (Poisson)" in summary
    assert "prefix cache: on" in summary


def test_shared_prefixes_without_a_cache(sweep, engine, tmp_path):
    sweep("--concurrency 1 --dataset gsp --no-prefix-cache --groups 2 --group-prompts 2 --shared-len 20")
    assert engine.forgot == 0
    assert set(engine.arrived) == {None}
    assert "prefix cache: off" in (tmp_path / "out/summary.md").read_text()


def test_no_model_runs_if_one_is_refused(sweep, engine, tmp_path):
    def prepare(config):
        if config.model == "missing":
            raise refuse("model", config.model, "does not exist")

    engine.preparing = prepare
    grid = tmp_path / "grid.toml"
    grid.write_text('[baseline]\nspec = "off"\nload_format = "dummy"\nmodel = ["toy", "missing"]\n')
    result = sweep(f"--configs {grid}")
    assert result.exit_code == 2
    assert "model='missing'" in result.output
    assert not (tmp_path / "out").exists()


def test_sampled_answers(sweep, tmp_path):
    result = sweep("--concurrency 1 --configs baseline,v2 --temperature 0.6 --top-p 0.95")
    assert result.exit_code == 0, result.output
    assert read(tmp_path, "v2/c1/r1")["workload"]["sampling"]["temperature"] == 0.6
    assert "output exactly 5, temperature 0.6, top-p 0.95, seed 0" in result.stdout
    other = sweep("--concurrency 1 --configs baseline,v2 --temperature 0.7 --top-p 0.95")
    assert (other.exit_code, "temperature (0.6 there, 0.7 now)" in other.output) == (2, True)


def test_goodput_under_objectives(sweep, tmp_path):
    command = "--concurrency 1 --configs baseline,v2 --request-rate 50"
    result = sweep(command, "--slo", "e2e=100,ttft=1e-12", "--wide")
    assert result.exit_code == 0, result.output
    for name in ("baseline", "v2"):
        record = read(tmp_path, f"{name}/c1/r1")
        assert record["workload"]["slo"] == {"ttft_s": 1e-12, "e2e_s": 100.0}
        assert (record["metrics"]["goodput"], record["metrics"]["slo_share"]) == (0.0, 0.0)
    assert "objectives: TTFT up to 1e-12 s, E2E latency up to 100 s" in result.stdout
    assert all(
        f"| {title} " in result.stdout for title in ("goodput (req/s)", "met the SLO (%)", "mean queue time (ms)")
    )
    other = sweep(command, "--slo", "e2e=100")
    assert (other.exit_code, "slo ('ttft=1e-12,e2e=100' there, 'e2e=100' now)" in other.output) == (2, True)
    without = sweep(command)
    assert (without.exit_code, "slo ('ttft=1e-12,e2e=100' there, not set now)" in without.output) == (2, True)


def test_rounds_are_added_until_the_ratios_are_precise(sweep, run, monkeypatch, tmp_path):
    """At concurrency 1 v2 varies in the first round, at concurrency 2 it does not; v1 always does at concurrency 4."""
    measure, calls = BenchmarkPrompts.measure, Counter()

    def measured(prompts, engine, point, count):
        found = measure(prompts, engine, point, count)
        record, concurrency = found.record, point.concurrency
        schedule = record.config["speculation"]["schedule"] if record.drafts else "baseline"
        turn = calls[schedule, concurrency]
        if turn == stops_at.get((schedule, concurrency)):
            stops_at.clear()
            raise KeyboardInterrupt
        calls[schedule, concurrency] += 1
        varies = {("v2", 1): turn == 0, ("v2", 4): turn % 2 == 0}.get((schedule, concurrency), False)
        record.metrics["output_throughput"] = 100.0 + (4 if concurrency == 1 else 10) * varies
        return found

    monkeypatch.setattr(BenchmarkPrompts, "measure", measured)
    stops_at = {("v2", 1): 4}
    command = "--concurrency 1,2,4 --configs baseline,v2 --until-precise 5% --most-repeats 6 --repeats 3"
    assert sweep(command).exit_code == 130
    assert len(list(tmp_path.glob("out/*/c1/r*/record.json"))) == 9  # of the fifth round only the baseline
    summary = (tmp_path / "out/summary.md").read_text()
    assert "UNFINISHED: 1 point without a record (1 of v2 at concurrency 1)" in summary
    result = sweep(command)
    assert result.exit_code == 0, result.output
    rounds = {c: len(list(tmp_path.glob(f"out/v2/c{c}/r*/record.json"))) for c in (1, 2, 4)}
    assert rounds == {1: 5, 2: 3, 4: 6}
    assert "Concurrency 2: the 95% intervals of the ratios are within ±5%: v2 ±0%." in result.stdout
    assert "Concurrency 4: the 95% intervals of the ratios are STILL NOT WITHIN ±5%: v2 ±11%;" in result.stdout
    assert "UNFINISHED" not in result.stdout
    assert "28 of 28 points are finished" in sweep(command).stderr
    assert sweep(command.replace("6", "7")).exit_code == 0
    assert len(list(tmp_path.glob("out/v2/c4/r*/record.json"))) == 7
    folders = tmp_path / "out/baseline/c4", tmp_path / "out/v2/c4"
    (row,) = [row for row in compare(*folders).rows if row.metric == "output_throughput"]
    known = precision_of(load_records(tmp_path / "out"))[4, "v2"]
    assert (row.ratio_high - row.ratio_low) / 2 == pytest.approx(known)


def test_a_sweep_ends_with_the_report(sweep, run, tmp_path, plots, request):
    """The files of `specbatch report`, and again where an interrupted sweep goes on."""
    out = tmp_path / "out"
    result = sweep("--concurrency 1 --json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["reports"] == [str(out / "report.html")]
    made = {
        path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.suffix in (".html", ".md", ".csv")
    }
    assert (out / "plots" / "throughput.svg").exists()
    assert "<svg" in (out / "report.html").read_text()
    assert run("report", out).exit_code == 0
    assert {name: (out / name).read_bytes() for name in made} == made
    request.getfixturevalue("no_plots")  # which take most of the time
    (out / "report.html").unlink()
    (out / "v2/c1/r1/record.json").unlink()
    result = sweep("--concurrency 1")
    assert result.exit_code == 0, result.output
    assert f"plots: {out / 'report.html'}" in result.stdout
    assert (out / "report.html").exists()


def test_a_report_that_fails_is_a_warning(sweep, tmp_path, plots, monkeypatch):
    def fail(folder):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("specbatch.sweeps.report.report.write_report", fail)
    result = sweep("--concurrency 1")
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert f"warning: no report.html: RuntimeError: no fonts; specbatch report {out} writes it" in result.stderr
    assert (out / "summary.csv").exists()
    assert "plots:" not in result.stdout
