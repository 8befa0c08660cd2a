"""`specbatch bench` on a toy shape: its sections, tables and refusals; points that fail, and benches that go on."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.jobs.output_files import read_output
from specbatch.records.archive import pack, unpacked
from specbatch.records.runs import load_run
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.bench import limits
from specbatch.sweeps.bench.tables import load_sections, write_tables
from specbatch.sweeps.report.report import write_report
from specbatch.sweeps.run import loading
from specbatch.sweeps.run.benchmark import BenchmarkPrompts
from specbatch.weights.dummy import SHAPES

SMALL = {
    "--model": "toy", "--load-format": "dummy", "--device": "cpu", "--page-size": 4, "--batch": "1,3",
    "--verify-batch": "2", "--decode-tokens": 12, "--new-tokens": 22, "--concurrency": "1,4", "--input-len": 20,
    "--output-len": 6, "--ttft-tokens": "5,30", "--repeats": 1, "--output": "out",
}  # fmt: skip
DRAFT = {"algorithm": "eagle3", "draft": "dummy", "simulate_accept_length": 2.0, "aux_layers": "3,2,1"}
PEERS = """\
model,dtype,gpu,algorithm,draft_steps,draft_topk,draft_tokens,accept_length,section,size,column,peer,value
toy,float32,,eagle3,3,1,3,2,decode,3,step_s,Theirs,7.25
toy,float32,,eagle3,3,1,3,2.0,decode,3,decode_throughput,Theirs,8256
toy,float32,,,,,,,decode,3,step_s,Theirs,1.125
toy,float32,,,,,,,ttft,5,median_ttft_s,Theirs,3.5
other,float32,,,,,,,decode,3,step_s,Others,9.5
toy,float32,,eagle3,3,1,3,2.5,decode,3,step_s,Longer,9.25
toy,float32,,eagle3,4,1,4,2,decode,3,step_s,Deeper,9.25
toy,float32,,eagle3,3,2,3,2,decode,3,step_s,Wider,9.25
toy,float32,,eagle,3,1,3,2,decode,3,step_s,Other,9.25
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def call(without: tuple[str, ...] = (), **changes: Any) -> Result:
        kept = {name: value for name, value in SMALL.items() if name not in without}
        words = kept | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        command = ["bench", *(str(word) for pair in words.items() for word in pair)]
        return CliRunner().invoke(app, command, env={"COLUMNS": "1000"})

    return call


class Measured:
    """calls: the concurrency of each point that is measured. before: called with the point before that."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.before: Callable[[Point], None] = lambda point: None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found, measure = Measured(), BenchmarkPrompts.measure

    def noted(prompts: BenchmarkPrompts, engine: Any, point: Point, count: Any) -> Any:
        found.calls.append(point.concurrency)
        found.before(point)
        return measure(prompts, engine, point, count)

    monkeypatch.setattr(BenchmarkPrompts, "measure", noted)
    return found


def rows_of(folder: str = "out") -> dict[tuple[str, str, str], dict[str, str]]:
    """The rows of the CSV, by section, concurrency and configuration."""
    rows = csv.DictReader(Path(folder, "summary.csv").read_text().splitlines())
    return {(row["section"], row["concurrency"], row["configuration"]): row for row in rows}


def cells(text: str, section: str, column: str) -> dict[tuple[str, str], str]:
    """A column of a table of the Markdown, by size and configuration."""
    table = [line for line in text.split(f"## {section}\n")[1].split("##")[0].splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    return {(row[0], row[1]): row[head.index(column)] for row in body}


@pytest.mark.slow
def test_sections_are_sweeps(run: Callable[..., Result], no_plots: None) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    rows = rows_of()
    assert list(rows) == [
        *(("decode", size, name) for size in ("1", "3") for name in ("v1", "v2")),
        *(("closed", size, name) for size in ("1", "4") for name in ("v1", "v2")),
        *((f"ttft-{tokens}", "1", name) for tokens in ("5", "30") for name in ("v1", "v2")),
        *(("verify", "2", name) for name in ("v2", "v2, 16 rows")),
    ]
    primary = {"decode": "step_s", "closed": "output_throughput", "ttft": "median_ttft_s", "verify": "step_s"}
    for (section, size, _), row in rows.items():
        kind = section.partition("-")[0]
        middle, low, high = (float(row[primary[kind] + end]) for end in ("", "_min", "_max"))
        assert 0 < low <= middle <= high
        assert (row["repeats"], row["failed"]) == ("1", "")
        assert row["ratio"]
        assert bool(row["times_gemms"]) == (kind != "closed")
        if kind == "decode":
            accept = float(row["accept_length"] or 1)
            assert float(row["decode_throughput"]) == pytest.approx(int(size) * accept / middle)
    records = load_sections(Path("out"))
    assert {record.metrics["requests"] for record in records["closed"]} == {4, 8}  # the warm-up is not among them
    assert {record.metrics["retractions"] for own in records.values() for record in own} == {0}
    (verify,) = {record.metrics["accept_length"] for record in records["verify"]}
    assert verify == 1
    text = Path("out/summary.md").read_text()
    assert "\n### All columns\n" not in result.stdout
    brief = result.stdout.partition("\nresults: out")[0]
    assert [line for line in brief.splitlines() if line not in text.splitlines()] == []
    assert "* machine: not measured, needs a CUDA device" in text
    for title in ("decode tok/s to v1", "median TTFT to v1", "full-batch step to v2"):
        assert f"ratio of {title} (95% interval)" in text
    assert "speedup over v1 (95% interval)" in text
    assert {size for size, _ in cells(text, "First token of one request", "median TTFT (ms)")} == {"5", "30"}
    assert "replays" not in text  # a CPU has no graphs
    for name in ("summary.md", "summary.csv"):
        Path("out", name).unlink()
    assert write_tables(Path("out")) == text  # from the records alone
    pack(Path("out"), Path("records.tar.xz"))
    with unpacked("records", Path("records.tar.xz")) as folder:
        assert write_tables(folder) == text
    # Each section is a sweep for the other commands.
    assert write_report(Path("out/closed"))[-1].exists()
    assert {key.section for key in load_run("before", Path("out"), read_output).points} == set(records)


def test_requests_of_the_first_token_run_alone(run: Callable[..., Result]) -> None:
    assert run(sections="ttft", ttft_tokens="5").exit_code == 0
    for record in load_sections(Path("out"))["ttft-5"]:
        assert record.metrics["requests"] == 5
        assert set(record.counters["steps_by_rows"]) == {"1"}
        assert record.metrics["max_queue_s"] < 0.5 * record.metrics["mean_e2e_s"]  # none waited for another


def test_one_batch_runs_its_prompts_together(run: Callable[..., Result], no_plots: None) -> None:
    assert run(sections="onebatch", batch="1,3", input_len=6, output_len=5).exit_code == 0
    records = load_sections(Path("out"))
    for size in (1, 3):
        for record in records[f"onebatch-{size}"]:
            assert (record.metrics["requests"], record.workload["burst"]) == (size, 0)
            assert record.metrics["output_tokens"] == 5 * size
    assert Path("out/summary.md").read_text().count("Batch size: 3, input: 6, output: 5") == 2  # v1 and v2


@pytest.mark.slow
def test_drafts_are_compared_with_a_baseline(run: Callable[..., Result]) -> None:
    Path("peers.csv").write_text(PEERS)
    result = run(**DRAFT, sections="decode,ttft,verify", ttft_tokens="5", new_tokens=48, peers="peers.csv")
    assert result.exit_code == 0, result.output
    rows, names = rows_of(), ("baseline", "v1", "v2")
    assert list(rows) == [
        *(("decode", size, name) for size in ("1", "3") for name in names),
        *(("ttft-5", "1", name) for name in names),
    ]
    for (section, size, name), row in rows.items():
        plain = rows[section, size, "baseline"]
        assert float(plain["ratio"]) == 1
        assert bool(row["break_even"]) == (name != "baseline" and section == "decode")
        if row["break_even"]:
            accept, step, plain_step = (
                float(value) for value in (row["accept_length"], row["step_s"], plain["step_s"])
            )
            assert 1.4 < accept < 2.6  # drawn with a mean of 2
            assert float(row["full_batch_steps"]) >= 20
            assert float(row["decode_throughput"]) == pytest.approx(int(size) * accept / step)
            assert float(row["break_even"]) == pytest.approx(step / plain_step)
            assert float(row["ratio"]) == pytest.approx(accept * plain_step / step)
    text = Path("out/summary.md").read_text()
    assert "left out: section verify: it has its own drafts" in result.stderr
    theirs = cells(text, "Decode step", "Theirs: full-batch step (ms)")
    assert theirs == {(size, name): "-" for size in "13" for name in names} | {
        ("3", "baseline"): "1.125", ("3", "v1"): "7.25", ("3", "v2"): "7.25"
    }  # fmt: skip
    assert cells(text, "Decode step", "Theirs: decode tok/s")["3", "v2"] == "8256"
    assert cells(text, "First token of one request", "Theirs") == {
        ("5", name): "3.5" if name == "baseline" else "-" for name in names
    }
    assert not any(peer in text for peer in ("Others", "Longer", "Deeper", "Wider", "Other"))


def test_peers_without_a_match_give_a_warning(run: Callable[..., Result]) -> None:
    Path("peers.csv").write_text("model,dtype,gpu,section,size,column,peer,value\ntoy,float32,,decode,77,step_s,A,1\n")
    result = run(sections="decode", batch="1", peers="peers.csv")
    assert "peers: no row matches: its rows differ in point (decode 77 there, decode 1 here)\n" in result.stderr


def test_a_step_needs_enough_iterations_of_all_requests(run: Callable[..., Result]) -> None:
    result = run(sections="decode", configs="v1", batch="3", new_tokens=21, prefill_chunk=12, repeats=2)
    assert result.exit_code == 0
    assert rows_of()["decode", "3", "v1"]["step_s"] == ""
    note = "NOT MEASURED: v1 at concurrency 3, repeats 1, 2: only 19 full-batch steps; 20 are needed"
    assert result.stdout.count("NOT MEASURED") == 1
    assert note in result.stdout


@pytest.mark.slow
def test_a_point_that_fails_is_in_the_table_and_runs_again(run: Callable[..., Result], measured: Measured) -> None:
    def fail(point: Point) -> None:
        if (point.configuration, point.concurrency) == ("v1", 3):
            raise torch.OutOfMemoryError("no room for 3\nand more lines")

    measured.before, calls = fail, measured.calls
    result = run(sections="decode", repeats=2)
    assert result.exit_code == 1
    rows = rows_of()
    broken = rows["decode", "3", "v1"]
    assert broken["failed"] == "OutOfMemoryError: no room for 3"
    assert (broken["repeats"], broken["step_s"]) == ("0", "")
    assert rows["decode", "3", "v2"]["step_s"]
    assert rows["decode", "3", "v2"]["ratio"] == ""  # nothing to compare with
    text = Path("out/summary.md").read_text()
    assert "FAILED: v1 at concurrency 3, repeat 1, and 1 other point: OutOfMemoryError: no room for 3" in text
    assert calls == [1, 1, 1, 1, 3, 3, 3]  # the second repeat would fail, too
    calls.clear()
    measured.before = lambda point: None
    assert run(sections="decode", repeats=2).exit_code == 0
    assert calls == [3, 3]  # what was measured stays
    assert rows_of()["decode", "3", "v1"]["step_s"]


def test_an_engine_that_cannot_be_built_fails_its_points_only(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loading.load_engine

    def fail(name: str, *rest: Any, **more: Any) -> Any:
        if name == "v2":
            raise torch.OutOfMemoryError("graphs")
        return load(name, *rest, **more)

    monkeypatch.setattr(loading, "load_engine", fail)
    assert run(sections="decode,verify", batch="1").exit_code == 1
    failed = {(section, name): row["failed"] for (section, _, name), row in rows_of().items()}
    assert failed["decode", "v2"] == failed["verify", "v2"] == "OutOfMemoryError: graphs"
    assert failed["decode", "v1"] == failed["verify", "v2, 16 rows"] == ""


@pytest.mark.slow
def test_an_interrupted_bench_continues(run: Callable[..., Result], measured: Measured) -> None:
    def stop(point: Point) -> None:
        if len(measured.calls) == 2:
            raise KeyboardInterrupt

    measured.before, calls = stop, measured.calls
    result = run(sections="decode,ttft", ttft_tokens="5")
    assert result.exit_code == 130
    assert "interrupted; kept 1 finished point and the tables in out" in result.stderr
    assert list(rows_of()) == [("decode", "1", "v1")]
    assert "UNFINISHED: 3 points" in Path("out/summary.md").read_text()
    result = run(sections="decode,ttft", ttft_tokens="5")
    assert result.exit_code == 0, result.output
    assert calls[2:] == [1, 3, 3, 1, 1]
    result = run(sections="decode,ttft", ttft_tokens="5")
    assert "decode: 4 of 4 points are finished\nttft-5: 2 of 2 points are finished\n" in result.stderr
    result = run(sections="decode")
    assert result.exit_code == 2
    assert "output='out': is of a bench with other sections (decode, ttft-5 there, decode now)" in result.stderr
    other = run(sections="decode,ttft", ttft_tokens="5", batch="2")
    assert other.exit_code == 2
    assert "is of a bench (decode) with another concurrency ([1, 3] there, [2] now); repeat" in other.stderr
    report = CliRunner().invoke(app, ["report", "out"])
    assert report.stdout.splitlines()[:2] == ["out/summary.md", "out/summary.csv"]
    assert run(sections="decode,ttft", ttft_tokens="5", repeats=2).exit_code == 2


def test_gemm_time_that_is_not_measured_has_a_reason(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    described = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **sizes, **heads, **experts}
    (tmp_path / "config.json").write_text(json.dumps(described))
    result = run(model=tmp_path / "config.json", sections="decode", batch="2")
    assert result.exit_code == 0, result.output
    assert "GEMMs alone: not measured, because which experts' matrices" in Path("out/summary.md").read_text()

    def fail(*_: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("no room for weights\nand more")

    monkeypatch.setattr(limits, "gemm_seconds", fail)
    result = run(sections="decode", batch="1", output="other")
    assert result.exit_code == 0
    assert all(row["step_s"] and not row["gemm_s"] for row in rows_of("other").values())
    assert result.stdout.count("GEMMs alone: not measured (OutOfMemoryError: no room for weights)") == 1


def test_shares_and_floor_follow_from_the_measured_bandwidth(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"read_bytes_s": 4.0e12, "gemm_flop_s": 7.0e14}
    monkeypatch.setattr("specbatch.sweeps.machine.limits.measure_machine", lambda device: found)
    monkeypatch.setattr(limits, "data_sheet_bandwidth", lambda gpu: 4.8e12)
    result = run(batch="1", concurrency="1", ttft_tokens="5", configs="v2")  # with the machine, as by default
    assert "* measured: read bandwidth 4.00 TB/s, bf16 GEMM 700 TFLOP/s" in result.stdout
    row = rows_of()["decode", "1", "v2"]
    floor, step, read, sheet = (float(row[key]) for key in ("floor_s", "step_s", "read_share", "sheet_share"))
    assert floor == pytest.approx(float(row["step_bytes"]) / 4.0e12)
    assert read == pytest.approx(floor / step)
    assert sheet == pytest.approx(read * 4.0 / 4.8)


def test_a_cpu_has_no_machine_section(run: Callable[..., Result]) -> None:
    result = run(sections="machine")
    assert result.exit_code == 2
    assert result.stderr == "error: --sections='machine': needs a CUDA device; leave it out\n"


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--sections", "ttft", "--ttft-tokens", "4", "--repeats", "1", "--json")
    model = ("--model", "toy", "--load-format", "dummy", "--device", "cpu")
    result = CliRunner().invoke(app, ["bench", *model, *words])
    assert [row["configuration"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": "decode,prefill"}, "sections='prefill': use some of machine, decode, closed, ttft, verify"),
        ({"sections": "decode,decode"}, "sections='decode,decode': decode is given twice"),
        ({"configs": "v3"}, "configs='v3': use some of baseline, v1, v2, v2+piecewise"),
        ({"configs": "baseline"}, "configs='baseline': nothing drafts without"),
        ({"batch": "0"}, "batch=0:"),
        ({"batch": "1,x"}, "batch='1,x':"),
        ({"new_tokens": 0}, "--new-tokens=0:"),
        ({"new_tokens": 20}, "--new-tokens=20: a step time needs 20 steps of a full batch; use at least 21"),
        ({"repeats": 0}, "repeats=0:"),
        ({"configs": "v2+piecewise", "sections": "closed"}, "graphs.prefill='piecewise': needs a CUDA device"),
        ({"decode_graph": "whole"}, "--decode-graph='whole': needs a CUDA device"),
        ({"decode_graph": "half"}, "--decode-graph='half':"),
        ({"peers": "none.csv"}, "peers='none.csv': cannot be read"),
        ({"peers": ""}, "peers='': name a CSV file"),
        ({"peers": "wrong.csv"}, "peers='wrong.csv': needs the columns model, dtype"),
        ({"output": "full"}, "this folder is not empty"),
        ({"sections": "verify", **DRAFT}, "sections='verify': it has its own drafts"),
        ({"configs": "baseline", **DRAFT}, "configs='baseline': add one that drafts"),
        ({"simulate_accept_length": 2}, "nothing is drafted; add --algorithm, or leave it out"),
        (
            {"algorithm": "dflash", "draft": "dummy", "draft_tokens": 20},
            "--draft-tokens=20: the draft's block size is 16",
        ),
        (
            {"sections": "ttft", "ttft_tokens": "5,5000"},
            "--ttft-tokens=5000: with 8 new tokens that is more than the model's 2048; lower --ttft-tokens",
        ),
        ({"sections": "ttft", "ttft_tokens": "5,8192"}, "--ttft-tokens=8192"),  # a default that the user gave
        ({"sections": "decode", "decode_tokens": 2040}, "lower --decode-tokens or --new-tokens"),
    ],
)
def test_refusals(run: Callable[..., Result], change: dict[str, Any], message: str) -> None:
    Path("full").mkdir()
    Path("full/x").touch()
    Path("wrong.csv").write_text("a,b\n1,2\n")
    result = run(**change)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("out").exists()


def test_default_lengths_that_the_model_cannot_hold_are_left_out(run: Callable[..., Result]) -> None:
    result = run(without=("--ttft-tokens",), sections="ttft,decode", batch="1", configs="v2")
    assert result.exit_code == 0, result.output
    assert {section for section, *_ in rows_of()} == {"decode", "ttft-128", "ttft-1024"}
    (line,) = (line for line in result.stderr.splitlines() if "left out" in line)
    assert line == f"left out: ttft_tokens=8192: with 8 new tokens that is more than the model's {2048}"
    assert SHAPES["toy"]["max_position_embeddings"] == 2048
