"""`specbatch eval --configs` with servers: a tiny model behind a server and by itself, in the same rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from called import call
from engine_server import EngineServer, serving_engine
from typer.testing import Result

from specbatch.engine.engine import Engine

LIMIT = 4
TASK = ("one_digit_sums", "--num-fewshot", 1, "--limit", LIMIT, "--max-new-tokens", 8)


def grid(*tables: str) -> str:
    Path("grid.toml").write_text("\n".join(tables))
    return "grid.toml"


def of(name: str, url: str, *more: str) -> str:
    return "\n".join([f'[{name}]\nengine = "http"\nbase-url = "{url}"', *more])


OURS = '[baseline]\nspec = "off"'


def evaluate(tiny: tuple[Path, Engine], *words: object, exit_code: int = 0) -> Result:
    ours = ("--model", tiny[0], "--device", "cpu", "--configs", "grid.toml", "--out", "out")
    return call("eval", *TASK, *ours, *words, exit_code=exit_code)


def rows() -> dict[tuple[int, str], dict[str, Any]]:
    found = json.loads(Path("out/summary.json").read_text())["rows"]
    return {(row["concurrency"], row["configuration"]): row for row in found}


def test_a_server_and_this_engine_are_paired_question_by_question(tiny: Any, server: EngineServer) -> None:
    with serving_engine(server) as url:
        grid(OURS, of("ids", url), of("text", url, 'send = "text"'))
        result = evaluate(tiny, "--concurrency", 2, "--repeats", 2)
        asked = len(server.bodies)
        assert "6 of 6 points are finished" in evaluate(tiny, "--concurrency", 2, "--repeats", 2).stderr
    assert len(server.bodies) == asked
    found = rows()
    assert [*found] == [(2, name) for name in ("baseline", "ids", "text")]
    for name in ("ids", "text"):
        row = found[2, name]
        assert (row["base"], row["same_answers"], row["lost"], row["gained"]) == ("baseline", LIMIT, 0, 0)
        assert row["repeats"] == 2
        assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert f"* ids: server (vllm 0.33.0) at {url}, prompts as ids\n" in result.stdout
    assert "of servers text for text" in result.stdout
    digests = [
        [json.loads(line)["text_digest"] for line in Path(f"out/{name}/c2/r1/requests.jsonl").read_text().splitlines()]
        for name in ("baseline", "ids", "text")
    ]
    assert digests[0] == digests[1] == digests[2]


def test_points_of_a_server_that_fails_run_again(tiny: Any, server: EngineServer) -> None:
    server.fails = lambda number: number >= LIMIT + 2  # after the warm-up and some of the first point
    with serving_engine(server) as url:
        grid(OURS, of("rival", url))
        result = evaluate(tiny, "--concurrency", 1, exit_code=1)
        assert "rival at concurrency 1: left out, " in result.stdout
        assert "requests without an answer: HTTP 503" in result.stdout
        server.fails = lambda number: False
        again = evaluate(tiny, "--concurrency", 1)
        assert "1 of 2 points are finished" in again.stderr
    assert rows()[1, "rival"]["same_answers"] == LIMIT


def test_requests_that_were_asked_again_are_noted(tiny: Any, server: EngineServer) -> None:
    server.fails = lambda number: number == LIMIT + 1
    with serving_engine(server) as url:
        grid(OURS, of("rival", url))
        result = evaluate(tiny, "--concurrency", 1)
        assert "FAILED: 1 request had to be asked again, which is in the times" in result.stdout
        evaluate(tiny, "--concurrency", 1)  # measures it again
    assert "FAILED" not in Path("out/summary.md").read_text()


def test_a_server_that_is_not_there_is_left_out(tiny: Any, server: EngineServer, no_plots: None) -> None:
    grid(OURS, of("rival", "http://127.0.0.1:9"))
    result = evaluate(tiny, "--concurrency", 1, exit_code=1)
    assert "rival: left out, " in result.stdout
    assert [*rows()] == [(1, "baseline")]
    call("report", "out")
    page = Path("out/report/report.html").read_text()
    assert "<h1>Evaluation of " in page
    assert "<h2>Scores</h2>" in page
    assert "<li>rival: base-url=&#39;http://127.0.0.1:9&#39;: no answer from" in page
    assert "UNFINISHED" not in page
    with serving_engine(server) as url:  # its address is corrected
        grid(OURS, of("rival", url))
        assert "1 of 2 points are finished" in evaluate(tiny, "--concurrency", 1).stderr
        grid(OURS, of("rival", "http://127.0.0.1:9"))
        assert "is of an evaluation with another" in evaluate(tiny, "--concurrency", 1, exit_code=2).stderr
    assert [*rows()] == [(1, "baseline"), (1, "rival")]


def test_each_of_servers_that_are_not_there_has_one_line(tiny: Any, server: EngineServer) -> None:
    grid(of("one", "http://127.0.0.1:9"), of("two", "http://127.0.0.1:19"))
    lines = evaluate(tiny, exit_code=2).stderr.splitlines()
    told = [line for line in lines if "no answer from" in line]
    assert [line.partition(": no answer")[0] for line in told] == [
        "error: grid.toml: one: base-url='http://127.0.0.1:9'",
        "grid.toml: two: base-url='http://127.0.0.1:19'",
    ]


def test_the_only_server_that_is_not_there_is_named_by_file_and_table(tiny: Any, server: EngineServer) -> None:
    grid(of("rival", "http://127.0.0.1:9"))
    (line,) = (line for line in evaluate(tiny, exit_code=2).stderr.splitlines() if line.startswith("error"))
    assert line.startswith("error: --configs='grid.toml: rival': base-url='http://127.0.0.1:9': no answer from")


def test_reasons_name_the_keys_of_a_table(tiny: Any, server: EngineServer) -> None:
    with serving_engine(server) as url:
        rival = of("rival", url, 'model = "other"')
        grid(OURS, rival, '[graphs]\nspec = "off"\ndecode-graph = "whole"', '[short]\nspec = "off"\nmax-model-len = 20')
        evaluate(tiny, "--concurrency", 1, exit_code=1)
    found = json.loads(Path("out/left_out.json").read_text())
    assert found["rival"].startswith("model='other': the server at http://127.0.0.1")
    assert found["rival"].endswith("has org/tiny; name one, such as model='org/tiny'")
    assert found["graphs"].startswith("decode-graph='whole': needs a CUDA device")
    assert found["short"].startswith("max-model-len=20: question ")
    assert "a smaller --max-new-tokens" in found["short"]


def test_errors_about_a_key_of_a_table_name_the_table(tiny: Any, server: EngineServer) -> None:
    grid(OURS, '[short]\nspec = "v2"\nmax-model-len = 20')
    (line,) = (line for line in evaluate(tiny, exit_code=2).stderr.splitlines() if line.startswith("error"))
    assert line.startswith("error: --configs='grid.toml: short': max-model-len=20: question ")
    assert "a smaller --max-new-tokens" in line
    grid(OURS, '[v2]\nspec = "v2"')
    (line,) = (
        line
        for line in evaluate(tiny, "--max-model-len", 20, exit_code=2).stderr.splitlines()
        if line.startswith("error")
    )
    assert line.startswith("error: --max-model-len=20: question ")


def test_servers_alone_get_messages_and_need_no_tokenizer(tiny: Any, server: EngineServer) -> None:
    with serving_engine(server) as url:
        grid(*(of(name, url, 'send = "chat"', 'model = "org/tiny"') for name in ("a", "b")))
        result = evaluate(tiny, "--chat-template", "--no-thinking", "--concurrency", 2)
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions"}
    assert rows()[2, "b"]["same_answers"] == LIMIT
    assert "Model: org/tiny. Data:" in result.stdout


@pytest.mark.parametrize(
    ("tables", "words", "message"),
    [
        ((OURS, 'send = "chat"'), ("--chat-template",), "renders the messages itself, and baseline would have other"),
        (("", 'send = "chat"'), (), "add --chat-template"),
        ((OURS, 'max-running = 3'), (), "is no option of a server"),
        ((OURS, 'send = "words"'), (), "use one of ids, text, chat"),
    ],
)  # fmt: skip
def test_refusals(tiny: Any, server: EngineServer, tables: Any, words: Any, message: str) -> None:
    ours, more = tables
    grid(ours, of("rival", "http://127.0.0.1:9", more))
    result = evaluate(tiny, *words, exit_code=2)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error"))
    assert message in line
    assert not Path("out").exists()


def test_cluster_cannot_measure_servers(tiny: Any, server: EngineServer, fake_ray: Any) -> None:
    grid(OURS, of("rival", "http://127.0.0.1:9"))
    result = evaluate(tiny, "--distributed", "ray", "--workers", 1, exit_code=2)
    assert "the workers of a cluster cannot measure servers; leave them out" in result.stderr
