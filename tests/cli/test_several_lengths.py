"""`sweep` with several lengths of prompts or kinds of text: a folder for each, one table, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from checkpoints import write_folder

from specbatch.records.archive import pack

from .conftest import TINY_SWEEP

KINDS = ["none", "shuffled", "random"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / f"text/{name}").mkdir(parents=True)
        for number in range(4):
            (tmp_path / f"text/{name}/f{number}.py").write_text(f"{name} {number} " * 30)
    return tmp_path / "text"


@pytest.fixture
def sweep(run, text, tmp_path, no_plots):
    words = (
        "--configs baseline,v2 --concurrency 1,2 --repeats 2 --device cpu --output-len 5 --prompts-per-concurrency 2"
    )
    return lambda options: run(
        "sweep", *words.split(), "--dataset", f"repository:{text}", "--output", tmp_path / "out", *options.split()
    )


def workload(folder: Path) -> dict:
    return json.loads((folder / "v2/c2/r1/record.json").read_text())["workload"]


def test_each_length_has_a_folder_and_prompts_that_end_alike(sweep, run, tmp_path):
    out = tmp_path / "out"
    result = sweep("--input-len 40,20")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((out / "summary.csv").read_text().splitlines()))
    assert [(row["input_len"], row["concurrency"], row["configuration"]) for row in rows] == [
        (size, at, name) for size in ("20", "40") for at in ("1", "2") for name in ("baseline", "v2")
    ]
    short, long = (workload(out / f"input-len-{size}") for size in (20, 40))
    assert (short["input_len"], long["input_len"], short["window"]) == (20, 40, 40)
    assert short["sources"] == long["sources"]
    assert {source.partition("/")[0] for source in short["sources"]} == {"one", "two"}
    assert "4 prompts, by what they end in: " in (out / "input-len-20/summary.md").read_text()
    alone = sweep("--input-len 20 --window 40 --output " + str(tmp_path / "alone"))
    assert alone.exit_code == 0, alone.output
    assert workload(tmp_path / "alone")["prompts_sha256"] == short["prompts_sha256"]

    again = sweep("--input-len 40,20")
    assert again.stderr.count("8 of 8 points are finished") == 2
    before = (out / "summary.md").read_text()
    result = run("report", out, "--output", tmp_path / "new", "--records", tmp_path / "records.tar.xz")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new/summary.md").read_text() == before
    assert (tmp_path / "new/input-len-20/report.html").exists()


def test_kinds_of_text(sweep, tmp_path):
    result = sweep("--input-len 20 --concurrency 1 --repeats 1 --scramble none,shuffled,random")
    assert result.exit_code == 0, result.output
    records = [tmp_path / f"out/scramble-{kind}/v2/c1/r1/record.json" for kind in KINDS]
    assert len({json.loads(path.read_text())["workload"]["prompts_sha256"] for path in records}) == 3
    heads = [words for words in map(str.split, result.stdout.splitlines()) if words[1:4] == ["requests", "|", "config"]]
    assert [word for word in heads[0] if word in KINDS] == KINDS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "--input-len 20,40 --scramble none,random",
            "--scramble='none,random': --input-len has several, too; give one",
        ),
        ("--input-len 20,20", "--input-len='20,20': 20 is given twice"),
        ("--input-len 20-40", "--input-len='20-40': prompts of long text have one length; give a number"),
        ("--input-len 20,500", "--input-len=500: "),
        ("--input-len 20 --window 500", "--window=500: "),
        ("--input-len 500", "has text for 2 prompts of 500 tokens, not 4; use fewer prompts"),
        (
            "--input-len 20,40 --max-model-len 30",
            "--max-model-len=30: prompts and answers of this workload have up to 45 tokens; use at least that",
        ),
        ("--input-len 20 --window 10", "--window=10: goes with long text, and is at least"),
        ("--input-len 20 --chat-template", "prompts are continued as they are; leave it out"),
        ("--input-len 20,40 --compare-thinking", "--compare-thinking: --input-len has several values; leave one"),
        (
            "--input-len 20,40 --model a,b",
            "--input-len='20,40': takes one value with several models (a, b)",
        ),
        ("--dataset gsm8k --input-len 20", "--input-len=20: goes with --dataset random, gsp, repository:FOLDER"),
        ("--dataset documents:nowhere --input-len 20", "nowhere is no folder; name one with text files"),
    ],
)
def test_refusals(sweep, options, reason):
    result = sweep(options)
    assert result.exit_code == 2, result.output
    assert reason in result.stderr


def test_lengths_are_added(sweep, tmp_path):
    short = "--concurrency 1 --repeats 1"
    assert sweep(f"{short} --input-len 20,40").exit_code == 0
    more = sweep(f"{short} --input-len 20,30 --window 40 --max-model-len 45")
    assert "2 of 2 points are finished" in more.stderr
    assert [line.split(",")[0] for line in (tmp_path / "out/summary.csv").read_text().splitlines()[1:]] == [
        "20", "20", "30", "30", "40", "40"
    ]  # fmt: skip


def test_an_archive_of_several_sweeps_has_the_same_table(sweep, run, tmp_path, monkeypatch):
    pages = list[tuple[Path, Path]]()
    monkeypatch.setattr(
        "specbatch.sweeps.report.report.write_report",
        lambda folder, output, *_: pages.append((folder, output)) or [output],
    )
    assert sweep("--concurrency 1 --repeats 1 --input-len 20,40").exit_code == 0
    archive, out, new = tmp_path / "records.tar.xz", tmp_path / "out", tmp_path / "new"
    pack(out, archive)
    pages.clear()
    result = run("report", archive, "--output", new)
    assert result.exit_code == 0, result.output
    for name in ("summary.md", "acceptance.csv"):
        assert (new / name).read_text() == (out / name).read_text()
    assert pages == [(archive / f"input-len-{size}", new / f"input-len-{size}") for size in (20, 40)]


def test_advise_takes_one_length(run):
    result = run("advise", "--input-len", "4,6", "--output-len", 5)
    assert result.exit_code == 2
    assert "--input-len='4,6': sweep alone takes several values; give one" in result.stderr


def test_least_prompts(run, tmp_path):
    words = "--configs v2 --concurrency 1 --repeats 1 --least-prompts 7"
    assert run("sweep", *words.split(), *TINY_SWEEP, "--output", tmp_path / "out").exit_code == 0
    record = json.loads((tmp_path / "out/v2/c1/r1/record.json").read_text())
    assert record["workload"]["prompts"] == 7


def test_a_length_that_the_model_does_not_have_is_named(run_toy, tmp_path):
    words = ["--model", str(write_folder(tmp_path / "tiny")), "--device", "cpu", "--output-len", "4", "--out", "out"]
    result = run_toy(words)("sweep --dataset many-shot --input-len 8,100 --concurrency 1", 2)
    reason = "--input-len=100: with --output-len=4 that is --max-model-len=104: the model supports at most 64"
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["", "--dry-run"])
def test_a_recorded_conversation_that_does_not_fit_is_refused_before_a_point_runs(run_toy, jsonl, tmp_path, words):
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    fits, grows = [asked, answer], [asked, {"role": "assistant", "content": "b" * 40}, asked, answer]
    path = jsonl({"messages": fits}, {"messages": grows})
    model = ["--model", str(write_folder(tmp_path / "tiny")), "--device", "cpu", "--output-len", "4", "--out", "out"]
    counts = "--concurrency 1,2 --prompts-per-concurrency 1 --least-prompts 1 --configs baseline,v2 --repeats 1"
    result = run_toy(model)(f"sweep --dataset {path} --replay {counts} {words}", 2)
    assert "of prompt 1=4: the prompt has " in result.stderr
    assert "--max-model-len=64; shorten it" in result.stderr
    assert not (tmp_path / "out").exists()
