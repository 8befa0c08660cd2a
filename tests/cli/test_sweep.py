"""`specbatch sweep`: points, order, records, summary, interruption."""

from __future__ import annotations

import csv
import json
from datetime import datetime

import pytest

from specbatch.cli.output import fresh_folder
from specbatch.errors import refuse
from specbatch.memory.planner import MemoryShare
from specbatch.sweeps.report.tables import write_summary

SMALL = ("--input-len", 6, "--output-len", 5, "--prompts-per-concurrency", 2)


def test_points_records_and_summary(run, engine, tmp_path):
    result = run("sweep", "--concurrency", "1,4", "--repeats", 2, "--output", tmp_path / "out", *SMALL)
    assert result.exit_code == 0, result.output
    records = sorted(
        str(path.parent.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/*/c*/r*/record.json")
    )
    assert records == [f"{name}/c{c}/r{r}" for name in ("baseline", "v1", "v2") for c in (1, 4) for r in (1, 2)]
    assert (tmp_path / "out/v1/c4/r2/requests.jsonl").read_text().count("\n") == 8

    record = json.loads((tmp_path / "out/v1/c4/r2/record.json").read_text())
    assert record["workload"]["configuration"] == "v1"
    assert record["workload"]["prompts"] == 8
    assert len(record["workload"]["prompts_sha256"]) == 64
    assert record["metrics"]["requests"] == 8  # the warm-up is not among them

    table = list(csv.DictReader((tmp_path / "out/summary.csv").open()))
    assert [(row["concurrency"], row["configuration"]) for row in table] == [
        (c, name) for c in ("1", "4") for name in ("baseline", "v1", "v2")
    ]
    assert table[3]["repeats"] == "2"
    assert float(table[3]["output_tok_s"]) == 20.0  # 8 x 5 tokens in the stub's 2 s
    assert float(table[3]["per_user_tok_s"]) == 5.0
    assert float(table[4]["mean_ttft_ms"]) == 250.0
    assert float(table[4]["ratio"]) == 1.0
    assert table[3]["accept_rate"] == ""

    summary = (tmp_path / "out/summary.md").read_text()
    assert summary in result.stdout
    assert "model: smollm2-135m" in summary
    assert "same output tokens at every point" in summary


def test_the_summary_is_made_from_the_records(run, tmp_path):
    run("sweep", "--concurrency", "2", "--output", tmp_path / "out", *SMALL)
    before = [(tmp_path / "out" / name).read_text() for name in ("summary.md", "summary.csv")]
    for name in ("summary.md", "summary.csv"):
        (tmp_path / "out" / name).unlink()
    write_summary(tmp_path / "out")
    assert [(tmp_path / "out" / name).read_text() for name in ("summary.md", "summary.csv")] == before


def test_repeats_are_interleaved_after_a_warm_up_of_each(run, engine, tmp_path):
    run(
        "sweep",
        "--concurrency",
        "3",
        "--configs",
        "v2,baseline",
        "--repeats",
        2,
        "--output",
        tmp_path / "out",
        *SMALL,
    )
    warm_up = round_ = ["ngram/v2/3", "none/v2/3"]
    assert engine.order == warm_up + round_ + round_
    assert len(engine.built) == 2


def test_engines_share_the_memory_and_fit_the_workload(run, engine, tmp_path):
    run("sweep", "--concurrency", "2", "--memory-fraction", "0.9", "--output", tmp_path / "out", *SMALL)
    assert engine.places == [MemoryShare(0, 3), MemoryShare(1, 3), MemoryShare(2, 3)]
    assert {config.memory_fraction for config in engine.built} == {0.9}
    assert {config.max_model_len for config in engine.built} == {11}
    first, *others = engine.lenders
    assert first is None
    assert len(others) == 2
    assert {lender.config.speculation.algorithm for lender in others} == {"none"}  # the first engine's weights
    assert {config.prefix_cache for config in engine.built} == {False}
    assert {config.max_running for config in engine.built} == {2}


def test_configurations(run, engine, tmp_path):
    run(
        "sweep",
        "--concurrency",
        "2",
        "--draft",
        "self:skip=1-2",
        "--draft-tokens",
        3,
        "--output",
        tmp_path / "o",
        *SMALL,
    )
    asked = [config.speculation for config in engine.built]
    assert [(spec.algorithm, spec.schedule, spec.drafted) for spec in asked] == [
        ("none", "v2", 0),
        ("standalone", "v1", 3),
        ("standalone", "v2", 3),
    ]


def test_an_interrupted_sweep_keeps_its_points_and_their_summary(run, engine, tmp_path):
    engine.interrupt_after = 3 * 1 + 4 + 2  # warm-ups, one point, half of the next
    result = run("sweep", "--concurrency", "1", "--output", tmp_path / "out", *SMALL)
    assert result.exit_code == 130
    assert "interrupted; kept 1 finished points" in result.stderr
    assert next(csv.DictReader((tmp_path / "out/summary.csv").open()))["configuration"] == "baseline"


def test_the_same_command_continues(run, engine, tmp_path):
    words = ("sweep", "--concurrency", "1", "--repeats", 2, "--output", tmp_path / "out", *SMALL)
    engine.interrupt_after = 3 * 1 + 4 + 2
    assert run(*words).exit_code == 130
    engine.interrupt_after = None
    (tmp_path / "out/baseline/c1/r1/kept").touch()
    engine.order.clear()
    result = run(*words)
    assert result.exit_code == 0, result.output
    baseline, v1, v2 = "none/v2/1", "ngram/v1/1", "ngram/v2/1"
    warm_up = [v1, v2, baseline]
    assert engine.order == [*warm_up, v1, v2, baseline, v1, v2]
    assert len(list(tmp_path.glob("out/*/c1/r*/record.json"))) == 6
    assert (tmp_path / "out/baseline/c1/r1/kept").exists()
    engine.order.clear()
    assert run(*words).exit_code == 0  # nothing is left
    assert engine.order == []
    other = run(*words, "--seed", 3)
    assert (other.exit_code, "seed (0 there, 3 now)" in other.stderr) == (2, True)


def test_json_rows(run, tmp_path):
    result = run("sweep", "--concurrency", "1", "--configs", "v1", "--output", tmp_path / "out", "--json", *SMALL)
    (line,) = result.stdout.splitlines()
    (row,) = json.loads(line)["rows"]
    assert row["configuration"] == "v1"
    assert row["ratio"] is None


def test_default_output_is_a_fresh_folder(run, tmp_path):
    assert run("sweep", "--concurrency", "1", *SMALL).exit_code == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("sweep-2")
    assert (folder / "summary.md").exists()


@pytest.mark.parametrize(
    ("words", "output_len", "prompts", "short"),
    [((), 48, 5, True), (("--output-len", 7, "--prompts-per-concurrency", 3), 7, 15, False)],
)
def test_defaults_are_questions_in_a_size_that_suits_a_cpu(run, jsonl, tmp_path, words, output_len, prompts, short):
    questions = jsonl({"question": "2 + 2?", "answer": "4"})
    where = ("--data", questions, "--device", "cpu", "--out", tmp_path / "out")
    result = run("sweep", "--concurrency", 5, "--configs", "v1", *where, *words)
    assert result.exit_code == 0, result.output
    work = json.loads((tmp_path / "out/v1/c5/r1/record.json").read_text())["workload"]
    assert (work["dataset"], work["output_len"], work["prompts"]) == ("gsm8k", output_len, prompts)
    assert f"settings: gsm8k, text, output at most {output_len}" in result.stderr
    assert ("for a long one add --output-len 128" in result.stderr) == short


def test_a_file_of_prompts(run, engine, jsonl, tmp_path):
    source = jsonl(*({"question": f"{number}?"} for number in range(3)))
    run(
        "sweep",
        "--concurrency",
        "4",
        "--configs",
        "v1",
        "--dataset",
        source,
        "--output",
        tmp_path / "out",
        *SMALL,
    )
    work = json.loads((tmp_path / "out/v1/c4/r1/record.json").read_text())["workload"]
    assert (work["prompts"], work["distinct_prompts"], work["ignore_eos"]) == (8, 3, False)
    assert engine.built[0].max_model_len is None


def test_two_runs_within_a_second_get_two_folders(run, tmp_path, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr("specbatch.cli.output.datetime", Clock)
    for _ in range(2):
        assert run("sweep", "--concurrency", "1", "--configs", "baseline, v2", *SMALL).exit_code == 0
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {
        "sweep-20300102-030405",
        "sweep-20300102-030405-2",
    }


def test_one_run_at_a_time_writes_to_a_folder(run, tmp_path):
    with fresh_folder(tmp_path / "new", "sweep"):
        result = run("sweep", "--output", tmp_path / "new")
    assert result.exit_code == 2
    assert "another run is writing to it" in result.stderr


def test_shared_prefixes_with_a_request_rate(run, engine, tmp_path):
    asked = ("--dataset", "gsp", "--groups", 3, "--group-prompts", 2, "--shared-len", 20, "--request-rate", 50)
    result = run(
        "sweep", "--concurrency", "2", "--configs", "baseline,v2", "--output", tmp_path / "out", *asked, *SMALL
    )
    assert result.exit_code == 0, result.output
    work = json.loads((tmp_path / "out/v2/c2/r1/record.json").read_text())["workload"]
    assert (work["prompts"], work["distinct_prompts"], work["input_len"], work["request_rate"]) == (6, 6, 26, 50)
    assert work["shared"] == {"groups": 3, "group_prompts": 2, "shared_len": 20}
    assert {config.prefix_cache for config in engine.built} == {True}
    assert {config.max_model_len for config in engine.built} == {31}
    warm, measured = engine.arrived[:2], engine.arrived[2:]
    assert warm == [None, None]
    assert measured[0] == measured[1]
    assert [len(times) for times in measured] == [6, 6]
    assert engine.forgot == 2  # once per point, behind the warm-ups
    summary = (tmp_path / "out/summary.md").read_text()
    assert "gsp, 26 input tokens each (20 of them shared by the 2 of each of 3 groups)" in summary
    assert "arrivals: 50 requests per second at random (Poisson)" in summary
    assert "prefix cache: on" in summary


def test_a_sweep_of_shared_prefixes_without_a_cache(run, engine, tmp_path):
    run("sweep", "--concurrency", "1", "--dataset", "gsp", "--no-prefix-cache", "--output", tmp_path / "out",
        "--groups", 2, "--group-prompts", 2, "--shared-len", 20, *SMALL)  # fmt: skip
    assert engine.forgot == 0
    assert set(engine.arrived) == {None}
    assert "prefix cache: off" in (tmp_path / "out/summary.md").read_text()


def test_no_model_runs_if_one_cannot(run, tmp_path, monkeypatch):
    def prepare(config, say):
        if config.model == "toy-of-nobody":
            raise refuse("model", config.model, "is nobody's")

    monkeypatch.setattr("specbatch.engine.builder.prepare", prepare)
    grid = tmp_path / "grid.toml"
    grid.write_text('[baseline]\nspec = "off"\nload_format = "dummy"\nmodel = ["toy", "toy-of-nobody"]\n')
    result = run("sweep", "--configs", grid, "--output", tmp_path / "out", *SMALL)
    assert result.exit_code == 2
    assert "model='toy-of-nobody'" in result.output
    assert not (tmp_path / "out").exists()
