"""`specbatch bench` with a draft: iterations at full batch, closed loops and first tokens compared with a baseline."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from specbatch import Engine
from specbatch.cli.app import app
from specbatch.config import EngineConfig, Speculation
from specbatch.engine import builder
from specbatch.jobs.configurations import named
from specbatch.runtime import device as devices
from specbatch.sweeps.bench import bench
from specbatch.sweeps.bench.plan import BenchOptions, plan_engines
from specbatch.sweeps.bench.tables import write_table

EAGLE3 = Speculation("eagle3", draft="dummy", simulate_accept_length=2.0)
TOY = EngineConfig(model="toy", load_format="dummy", device="cpu", page_size=4, speculation=EAGLE3)
WORDS = (
    *("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--page-size", "4", "--repeats", "1"),
    *("--batch", "1,3", "--decode-tokens", "8", "--new-tokens", "4,60", "--concurrency", "2", "--input-len", "10"),
    *("--output-len", "8", "--ttft-tokens", "5", "--output", "out"),
)
DRAFT = ("--algorithm", "eagle3", "--draft", "dummy", "--simulate-accept-length", "2.0")
PEERS = """\
model,dtype,gpu,algorithm,draft_steps,draft_topk,draft_tokens,accept_length,section,size,column,peer,value
toy,float32,,eagle3,3,1,3,2,decode,3,step_ms,Theirs,7.25
toy,float32,,eagle3,3,1,3,2.0,decode,3,decode_tok_s,Theirs,8256
toy,float32,,,,,,,decode,3,step_ms,Theirs,1.125
toy,float32,,eagle3,3,1,3,2.5,decode,3,step_ms,Longer,9.25
toy,float32,,eagle3,4,1,4,2,decode,3,step_ms,Deeper,9.25
toy,float32,,eagle3,3,2,3,2,decode,3,step_ms,Wider,9.25
toy,float32,,eagle,3,1,3,2,decode,3,step_ms,Other,9.25
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [*map(str, words)])


def rows_of(folder: str = "out") -> list[dict[str, str]]:
    return list(csv.DictReader(Path(folder, "summary.csv").read_text().splitlines()))


def cells(text: str, section: str, peer: str) -> dict[tuple[str, str], str]:
    """What stands under a peer, by size and configuration."""
    table = text.split(f"## {section}\n")[1].split("\n\n")[1].splitlines()
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    return {(row[0], row[1]): row[head.index(peer)] for row in body}


def test_iterations_at_full_batch_and_closed_loops(run):
    Path("peers.csv").write_text(PEERS)
    result = run(
        "bench", *WORDS, *DRAFT, "--aux-layers", "3,2,1", "--sections", "decode,closed", "--peers", "peers.csv"
    )
    assert result.exit_code == 0, result.output
    rows = {(row["section"], row["size"], row["configuration"]): row for row in rows_of()}
    names = ("baseline", "v1", "v2")
    assert list(rows) == [
        *(("decode", size, name) for size in ("1", "3") for name in names),
        *(("closed", "2", name) for name in names),
    ]
    for (section, size, name), row in rows.items():
        plain = rows[section, size, "baseline"]
        assert not row["failed"] + row["not_measured"]
        assert float(plain["ratio"]) == 1
        if name == "baseline":
            assert not row["accept_length"] + row["break_even"] + row["drafting"]
            continue
        assert row["drafting"] == "eagle3, 3 drafted, accept length 2"
        accept = float(row["accept_length"])
        assert 1.7 < accept <= 2
        assert row["speculation"].endswith("(one repeat)")
        if section == "decode":
            assert 20 <= int(float(row["full_batch_steps"])) <= 30
            step, plain_step = float(row["step_ms"]), float(plain["step_ms"])
            assert float(row["decode_tok_s"]) == pytest.approx(1e3 * int(size) * accept / step)
            assert float(row["break_even"]) == pytest.approx(step / plain_step)
            # Both use the measured accept length, not the simulated mean.
            assert float(row["ratio"]) == pytest.approx(accept * plain_step / step)
            assert (float(row["ratio"]) > 1) == row["speculation"].startswith("+")
            assert f"{abs(float(row['ratio']) - 1):.1%}" in row["speculation"]
    assert float(rows["decode", "3", "baseline"]["full_batch_steps"]) == 59
    text = Path("out/summary.md").read_text()
    assert text in result.stdout
    assert "the mean time of the iterations (draft, verify, accept, commit) that ran all requests" in text
    assert "difference of the two runs" not in text
    assert "ratio to baseline" in text
    theirs = cells(text, "Iteration at full batch", "Theirs: ms per step")
    assert theirs == {(size, name): "-" for size in "13" for name in names} | {
        ("3", "baseline"): "1.125", ("3", "v1"): "7.25", ("3", "v2"): "7.25"
    }  # fmt: skip
    assert cells(text, "Iteration at full batch", "Theirs: tok/s")["3", "v2"] == "8256"
    assert not any(peer in text for peer in ("Longer", "Deeper", "Wider", "Other"))
    write_table(Path("out"))
    assert Path("out/summary.md").read_text() == text


def test_first_tokens_and_a_verify_that_is_left_out(run):
    result = run("bench", *WORDS, *DRAFT, "--sections", "ttft,verify", "--configs", "v2,baseline")
    assert result.exit_code == 0, result.output
    assert [(row["section"], row["configuration"]) for row in rows_of()] == [("ttft", "v2"), ("ttft", "baseline")]
    assert all(row["median_ttft_ms"] and row["ratio"] and not row["break_even"] for row in rows_of())
    assert "left out: section verify: it has its own drafts" in result.stderr
    assert "break-even" not in result.stdout


def test_a_missing_baseline_is_a_note(run):
    result = run("bench", *WORDS, *DRAFT, "--sections", "decode,ttft", "--configs", "v2")
    assert result.exit_code == 0, result.output
    assert "NOT COMPARED: Iteration at full batch: ratio and break-even need baseline, which --configs" in result.stdout
    assert "NOT COMPARED: First token of one request: the ratio needs baseline" in result.stdout
    table = result.stdout.partition("## Iteration at full batch")[2].partition("##")[0]
    assert "ratio to" not in table
    assert "break-even" not in table
    assert "simulated accept length 2" in result.stdout.partition("##")[0]


def test_no_warning_about_a_default_section():
    said: list[str] = []
    plan = plan_engines(TOY, BenchOptions(), said.append)
    assert {point.section for point in plan.points} == {"decode", "closed", "ttft"}
    assert not any("verify" in line for line in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", *WORDS, *DRAFT, "--sections", "verify"), "sections='verify': it has its own drafts"),
        (("bench", *WORDS, *DRAFT, "--configs", "baseline"), "configs='baseline': add one that drafts"),
        (("bench", *WORDS, "--configs", "baseline"), "configs='baseline': nothing drafts without"),
        (("bench", *WORDS, "--simulate-accept-length", "2"), "nothing is drafted; add --algorithm, or leave it out"),
    ],
)
def test_refusals(run, words, said):
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["bench", "sweep", "check"])
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_planned(run, command):
    """Though the first engine drafts nothing and could be made."""
    words = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--algorithm", "dflash", "--draft", "dummy")
    result = run(command, *words, "--draft-tokens", "20")
    assert result.exit_code == 2
    assert "error: draft_tokens=20: the draft's block size is 16; use at most 15" in result.stderr
    assert "memory" not in result.stderr


@pytest.mark.parametrize("speculation", [Speculation(), EAGLE3])
def test_a_warm_up_runs_the_whole_batch(speculation):
    """Prompts are computed one after the other, and the first has not ended when the last begins."""
    base = replace(TOY, speculation=speculation, prefill_chunk=10)
    options = BenchOptions(sections=("decode", "closed"), batch=(12,), concurrency=(7,), decode_tokens=10, input_len=10)
    plan = plan_engines(base, options)
    with Engine(plan.engines["v2"]) as engine:
        for point in plan.points:
            bench._warm_up(engine, point.load)
            counters = engine.record().counters
            assert str(point.size) in counters["steps_by_rows"]
            # No more requests than run at once, and in a loop one that comes later.
            assert counters["prefill_passes"] == point.size + (point.section == "closed")


def test_a_run_too_short_for_its_batch_has_no_step():
    base = replace(TOY, prefill_chunk=10)
    plan = plan_engines(base, BenchOptions(sections=("decode",), batch=(4,), decode_tokens=10, new_tokens=(2, 46)))
    with Engine(plan.engines["v1"]) as engine:
        record = bench._measure(engine, replace(plan.points[0].load, new_tokens=(44,)))
        assert record.workload["full_batch_steps"] == 19
        assert record.metrics["step_s"] is None
        record = bench._measure(engine, plan.points[0].load)
        assert record.workload["full_batch_steps"] == 20
        by_rows = record.counters["steps_by_rows"]
        steps, seconds = by_rows["4"]
        assert record.metrics["step_s"] == pytest.approx(seconds / steps)
        # A CPU has no clock of its own: what the host took, launching and waiting.
        assert sum(steps for steps, _ in by_rows.values()) == record.counters["iterations"]
        assert sum(seconds for _, seconds in by_rows.values()) == pytest.approx(record.counters["iteration_s"])


# -- engines ----------------------------------------------------------------------------------------------------------


def test_a_tree_has_pages_for_the_nodes_of_its_draft():
    tree = replace(EAGLE3, draft_steps=5, draft_topk=4, draft_tokens=8)
    plan = plan_engines(replace(TOY, speculation=tree), BenchOptions(sections=("decode",), batch=(2,)))
    with Engine(plan.engines["v2"]) as engine:
        assert engine.caps["verify_slots"] == 17
        assert plan.engines["v2"].kv_pages == 2 * -(-(512 + 288 + 2 * 17) // 4)


def test_a_baseline_has_no_draft_attention_backend():
    base = replace(TOY, speculation=Speculation("standalone", draft="toy"), draft_attention_backend="torch")
    plan = plan_engines(base, BenchOptions(sections=("closed",)))
    asked = {name: config.draft_attention_backend for name, config in plan.engines.items()}
    assert asked == {"baseline": "auto", "v1": "torch", "v2": "torch"}
    both = named(base, ("baseline", "v2"))
    assert {name: config.draft_attention_backend for name, config in both.items()} == {
        "baseline": "auto",
        "v2": "torch",
    }


def test_a_block_draft_sets_its_draft_length(monkeypatch):
    base = replace(TOY, speculation=Speculation("dflash", draft="dummy"))
    prepared = builder.prepare(base, lambda line: None)
    short = prepared._replace(config=replace(base, speculation=replace(base.speculation, draft_tokens=7)))
    monkeypatch.setattr(builder, "prepare", lambda config, log: short)
    plan = plan_engines(base, BenchOptions(sections=("decode",), batch=(1,)))
    assert plan.engines["v2"].speculation.drafted == 7


@pytest.mark.parametrize(
    ("speculation", "sizes"),
    [
        (replace(EAGLE3, simulate_accept_length=2.4), (1, 8, 32, 128)),
        (replace(EAGLE3, algorithm="dflash", simulate_accept_length=6.35), (1, 32)),
    ],
    ids=lambda item: getattr(item, "algorithm", ""),
)
def test_four_engines_of_qwen3_8b_fit_on_an_h200(monkeypatch, speculation, sizes):
    """By their memory plans, if all that is planned stays taken while the next engine is made."""
    free = 139 << 30
    device = torch.device("cuda", 0)
    for module in (builder, devices):
        monkeypatch.setattr(module, "find_device", lambda name: device)
    monkeypatch.setattr(builder, "prefill_backend", lambda *_: None)
    monkeypatch.setattr(builder, "available_memory", lambda _: free)
    base = EngineConfig(model="qwen3-8b", load_format="dummy", prefill_chunk=8192, speculation=speculation)
    plan = plan_engines(base, BenchOptions(batch=sizes, concurrency=sizes))
    assert {name: config.graphs.prefill for name, config in plan.engines.items()} == {
        "baseline": "piecewise", "v1": "off", "v2": "off", "v2+piecewise": "piecewise"
    }  # fmt: skip
    assert all(point.names == list(plan.engines) for point in plan.points)
    for name, config in plan.engines.items():
        memory = builder.memory_plan(builder.prepare(config, lambda line: None), is_shared=name != "baseline")
        assert memory.kv_pages == config.kv_pages
        free -= memory.weights + memory.draft_weights + memory.kv + memory.workspace + memory.graphs
    assert free > 8 << 30
