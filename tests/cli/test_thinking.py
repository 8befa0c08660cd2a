"""--compare-thinking: thinking on and off in one table of `sweep` and `eval`, reasoning and answer apart."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from letters import write_letters
from typer.testing import CliRunner, Result

from specbatch.cli.app import app

MARKS = ["<think>", "</think>"]
# Opens reasoning, or closes it. Random weights never end it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
)


@pytest.fixture
def run(run_toy: Callable[..., Callable[..., Result]], tmp_path: Path) -> Callable[..., Result]:
    folder = write_letters(tmp_path / "model", template=TEMPLATE, marks=MARKS)
    words = f"--model {folder} --device cpu --dtype float32 --max-model-len 1024"
    return run_toy(words.split())


def table(text: str, first: str) -> list[dict[str, str]]:
    """The rows of the table in Markdown whose first heading is `first`, and that has all others."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"| {first}"))
    rows: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_sweep(run: Callable[..., Result]) -> None:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("abab", "cdcd", "efef", "ghgh")]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "sweep --dataset in.jsonl --configs baseline,v2 --concurrency 2 --output-len 12 --repeats 1 --out out"
    result = run(f"{command} --compare-thinking --draft-tokens 3 --ngram-min 1")
    found = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    assert [(row["thinking"], row["configuration"]) for row in found] == [
        ("on", "baseline"), ("on", "v2"), ("off", "baseline"), ("off", "v2"),
    ]  # fmt: skip
    for mode, reasoning, answer in (("on", 12.0, 0.0), ("off", None, 12.0)):
        record = json.loads(Path(f"out/thinking-{mode}/v2/c2/r1/record.json").read_text())
        assert record["workload"]["thinking"] == (mode == "on")
        assert record["metrics"]["mean_reasoning_tokens"] == reasoning
        row = next(row for row in found if (row["thinking"], row["configuration"]) == (mode, "v2"))
        assert float(row["mean_reasoning_tokens"] or 0) == (reasoning or 0)
        assert float(row["mean_answer_tokens"] or answer) == answer
        part = "reasoning" if mode == "on" else "answer"
        lengths = table(Path("out/summary.md").read_text().partition("Reasoning and answer:")[2], "thinking")
        (cells,) = [one for one in lengths if (one["thinking"], one["configuration"]) == (mode, "v2")]
        assert float(cells[f"{part} accept length"]) == pytest.approx(record["metrics"]["accept_length"], abs=1e-3)
        assert cells["answer accept length" if mode == "on" else "reasoning accept length"] == "-"
    decision = table(result.stdout, "thinking")
    assert [row["thinking"] for row in decision] == ["on", "on", "off", "off"]
    assert decision[0]["speedup over baseline (95% interval)"] == "1.00"
    again = run(f"{command} --compare-thinking --draft-tokens 3 --ngram-min 1")
    assert again.stderr.count("2 of 2 points are finished") == 2
    assert table(again.stdout, "thinking") == decision


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--compare-thinking --no-thinking", "--compare-thinking measures both; leave one of them out"),
        ("--compare-thinking --dataset random", "--compare-thinking: random prompts are not text; leave it out"),
    ],
)
def test_refused(run: Callable[..., Result], options: str, reason: str) -> None:
    Path("in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    assert reason in run(f"sweep --dataset in.jsonl {options}", exit_code=2).stderr
    assert not Path("out").exists()


def score_rows(text: str) -> list[str]:
    return [row["thinking"] for row in table(text, "thinking")]


def test_eval(run: Callable[..., Result]) -> None:
    command = "eval one_digit_sums --limit 3 --chat-template --max-new-tokens 10 --algorithm ngram --out out"
    result = run(f"{command} --compare-thinking")
    assert score_rows(result.stdout) == ["on", "on", "off", "off"]  # two filters
    apart = table(result.stdout.partition("Reasoning and answer:")[2], "thinking")
    assert [(row["thinking"], row["task"], row["reasoning tokens"], row["answer tokens"]) for row in apart] == [
        ("on", "one_digit_sums", "10.0", "0.0"),
        ("off", "one_digit_sums", "-", "10.0"),
    ]
    assert apart[0]["reasoning accept length"] != "-" != apart[1]["answer accept length"]
    rows = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    assert [(row["thinking"], row["mean_reasoning_tokens"]) for row in rows] == [
        ("on", "10.0"), ("on", "10.0"), ("off", ""), ("off", ""),
    ]  # fmt: skip
    assert json.loads(Path("out/thinking-off/record.json").read_text())["workload"]["thinking"] is False
    assert run(f"{command} --compare-thinking").stderr.count("is complete") == 2


def test_eval_of_configurations(run: Callable[..., Result]) -> None:
    command = "eval one_digit_sums --configs baseline,v2 --concurrency 2 --limit 3 --chat-template --max-new-tokens 10"
    result = run(f"{command} --compare-thinking --out out --json")
    text = Path("out/summary.md").read_text()
    assert score_rows(text) == ["on", "on", "off", "off"]
    apart = table(text.partition("Reasoning and answer:")[2], "thinking")
    assert [(row["thinking"], row["configuration"]) for row in apart] == [
        ("on", "baseline"), ("on", "v2"), ("off", "baseline"), ("off", "v2"),
    ]  # fmt: skip
    found = json.loads(result.stdout)["thinking"]
    assert {mode: len(grids["one_digit_sums"]["rows"]) for mode, grids in found.items()} == {"on": 2, "off": 2}
    other = Path("several/thinking-off/third/sweep.json")
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    words = command.replace("one_digit_sums", "one_digit_sums gsm8k").split()
    refused = CliRunner().invoke(app, [*words, "--compare-thinking", "--out", "several"])
    assert refused.exit_code == 2
    assert "has results of third as well, which its table would lose" in refused.stderr


def test_acceptance(run: Callable[..., Result]) -> None:
    run("eval one_digit_sums --limit 3 --chat-template --thinking --max-new-tokens 10 --algorithm ngram --out out")
    result = CliRunner().invoke(app, ["acceptance", "out"], env={"COLUMNS": "1000"})
    assert result.exit_code == 0
    (row,) = table(result.stdout.partition("Reasoning and answer:")[2], "reasoning tokens")
    assert (row["reasoning tokens"], row["answer tokens"]) == ("10.0", "0.0")
    parts = json.loads(CliRunner().invoke(app, ["acceptance", "out", "--json"]).stdout)["parts"]
    assert parts["mean_reasoning_tokens"] == 10
