"""`specbatch sweep --engine http`: the same workload, records and tables, measured on a local server."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from crossed import slow_but
from misbehaving_server import Misbehaviour, chunk, event, good_stream, head, misbehaving
from openai_server import Script, serving
from rival_servers import Rival, rival

from specbatch.servers.engine import HttpEngine

from .conftest import TINY_SWEEP, StubTokenizer


@pytest.fixture
def tokenizer(use_tokenizer):
    use_tokenizer(StubTokenizer())


@pytest.fixture
def sweep(run, tmp_path, tokenizer):
    """`sweep(script, *words)`: the result of a sweep over a server that follows the script."""

    def call(script: Script, *words: object, out: str = "out"):
        with serving(script) as url:
            return run(
                "sweep", "--repeats", 1, "--engine", "http", "--base-url", url, "--output", tmp_path / out, *words
            )

    return call


def records(folder: Path) -> dict[str, dict]:
    found = sorted(folder.glob("*/c*/r*/record.json"))
    return {str(path.parent.relative_to(folder)): json.loads(path.read_text()) for path in found}


def test_points_records_and_table(sweep, run, engine, tmp_path):
    script = Script(model="org/toy", about={"/version": '{"version": "0.33.0"}'})
    result = sweep(script, "--concurrency", "1,3", "--repeats", 2, *TINY_SWEEP)
    assert result.exit_code == 0, result.output
    found = records(tmp_path / "out")
    assert list(found) == [f"org_toy/c{c}/r{r}" for c in (1, 3) for r in (1, 2)]
    assert engine.built == [], "no engine was built"
    table = list(csv.DictReader((tmp_path / "out/summary.csv").open()))
    assert [(row["concurrency"], row["configuration"], row["repeats"]) for row in table] == [
        ("1", "org/toy", "2"),
        ("3", "org/toy", "2"),
    ]
    assert all(float(row["output_throughput"]) > 0 and row["accept_length"] == row["ratio"] == "" for row in table)
    summary = (tmp_path / "out/summary.md").read_text()
    assert "| org/toy" in summary
    assert "server (0.33.0) at http://127.0.0.1:" in summary
    assert "emptied by /flush_cache" in summary
    assert "versions: server 0.33.0; client with " in summary
    assert "device: http://127.0.0.1:" in summary
    assert "unknown; client on" in summary
    assert summary.count("No accept length: the server has no /metrics") == 1
    assert "(org/toy at concurrency 1, repeat 1, and 3 other points)." in summary
    assert "CHECK OUTPUTS" not in summary
    # warm-up, then both repeats of 4 and of 6 prompts, each after the cache was emptied
    assert script.emptied == [1, 5, 12, 18]
    assert [body["max_tokens"] for body in script.bodies] == [5] * 24
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in script.bodies)

    run("sweep", "--concurrency", "1,3", "--configs", "baseline", "--output", tmp_path / "ours", *TINY_SWEEP)
    ours = records(tmp_path / "ours")
    for place in ("c1/r1", "c3/r1"):
        assert (
            found[f"org_toy/{place}"]["workload"]["prompts_sha256"]
            == ours[f"baseline/{place}"]["workload"]["prompts_sha256"]
        )
    sent = [body["prompt"] for body in script.bodies[1:5]]
    assert len({tuple(prompt) for prompt in sent}) == 4
    assert all(len(prompt) == 6 for prompt in sent)


def test_text_with_a_request_rate_and_suspicious_outputs(sweep, jsonl, tmp_path):
    source = jsonl({"question": "6 x 7?"}, {"question": "4?"})
    script = Script(extra_prompt_tokens=1)
    words = ("--dataset", source, "--chat-template", "--request-rate", 200, "--concurrency", 2, *TINY_SWEEP[2:])
    result = sweep(script, *words)
    assert result.exit_code == 0, result.output
    assert bytes(script.bodies[-1]["prompt"]).decode() in ("<user>6 x 7?<assistant>", "<user>4?<assistant>")
    assert not script.bodies[-1]["ignore_eos"]
    work = records(tmp_path / "out")["org_toy/c2/r1"]["workload"]
    assert (work["chat_template"], work["rendered"], work["request_rate"], work["thinking"]) == (True, True, 200, None)
    for warning in (
        "all answers were cut off at 5 tokens: use a larger --output-len, or",
        "input tokens were counted where",
    ):
        assert any(warning in line for line in work["warnings"])
        assert warning in result.stderr
        assert f"CHECK OUTPUTS: {work['warnings'][0]} (org/toy at concurrency 2, repeat 1)." in result.stdout


@pytest.mark.parametrize("sampling", [{"reasoning": ["<think>"]}, {"bad_words": ["x"]}, {"logit_bias": {"3": 1}}])
def test_rows_that_cannot_be_sent_are_refused_with_their_line(sweep, jsonl, tmp_path, sampling):
    script = Script()
    path = jsonl({"prompt": "a"}, {"prompt": "b", "sampling": sampling})
    result = sweep(script, "--dataset", path, "--concurrency", 1, "--output-len", 4)
    assert result.exit_code == 2
    works = f"sampling: {next(iter(sampling))} is not sent to a server; leave it out"
    assert result.stderr.endswith(f"error: --dataset='{path}:2': {works}\n")
    assert not script.bodies
    assert not (tmp_path / "out").exists()


def test_messages_are_sent_to_the_chat_endpoint(run, jsonl, tmp_path, tokenizer):
    words = ("--concurrency", 1, "--repeats", 1, *TINY_SWEEP[2:], "--dataset", jsonl({"question": "6 x 7?"}))
    with rival(server := Rival("vllm", template_tokens=20)) as url:
        send = ("sweep", "--engine", "http", "--base-url", url, "--send", "chat", *words)
        result = run(*send, "--chat-template", "--output", tmp_path / "out")
        refused = run(*send, "--output", tmp_path / "other")
    assert result.exit_code == 0, result.output
    path, body = server.bodies[-1]
    assert (path, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "6 x 7?"}])
    assert (refused.exit_code, "needs prompts that are messages" in refused.stderr) == (2, True)


def test_failed_requests_are_in_the_table_and_exit_with_1(sweep, tmp_path):
    script = Script(fails=lambda number: {"status": 500, "message": "boom"} if number in (2, 3) else None)
    result = sweep(script, "--concurrency", 1, "--slo", "ttft=60,tpot=60", *TINY_SWEEP)
    assert result.exit_code == 1
    assert "FAILED: org/toy at concurrency 1, repeat 1: 2 requests: HTTP 500: boom." in result.stdout
    assert "INCOMPLETE: org/toy at concurrency 1, repeat 1: 2 of 4 prompts finished." in result.stdout
    (record,) = records(tmp_path / "out").values()
    assert record["counters"]["errors"] == {"HTTP 500: boom": 2}
    assert record["metrics"]["slo_share"] == 0.5
    assert record["metrics"]["goodput"] == 2 / record["metrics"]["duration_s"]


@pytest.mark.parametrize("first", [5, 7])
def test_same_command_continues_after_a_server_failed(run, tmp_path, tokenizer, first):
    """Repeat 2 fails as a whole, or from its third request on."""
    script = Script(fails=lambda number: {"status": 502, "message": "gone"} if first <= number < 9 else None)
    with serving(script) as url:
        words = ("sweep", "--engine", "http", "--base-url", url, "--concurrency", "1", "--repeats", 3, *TINY_SWEEP)
        result = run(*words, "--output", tmp_path / "out")
        assert result.exit_code == 1, result.output
        error = "every request failed: HTTP 502: gone (4)" if first == 5 else None
        found = records(tmp_path / "out")
        failed = [record["workload"].get("error") for record in found.values()]
        assert failed == [None, error, None]
        if error:
            assert f"failed: org/toy at concurrency 1, repeat 2: {error}" in result.stderr
        assert (error or "2 requests: HTTP 502: gone.") in (tmp_path / "out/summary.md").read_text()
        again = run(*words, "--output", tmp_path / "out")
        assert again.exit_code == 0, again.output
    assert list(records(tmp_path / "out")) == [f"org_toy/c1/r{repeat}" for repeat in (1, 2, 3)]
    assert len(script.bodies) == 1 + 4 + 4 + 1 + 4 + 4


def test_other_points_run_after_one_failed(sweep, tmp_path):
    script = Script(fails=lambda number: {"status": 502, "message": "gone"} if number < 5 else None)
    result = sweep(script, "--concurrency", "1,2", *TINY_SWEEP)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    first, second = records(tmp_path / "out").values()
    assert first["workload"]["error"] == "every request failed: HTTP 502: gone (4)"
    assert second["metrics"]["requests"] == 4
    assert "| org/toy" in (tmp_path / "out/summary.md").read_text()


MISFITS = {
    "no completions": [head(), event({})],
    "a list": [head(), event([]), event(b"[DONE]")],
    "other choices": [head(), event({"choices": "x"})],
    "a number as text": [head(), event({"choices": [{"text": 5}]})],
    "another count": [head(), event(chunk(tokens=10**9))],
    "JSON": [head("200 OK", "application/json"), b'{"choices": [{"text": "x"}]}'],
    "422": [head("422 No", "application/json"), b'{"detail": [{"loc": ["body"], "msg": null}]}'],
    "nothing": [],
}


@pytest.mark.parametrize("name", slow_but(["no completions", "422"], MISFITS))
def test_other_points_run_after_answers_that_do_not_fit(run, tmp_path, tokenizer, name):
    """Warm-up and first point get answers of another schema."""
    script = Misbehaviour()
    good, useless = [head(), *good_stream(5)], 10 if name == "nothing" else 5  # without a byte it is sent twice
    script.steps = lambda path, usual=script.steps: usual(path) if path != "/v1/completions" else answer()

    def answer():
        script.requests += 1
        return MISFITS[name] if script.requests <= useless else good

    with misbehaving(script) as url:
        words = ("sweep", "--engine", "http", "--base-url", url, "--output", tmp_path / "out", "--concurrency", "1,2")
        words += ("--repeats", 1)
        result = run(*words, "--input-len", 3, *TINY_SWEEP[2:])
    assert result.exit_code == 1, result.output
    first, second = records(tmp_path / "out").values()
    assert first["workload"]["error"].startswith("every request failed: ")
    assert "None" not in first["workload"]["error"]
    assert (second["metrics"]["requests"], second["workload"].get("error")) == (4, None)


def test_unforeseen_error_fails_its_request_only(sweep, tmp_path, monkeypatch):
    left = iter(range(5))

    async def fails(self, *arguments):
        if next(left, None) is not None:
            raise KeyError("unforeseen\nof several lines")
        await ask(self, *arguments)

    ask = HttpEngine._ask
    monkeypatch.setattr(HttpEngine, "_ask", fails)
    result = sweep(Script(model="org/toy"), "--concurrency", "1,3", *TINY_SWEEP)
    assert result.exit_code == 1, result.output
    first, second = records(tmp_path / "out").values()
    assert first["workload"]["error"] == "every request failed: KeyError: 'unforeseen\\nof several lines' (4)"
    assert second["metrics"]["requests"] == 6


def test_server_that_fails_every_request_ends_with_status_1(sweep, run, tmp_path):
    script = Script(fails=lambda number: {"status": 500, "message": "no GPU"})
    result = sweep(script, "--concurrency", "1,2", "--json", *TINY_SWEEP)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert [row["failed"] for row in json.loads(result.stdout)["rows"]] == [
        "every request failed: HTTP 500: no GPU (4)"
    ] * 2
    for command in ("report", "compare"):
        folders = [tmp_path / "out"] * (2 if command == "compare" else 1)
        assert run(command, *folders).exit_code in (0, 2)
    other = sweep(Script(model="org/right"), "--concurrency", "1,2", *TINY_SWEEP)
    assert other.exit_code == 0, other.output
    assert [*records(tmp_path / "out")] == ["org_right/c1/r1", "org_right/c2/r1"]


GRID = """
[ours]
spec = "off"

[sglang]
engine = "http"
base-url = "{sglang}"
algorithm = "eagle3"
draft = "org/head"
draft-tokens = 3

[vllm]
engine = "http"
base-url = "{vllm}"
"""


def test_servers_and_engines_in_the_same_rounds(run, tmp_path, no_plots):
    """One table over this engine and two servers, whose prompts are made with this engine's tokenizer."""
    with rival(Rival("sglang", ((3, 2), (3, 0)))) as sglang, rival(Rival("vllm")) as vllm:
        (tmp_path / "grid.toml").write_text(GRID.format(sglang=sglang, vllm=vllm))
        words = ("--configs", tmp_path / "grid.toml", "--concurrency", "1,2", "--repeats", 2, *TINY_SWEEP)
        result = run("sweep", *words, "--output", tmp_path / "out", "--device", "cpu")
        assert result.exit_code == 0, result.output
        again = run("sweep", *words, "--output", tmp_path / "out", "--device", "cpu")
    assert "12 of 12 points are finished" in again.stderr
    found = records(tmp_path / "out")
    assert list(found) == [f"{name}/c{c}/r{r}" for name in ("ours", "sglang", "vllm") for c in (1, 2) for r in (1, 2)]
    of_round = [found[f"{name}/c2/r2"] for name in ("ours", "sglang", "vllm")]
    assert len({record["workload"]["prompts_sha256"] for record in of_round}) == 1
    assert len({record["config"]["model"] for record in of_round}) == 1, "records of servers name the sweep's model"
    assert [record["config"].get("served_model") for record in of_round] == [None, "org/toy", "org/toy"]
    assert of_round[1]["config"]["speculation"]["algorithm"] == "eagle3"
    table = list(csv.DictReader((tmp_path / "out/summary.csv").open()))
    assert [row["configuration"] for row in table] == ["ours", "sglang", "vllm"] * 2
    assert all(float(row["ratio"]) > 0 for row in table)
    assert {float(row["accept_length"]) for row in table if row["configuration"] == "sglang"} == {2.0}
    summary = (tmp_path / "out/summary.md").read_text()
    assert "device: cpu (" in summary
    assert "prompts as ids; eagle3 org/head, 3 drafted" in summary
    assert "Acceptance by the servers' own counts" in summary
    assert "TOKENS DIFFER: configurations generated other answers than ours to the same greedy prompts" in summary
    assert not any(text in summary for text in ("NO DRAFTS", "SPECULATES", "No accept length", "FP8 activations"))
    assert run("report", tmp_path / "out").exit_code == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "<caption>Acceptance by the servers&#39; own counts</caption>" in page
    assert "<h1>Sweep of " in page
    assert "<h2>Scores</h2>" not in page
    both = run("compare", tmp_path / "out/ours", tmp_path / "out/vllm")
    assert both.exit_code == 0, both.output


def test_cluster_cannot_measure_servers(run, tmp_path, fake_ray):
    (tmp_path / "grid.toml").write_text(GRID.format(sglang="http://127.0.0.1:9", vllm="http://h:1"))
    on_ray = ("--distributed", "ray", "--workers", 1, "--device", "cpu")
    result = run("sweep", "--configs", tmp_path / "grid.toml", *on_ray, "--output", tmp_path / "out", *TINY_SWEEP)
    assert result.exit_code == 2
    assert "the workers of a cluster cannot measure servers; leave them out, or run without" in result.stderr


def test_server_that_is_down_fails_its_points_only(run, tmp_path):
    with rival(Rival("vllm")) as vllm:
        (tmp_path / "grid.toml").write_text(GRID.format(sglang="http://127.0.0.1:9", vllm=vllm))
        words = ("--configs", tmp_path / "grid.toml", "--concurrency", 1, "--output", tmp_path / "out", *TINY_SWEEP)
        result = run("sweep", *words, "--device", "cpu")
    assert result.exit_code == 1
    errors = {place: record["workload"].get("error") for place, record in records(tmp_path / "out").items()}
    assert errors["ours/c1/r1"] is errors["vllm/c1/r1"] is None
    assert "is the server up?" in errors["sglang/c1/r1"]
    with rival(Rival("sglang")) as sglang:  # its address is corrected
        (tmp_path / "grid.toml").write_text(GRID.format(sglang=sglang, vllm=vllm))
        again = run("sweep", *words, "--device", "cpu")
    assert again.exit_code == 0, again.output
    assert {record["workload"].get("error") for record in records(tmp_path / "out").values()} == {None}
    assert sglang in (tmp_path / "out/sweep.json").read_text()
    (tmp_path / "grid.toml").write_text(GRID.format(sglang="http://127.0.0.1:9", vllm=vllm))
    other = run("sweep", *words, "--device", "cpu")
    assert (other.exit_code, "is of a sweep with another" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('engine = "https"', 'engine="https": use one of specbatch, http'),
        ('engine = "http"', "base-url='': give the server's address"),
        ('base-url = "http://h:1"', 'base-url: applies to servers only; add engine = "http"'),
        ('engine = "http"\nbase-url = "http://h:1"\npage-size = 8', "page-size: is no option of a server"),
        ('engine = "http"\nbase-url = 8', "base-url=8: this is not a value of that option"),
    ],
)
def test_tables_of_servers_that_are_refused(run, tmp_path, table, message):
    (tmp_path / "grid.toml").write_text(f"[server]\n{table}\n")
    result = run("sweep", "--configs", tmp_path / "grid.toml", "--output", tmp_path / "out", *TINY_SWEEP)
    assert result.exit_code == 2
    assert message.replace("'", "") in " ".join(result.stderr.split()).replace("'", "")
