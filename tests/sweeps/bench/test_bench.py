"""`specbatch bench` on a toy shape: every section, its records, its table, its refusals; the bytes of a known model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from specbatch import Engine, SpecbatchError
from specbatch.cli.app import app
from specbatch.config import EngineConfig
from specbatch.models.config import ModelConfig
from specbatch.sweeps.bench import bench
from specbatch.sweeps.bench.plan import BenchOptions, Load, plan_engines
from specbatch.sweeps.bench.tables import bounds_of, load_records, table, write_table
from specbatch.sweeps.bench.traffic import hit_experts, moved_states, step_bytes, used_bytes
from specbatch.sweeps.machine.limits import data_sheet_bandwidth, gemm_seconds, measure_machine
from specbatch.weights.dummy import SHAPES

TOY = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--page-size", 4)
SMALL = {
    "--batch": "1,3", "--verify-batch": "2", "--decode-tokens": 12, "--new-tokens": "3,9", "--concurrency": "1,4",
    "--input-len": 20, "--output-len": 6, "--ttft-tokens": "5,30", "--repeats": 2, "--output": "out",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    ticks = count()  # each time span is longer than the one before: what took more tokens took more time
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(ticks) ** 2 / 1e3))

    def call(without: tuple[str, ...] = (), **changes: Any) -> Result:
        kept = {name: value for name, value in SMALL.items() if name not in without}
        words = kept | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return CliRunner().invoke(app, ["bench", *map(str, TOY), *(str(x) for pair in words.items() for x in pair)])

    return call


def rows_of(folder: str = "out") -> list[dict[str, str]]:
    return list(csv.DictReader(Path(folder, "summary.csv").read_text().splitlines()))


def test_every_section_gives_its_rows_and_records(run):
    result = run()
    assert result.exit_code == 0, result.output
    rows = rows_of()
    points = [(row["section"], row["size"], row["configuration"]) for row in rows]
    assert points == [
        ("machine", "", ""),
        *(("decode", size, name) for size in ("1", "3") for name in ("v1", "v2")),
        *(("closed", size, name) for size in ("1", "4") for name in ("v1", "v2")),
        *(("ttft", size, name) for size in ("5", "30") for name in ("v1", "v2")),
        *(("verify", "2", name) for name in ("v2", "v2, 16 rows")),
    ]
    assert {row["repeats"] for row in rows} == {"2"}
    assert not any(row["failed"] for row in rows)
    primary = {"decode": "step_ms", "closed": "output_tok_s", "ttft": "median_ttft_ms", "verify": "step_ms"}
    for row in rows[1:]:
        middle, low, high = (float(row[primary[row["section"]] + end]) for end in ("", "_min", "_max"))
        assert low <= middle <= high
        assert middle > 0
        assert row["ratio"]
        assert bool(row["over_products"]) == (row["section"] != "closed")
    assert len(list(Path("out").rglob("record.json"))) == 2 * len(rows)
    records = load_records(Path("out"))
    closed = next(r for r in records if r.workload["section"] == "closed" and r.workload["size"] == 4)
    assert closed.metrics["requests"] == 8  # the warm-up is not among them
    assert closed.metrics["output_tokens"] == 8 * 6
    alone = next(r for r in records if r.workload["section"] == "closed" and r.workload["size"] == 1)
    assert alone.metrics["requests"] == 3
    step = next(r for r in records if r.workload["section"] == "decode" and r.workload["size"] == 3)
    assert step.metrics["output_tokens"] == 3 * 9
    assert step.metrics["step_s"] == pytest.approx((step.metrics["long_s"] - step.metrics["short_s"]) / 6)
    assert all(record.metrics.get("retractions", 0) == 0 for record in records)
    text = Path("out/summary.md").read_text()
    assert text in result.stdout
    assert "NOT IN STEP" not in text  # 16-row verifies too: each gave one token
    assert "simulated accept length 1" in text
    assert "data sheet" not in text.split("##")[0]  # this is no H200
    for title in ("Decode step", "Closed loop", "First token", "Verify step"):
        assert f"## {title}" in text


def test_the_table_is_made_from_the_records(run):
    run(sections="decode,ttft", repeats=1)
    before = {name: Path("out", name).read_text() for name in ("summary.md", "summary.csv")}
    for name in before:
        Path("out", name).unlink()
    write_table(Path("out"))
    assert {name: Path("out", name).read_text() for name in before} == before


def test_repeats_are_interleaved(run):
    run(sections="decode", batch="2", repeats=2)
    paths = [path.parent for path in Path("out/decode").rglob("record.json")]
    written = sorted(paths, key=lambda path: (path / "record.json").stat().st_mtime_ns)
    assert [str(path.relative_to("out/decode")) for path in written] == ["v1/2/r1", "v2/2/r1", "v1/2/r2", "v2/2/r2"]


def test_json(run):
    result = CliRunner().invoke(
        app, ["bench", *map(str, TOY), "--sections", "ttft", "--ttft-tokens", "4", "--repeats", "1", "--json"]
    )
    assert [row["configuration"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sections": "decode,prefill"}, "sections='prefill': use some of machine, decode, closed, ttft, verify"),
        ({"sections": "decode,decode"}, "sections='decode,decode': name at least one, each once"),
        ({"configs": "v3"}, "configs='v3': use some of v1, v2, v2+piecewise"),
        ({"batch": "0"}, "batch=0:"),
        ({"batch": "1,x"}, "batch='1,x':"),
        ({"new_tokens": "9,3"}, "new_tokens='9,3': use two numbers, the smaller first"),
        ({"repeats": 0}, "repeats=0:"),
        ({"configs": "v2+piecewise", "sections": "closed"}, "prefill_graph='piecewise': needs a CUDA device"),
        ({"decode_graph": "whole"}, "decode_graph='whole': needs a CUDA device"),
        ({"decode_graph": "half"}, "graphs.decode='half':"),
        ({"peers": "none.csv"}, "peers='none.csv': cannot be read"),
        ({"peers": "wrong.csv"}, "peers='wrong.csv': needs the columns model, dtype"),
        ({"output": "full"}, "this folder is not empty"),
    ],
)
def test_refusals(run, change, said):
    Path("full").mkdir()
    Path("full/x").touch()
    Path("wrong.csv").write_text("a,b\n1,2\n")
    result = run(**({"repeats": 1} | change))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("out").exists()


def test_a_point_that_fails_is_in_the_table_and_the_others_go_on(run, monkeypatch):
    measure = bench._measure

    def fail_once(engine: Engine, load: Load) -> Any:
        if load.concurrency == 3 and engine.config.speculation.schedule == "v1":
            raise torch.OutOfMemoryError("no room for 3\nand more lines")
        return measure(engine, load)

    monkeypatch.setattr(bench, "_measure", fail_once)
    result = run(sections="decode")
    assert result.exit_code == 1
    rows = {(row["size"], row["configuration"]): row for row in rows_of()}
    broken = rows.pop(("3", "v1"))
    assert broken["failed"] == "OutOfMemoryError: no room for 3"
    assert (broken["repeats"], broken["step_ms"]) == ("0", "")
    assert all(row["step_ms"] and not row["failed"] for row in rows.values())
    assert rows["3", "v2"]["ratio"] == ""  # nothing to compare with
    assert "FAILED: decode v1 3: OutOfMemoryError: no room for 3" in Path("out/summary.md").read_text()


def test_an_engine_that_cannot_be_made_fails_its_points_only(run, monkeypatch):
    make = bench.load_engine

    def load(name: str, *rest: Any, **more: Any) -> Any:
        if name == "v2":
            raise torch.OutOfMemoryError("graphs")
        return make(name, *rest, **more)

    monkeypatch.setattr(bench, "load_engine", load)
    assert run(sections="decode,verify", batch="1", repeats=1).exit_code == 1
    failed = {(row["section"], row["configuration"]): row["failed"] for row in rows_of()}
    assert failed["decode", "v2"] == failed["verify", "v2"] == "OutOfMemoryError: graphs"
    assert failed["decode", "v1"] == failed["verify", "v2, 16 rows"] == ""


def test_an_interrupted_bench_keeps_its_points_and_their_table(run, monkeypatch):
    measure, calls = bench._measure, []

    def stop(engine: Engine, load: Load) -> Any:
        calls.append(load)
        if len(calls) == 4:  # two to warm up, one point
            raise KeyboardInterrupt
        return measure(engine, load)

    monkeypatch.setattr(bench, "_measure", stop)
    result = run(sections="decode")
    assert result.exit_code == 130
    assert "interrupted; kept 1 finished points" in result.stderr
    assert [row["configuration"] for row in rows_of()] == ["v1"]


def test_peers_are_shown_next_to_comparable_rows(run):
    head = "model,dtype,gpu,section,size,column,peer,value\n"
    peers = ["toy,float32,,decode,3,step_ms,Theirs 1.0,7.25", "other,float32,,decode,3,step_ms,Others,9.5"]
    Path("peers.csv").write_text(head + "\n".join(peers) + "\n")
    run(sections="machine,decode", repeats=1, peers="peers.csv")
    text = Path("out/summary.md").read_text()
    assert "Theirs 1.0" in text
    assert "7.25" in text
    assert "Others" not in text
    write_table(Path("out"))
    assert Path("out/summary.md").read_text() == text


def test_bytes_of_a_step_of_qwen3_8b():
    model = ModelConfig.from_dict(SHAPES["qwen3-8b"])
    hidden, mlp, layers, vocabulary, kv = 4096, 12288, 36, 151936, 8 * 128
    matrices = hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * mlp
    used = layers * (matrices + 2 * hidden + 2 * 128) + hidden + vocabulary * hidden
    assert used_bytes(model, 32, torch.bfloat16, torch.device("cpu")) == 2 * used
    kv_token = 2 * layers * kv * 2
    assert kv_token == 147456
    caps = {"dtype": "bfloat16", "kv_pages": 100, "page_size": 16, "kv_bytes": 1600 * kv_token, "verify_rows": 1}
    engine = SimpleNamespace(caps=caps, model_config=model, device=torch.device("cpu"))
    read = step_bytes(engine, BenchOptions().load("decode", 32))
    assert read["weight_bytes"] / 1e9 == pytest.approx(15.14, abs=0.005)
    assert read["mean_context"] == 672
    assert read["step_bytes"] == read["weight_bytes"] + 32 * 672 * 147456
    assert read["step_bytes"] / 4.57e9 == pytest.approx(4.00, abs=0.01)  # the floor in ms at that bandwidth


def test_a_tied_embedding_is_read_once():
    model = ModelConfig.from_dict(SHAPES["smollm2-135m"])
    assert used_bytes(model, 1, torch.bfloat16, torch.device("cpu")) == 2 * model.parameter_count()


def test_experts_that_are_hit():
    assert hit_experts(512, 10, 1) == pytest.approx(10)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(7, 40, generator=generator).topk(5).indices.unique().numel() for _ in range(3000)]
    assert hit_experts(40, 5, 7) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_bytes_of_a_step_of_qwen3_next_in_fp8():
    """Of a layer's 512 experts a token uses 10; the matrix state of 6 layers is 13 MB."""
    model = ModelConfig.from_dict(SHAPES["qwen3-next-80b-a3b-fp8"] | {"num_hidden_layers": 8})  # of 48
    hidden, layers, vocabulary = 2048, 8, 151936
    expert, cuda = 3 * 512 * hidden * (1 + 4 / 128**2), torch.device("cuda")  # on a CPU nothing stays float8
    one, many = (used_bytes(model, tokens, torch.bfloat16, cuda) for tokens in (1, 100_000))
    assert many - one == pytest.approx(layers * 502 * expert, rel=1e-9)
    delta = hidden * (12288 + 4096) * (1 + 4 / 128**2) + 2 * (64 * hidden + 8192 * 4 + 64 + 128)
    attention = 2 * hidden * (8192 + 2 * 512) + 4096 * hidden * (1 + 4 / 128**2) + 2 * 512  # q, k and v are made wide
    every = expert + 2 * (513 * hidden + 2 * hidden)  # shared expert, routers, norms
    rest = 2 * (vocabulary * hidden + hidden)
    assert one == pytest.approx(6 * delta + 2 * attention + layers * (every + 10 * expert) + rest, rel=1e-9)
    types = {"activation": torch.bfloat16, "state": torch.float32, "float32": torch.float32}
    state, window = 32 * 128 * 128 * 4, 3 * 8192 * 2
    pending = 8192 * 2 + 4 * (16 * 128 + 32 * 128 + 32)
    assert moved_states(model, 4, types) == 2 * 6 * (state + window + 4 * pending)
    caps = {"dtype": "bfloat16", "kv_pages": 1, "page_size": 16, "kv_bytes": 16, "verify_rows": 4}
    config = SimpleNamespace(state_dtype="fp32")
    engine = SimpleNamespace(caps=caps, model_config=model, device=cuda, config=config)
    read = step_bytes(engine, BenchOptions().load("verify", 8))
    assert read["weight_bytes"] == used_bytes(model, 32, torch.bfloat16, cuda)
    assert read["step_bytes"] == read["weight_bytes"] + 8 * (moved_states(model, 4, types) + read["mean_context"])


def test_gemm_time_of_a_mixture_is_not_measured_with_a_reason(run, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    described = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **sizes, **heads, **experts}
    (tmp_path / "config.json").write_text(json.dumps(described))
    result = run(model=tmp_path / "config.json", sections="decode", batch="2", repeats=1)
    assert result.exit_code == 0, result.output
    text = Path("out/summary.md").read_text()
    assert "GEMMs alone: not measured, because which experts' matrices" in text
    assert "of its 6 experts a step reads" in text
    assert "GEMMS FAILED" not in text


def test_the_caps_count_the_bytes_of_a_token():
    with Engine(EngineConfig(model="toy", load_format="dummy", device="cpu", kv_pages=30)) as engine:
        read = step_bytes(engine, Load(2, 8, (4, 8), 2))
    assert read["kv_token_bytes"] == 2 * 4 * 2 * 16 * 4  # k and v, layers, kv heads, head_dim, float32
    assert read["step_bytes"] == read["weight_bytes"] + 2 * (8 + 6) * read["kv_token_bytes"]


def test_engines_have_room_for_their_points_and_no_more():
    base = EngineConfig(model="toy", load_format="dummy", device="cpu")
    plan = plan_engines(base, BenchOptions(ttft_tokens=(1500,)))
    assert list(plan.engines) == ["v1", "v2", "v2, 16 rows"]
    verify = plan.engines["v2, 16 rows"]
    assert verify.speculation.drafted == 15
    assert {config.max_model_len for config in plan.engines.values()} == {1508}
    assert plan.engines["v1"].max_running == 128
    assert plan.engines["v1"].kv_pages == 128 * -(-(1280 + 2) // 16)
    assert (verify.max_running, verify.kv_pages) == (32, 32 * -(-(800 + 32) // 16))
    assert {tuple(point.names) for point in plan.points if point.section == "verify"} == {("v2", "v2, 16 rows")}


def test_one_long_request_always_fits():
    base = EngineConfig(model="toy", load_format="dummy", device="cpu")
    plan = plan_engines(base, BenchOptions(concurrency=(1,), batch=(1,), verify_batch=(1,), ttft_tokens=(2000,)))
    assert all(config.kv_pages * 16 >= 2008 for config in plan.engines.values())


def test_known_devices_have_a_data_sheet():
    assert data_sheet_bandwidth("NVIDIA H200") == 4.8e12
    assert data_sheet_bandwidth("NVIDIA A100-SXM4-80GB") is None
    assert data_sheet_bandwidth(None) is None


def test_shares_and_floor_follow_from_the_measured_bandwidth(run):
    run(sections="machine,decode", batch="1", repeats=1)
    records = load_records(Path("out"))
    for record in records:
        record.hardware["gpu"] = "NVIDIA H200"
    assert bounds_of(records).sheet is None  # as it was the CPU that ran
    for record in records:
        record.caps["device"] = "cuda:0"
    records[0].metrics["read_bytes_s"] = 4.0e12
    row = table(records)[1]
    assert row["floor_ms"] == pytest.approx(records[1].workload["step_bytes"] / 4.0e9)
    assert row["read_percent"] == pytest.approx(100 * row["floor_ms"] / row["step_ms"])
    assert row["sheet_percent"] == pytest.approx(row["read_percent"] * 4.0 / 4.8)


@pytest.mark.parametrize(
    ("changes", "says", "lower"),
    [
        ({"sections": "ttft", "ttft_tokens": "5,5000"}, "ttft_tokens=5000: with 8 new", "lower --ttft-tokens"),
        (
            {"sections": "decode", "decode_tokens": 2040},
            "decode_tokens=2040: with 9 new",
            "--decode-tokens or --new-tokens",
        ),
    ],
)
def test_a_size_that_the_user_made_too_long_is_refused_before_anything_is_loaded(run, changes, says, lower):
    result = run(**changes)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"error: {says} tokens that is more than the model's 2048; " in line
    assert line.endswith(lower)
    assert not Path("out").exists()


def test_default_sizes_that_the_model_cannot_hold_are_left_out(run):
    result = run(without=("--ttft-tokens",), sections="ttft,decode", batch="1", repeats=1)
    assert result.exit_code == 0, result.output
    assert {row["size"] for row in rows_of() if row["section"] == "ttft"} == {"128", "1024"}
    assert "no speculation, schedule v1; graphs: decode off, prefill off; max_running 1" in result.stdout
    (line,) = (line for line in result.stderr.splitlines() if "left out" in line)
    assert line == "left out: ttft_tokens=8192: with 8 new tokens that is more than the model's 2048"


def test_a_default_size_is_refused_where_the_user_gave_it(run):
    assert run(sections="ttft", ttft_tokens="5,8192", repeats=1).exit_code == 2


def test_defaults_that_leave_nothing_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["toy"] | {"max_position_embeddings": 64}))
    base = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu")
    with pytest.raises(SpecbatchError, match=r"nothing to measure: left out: input_len=1024: with 256 new tokens"):
        plan_engines(base, BenchOptions(sections=("closed",)))
    heard: list[str] = []
    assert plan_engines(base, BenchOptions(), heard.append).points == []  # the machine can still be measured
    assert len(heard) == 1


@pytest.mark.parametrize("changes", [{"page_size": 1024}, {"ttft_tokens": (1,)}, {"decode_tokens": 8}])
def test_a_pool_is_never_smaller_than_an_engine_takes(changes):
    base = EngineConfig(model="toy", load_format="dummy", device="cpu", page_size=changes.pop("page_size", 16))
    small = {"sections": ("ttft", "decode"), "batch": (1,), "ttft_tokens": (1,), "new_tokens": (2, 4)}
    plan = plan_engines(base, BenchOptions(**(small | {"decode_tokens": 8} | changes)))
    assert {config.kv_pages for config in plan.engines.values()} == {2}
    with Engine(plan.engines["v2"]) as engine:
        assert engine.caps["max_model_len"] == 12


def test_a_failed_gemm_time_loses_only_its_column(run, monkeypatch):
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for weights\nand more")

    monkeypatch.setattr(bench, "_add_gemm_time", fail)
    result = run(sections="decode", batch="1")
    assert result.exit_code == 0
    assert all(row["step_ms"] and row["repeats"] == "2" and not row["products_ms"] for row in rows_of())
    assert result.stdout.count("GEMMS FAILED: decode v1 1: OutOfMemoryError: no room for weights") == 1


def test_a_cpu_has_no_machine_section(run):
    result = run(sections="machine", repeats=1)
    assert result.exit_code == 0
    assert "the section machine needs a CUDA device" in result.stdout
    assert rows_of()[0]["not_measured"] == "needs a CUDA device"
    assert "read bandwidth measured here" not in run(sections="decode", batch="1", repeats=1, output="o").stdout


def test_a_cpu_has_no_numbers_of_overlap_or_graphs(run):
    run(sections="decode", batch="1", repeats=1)
    gone = ("decode_replays", "fallbacks", "padded", "late_launch_percent", "host_waits_per_step", "launch_lead_ms")
    assert all(row[column] == "" for row in rows_of() for column in gone)
    assert all(row["host_ms_per_step"] for row in rows_of())


def test_a_section_names_its_configurations(run):
    text = run(sections="decode,verify", configs="v1", batch="1", repeats=1).stdout
    assert "Configurations: v1 (from --configs" in text
    assert "Configurations: v2 and v2, 16 rows (always v2, with 1 and with 16 rows)" in text


def test_peers_without_a_match_give_a_warning(run):
    row = "toy,float32,,decode,{},step_ms,Theirs,7.25\n"
    Path("peers.csv").write_text("model,dtype,gpu,section,size,column,peer,value\n" + row.format(77))
    said = "peers: no figure matches this"
    assert said in run(sections="decode", repeats=1, peers="peers.csv").stderr
    Path("peers.csv").write_text("model,dtype,gpu,section,size,column,peer,value\n" + row.format(3))
    assert said not in run(sections="decode", repeats=1, peers="peers.csv", output="o").stderr


def test_gemm_time_covers_every_matrix(monkeypatch):
    model = ModelConfig.from_dict(SHAPES["toy"])
    calls = []
    monkeypatch.setattr("specbatch.sweeps.machine.limits.F.linear", lambda x, w: calls.append((x.shape[0], w.numel())))
    monkeypatch.setattr("specbatch.sweeps.machine.limits.median_seconds", lambda run, device, repeats: run())
    gemm_seconds(model, 5, torch.float32, torch.device("cpu"), head_rows=2)
    matrices = [shape for shape in model.tensor_shapes().values() if len(shape) == 2]
    assert sum(size for _, size in calls) == sum(a * b for a, b in matrices) - 257 * 64  # no embedding table
    assert {rows for rows, _ in calls[:-1]} == {5}
    assert calls[-1] == (2, 257 * 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_the_device_is_measured():
    found = measure_machine(torch.device("cuda"))
    assert all(value > 0 for value in found.values())
