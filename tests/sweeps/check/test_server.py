"""`specbatch check --engine http`: a clean server passes, and every fault of a faulty one is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from crossed import first_quick
from engine_server import FAULTS, IGNORING, EngineServer, serving_engine
from letters import letters_engine, write_letters
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.engine.engine import Engine
from specbatch.records.store import load_record
from specbatch.servers.engine import HttpEngine
from specbatch.servers.server import Server
from specbatch.sweeps.check.options import PROBES, CheckOptions, ServerOptions
from specbatch.sweeps.check.server import run_server
from specbatch.sweeps.check.server_report import ServerReport

PROMPTS = ("The ferry left the harbor", "To bake a loaf of bread", "Rivers shape the land", "Dear Ms. Okafor,")
TOGETHER = (*IGNORING.values(), "ignores response_format", "counts tokens twice")  # faults of different settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters") / "letters")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """With drafts."""
    with letters_engine(folder) as opened:
        yield opened


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[..., str]]:
    """`serve(*faults, engine=..., **settings of EngineServer)` gives the server's address."""
    with ExitStack() as stack:

        def start(*faults: str, engine: Engine = engine, **settings: Any) -> str:
            of_model = {"model": "letters", "kind": "test", "root": engine.config.model}
            server = EngineServer(engine, faults=frozenset(faults), **of_model, **settings)
            return stack.enter_context(serving_engine(server))

        yield start


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def check(source: Path, folder: Path, tmp_path: Path) -> Callable[..., ServerReport]:
    def run(url: str, *probes: str) -> ServerReport:
        output = tmp_path / "out"
        output.mkdir(exist_ok=True)
        server = HttpEngine(Server(url, tokenizer=str(folder)))
        options = CheckOptions(source, max_new_tokens=10)
        return run_server(server, options, ServerOptions(probes=probes), output)

    return run


@pytest.fixture
def command(source: Path, folder: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(url: str, *options: str) -> Result:
        given = ["check", str(source), "--engine", "http", "--base-url", url, "--max-new-tokens", "10"]
        given += ["--tokenizer", str(folder), "--out", str(tmp_path / "out"), *options]
        return CliRunner().invoke(app, given)

    return run


def test_clean_server(serve: Any, check: Any) -> None:
    report = check(serve(), *PROBES)
    assert (report.faults, report.fails) == ([], False), report.markdown()
    assert {probe.name: probe.result for probe in report.probes} == dict.fromkeys(PROBES, "honored")
    assert "PASSED: 8 of 8 answers are equal; 15 of 15 settings are honored." in report.markdown()


def test_clean_server_without_log_probabilities(serve: Any, check: Any) -> None:
    report = check(serve(shows=False), "temperature", "top_p", "stop", "frequency_penalty")
    assert not report.fails, report.markdown()
    assert [probe.result for probe in report.probes] == ["honored", "honored", "not tested", "honored"]
    assert "THE SERVER SHOWS NO LOG-PROBABILITIES" in report.markdown()


def test_ignored_settings(serve: Any, check: Any) -> None:
    report = check(serve(*TOGETHER), *PROBES)
    bad = {probe.name for probe in report.probes if probe.is_bad}
    assert bad == {*IGNORING, "response_format", "usage"}
    assert len(report.faults) == len(bad)


NAMED = {
    "ignores temperature": "temperature is ignored: at temperature 0 a token is",
    "repeats a token after a prefix hit": "asked again (each prompt alone, a second time), first in prompt",
    "swaps two answers": "at token 0: it is the answer to another prompt",
    "keeps a token of a stop": "stop is wrong: 1 character from the stop string on are kept",
    "loses a token before a stop": "stop is wrong: 1 character before the stop string are lost",
    "drops a token of max_tokens": "max_tokens is wrong: 8 tokens for max_tokens=9",
    "cuts streams": "failed: the stream ended before its answer did",
    "wrong log-probabilities": "logprobs is wrong: a token has another log-probability",
}


def test_every_fault_has_a_test() -> None:
    assert {*NAMED, *TOGETHER} == {*FAULTS}


@pytest.mark.parametrize("fault", first_quick(3, NAMED))
def test_fault_is_named(serve: Any, check: Any, fault: str) -> None:
    probes = [name for name in ("temperature", "stop", "max_tokens", "logprobs") if NAMED[fault].startswith(name)]
    report = check(serve(fault), *probes)
    assert report.fails
    assert any(NAMED[fault] in text for text in report.faults), report.faults
    if fault.startswith("repeats"):
        assert "a token is repeated, and the rest is as it should be" in report.faults[0]


def test_second_server_and_weights(serve: Any, command: Any, folder: Path, tmp_path: Path) -> None:
    url = serve()
    found = command(url, "--baseline-url", serve(), "--probes", "none")
    assert found.exit_code == 0, found.output
    assert "PASSED: 12 of 12 answers are equal." in found.output
    record = load_record("run", tmp_path / "out")
    assert (record.workload["command"], record.workload["faults"]) == ("check", [])
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [row["condition"] for row in rows[::4]] == ["baseline", "alone", "again", "together"]

    weights = ("--weights", str(folder), "--probes", "none", "--device", "cpu", "--out")
    found = command(url, *weights, str(tmp_path / "weights"))
    assert found.exit_code == 0, found.output
    assert "By the referee, together" in found.output
    found = command(serve(shows=False), *weights, str(tmp_path / "texts"))
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("silent", first_quick(1, ["server", "baseline"]))
def test_one_side_that_shows_log_probabilities_judges_alone(
    serve: Any, command: Any, tmp_path: Path, silent: str
) -> None:
    with letters_engine(write_letters(tmp_path / "other", 5)) as other:
        url, baseline = serve(shows=silent != "server"), serve(engine=other, shows=silent != "baseline")
        found = command(url, "--baseline-url", baseline, "--probes", "none")
        same = command(
            url,
            "--baseline-url",
            serve(shows=silent != "baseline"),
            "--probes",
            "none",
            "--out",
            str(tmp_path / "same"),
        )
    assert (found.exit_code, same.exit_code) == (1, 0), found.output + same.output
    assert "FAILED: " in found.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "divergences.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows} == {"expected" if silent == "server" else "found"}
    assert "fault" in {row["verdict"] for row in rows}
    assert "ONE SIDE SHOWS LOG-PROBABILITIES and alone judges 12" in found.output.replace("\n", " ")


@pytest.mark.parametrize("send", ["text", "chat"])
def test_prompts_as_text_and_messages(serve: Any, command: Any, folder: Path, send: str) -> None:
    found = command(serve(), "--send", send, "--weights", str(folder), "--device", "cpu", "--probes", "logprobs,stop")
    assert found.exit_code == 0, found.output
    assert "PASSED: 12 of 12 answers are equal; 2 of 2 settings are honored." in found.output


def test_other_weights_are_found(serve: Any, command: Any, tmp_path: Path) -> None:
    other = write_letters(tmp_path / "other", 5)
    found = command(serve(), "--weights", str(other), "--probes", "none", "--device", "cpu")
    assert found.exit_code == 1
    assert "below the referee's best, and rounding explains" in found.output


@pytest.mark.slow
def test_sampled(serve: Any, command: Any, folder: Path, tmp_path: Path) -> None:
    many = ("--sampled", "--seeds", "150", "--prompts", "1", "--concurrency", "32")
    assert command(serve(), *many).exit_code == 0
    found = command(serve("ignores top_k"), *many, "--out", str(tmp_path / "wrong"))
    assert found.exit_code == 1
    assert "the distribution of sampled tokens is wrong with temperature 1.5, top-k 4" in found.output
    found = command(serve(shows=False), *many, "--out", str(tmp_path / "hidden"))
    assert found.exit_code == 2
    assert "shows no log-probabilities, which --sampled needs" in found.output


def test_sampled_by_a_server_that_refuses_some_settings(serve: Any, command: Any, folder: Path, tmp_path: Path) -> None:
    few = ("--sampled", "--seeds", "60", "--prompts", "1", "--concurrency", "32")
    own = ("--weights", str(folder), "--dtype", "float32", "--device", "cpu")
    found = command(serve(refuses=("min_p", "logit_bias")), *few, *own, "--out", str(tmp_path / "some"))
    assert found.exit_code == 0, found.output
    told = " ".join(found.output.split())
    assert "Not tested: the server refuses temperature 1, min-p 0.05 (HTTP 400: min_p is not yet supported with" in told
    assert "top-p 0.95, min-p 0.02 (HTTP 400" in told
    workload = json.loads((tmp_path / "some" / "record.json").read_text())["workload"]
    assert (len(workload["tests"]), len(workload["refused"])) == (6, 2)
    found = command(serve(refuses=("temperature",)), *few, "--out", str(tmp_path / "none"))
    assert found.exit_code == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "gpt"), "error: --model='gpt': the server at"),
        (("--baseline-url", "http://127.0.0.1:9"), "no answer from /v1/models"),
        (("--probes", "temprature"), "error: --probes='temprature': use all, none, or some of temperature"),
        (("--baseline-url", "http://a", "--weights", "b"), "there is a --baseline-url as well"),
        (("--spec", "v2"), "does not apply to a server"),
    ],
)
def test_refused(serve: Any, command: Any, options: tuple[str, ...], said: str) -> None:
    found = command(serve(), *options)
    assert found.exit_code == 2
    assert said in found.output
    assert len([line for line in found.output.splitlines() if line.startswith("error")]) == 1


def test_refused_key_and_options_without_a_server(serve: Any, command: Any) -> None:
    found = command(serve(key="secret"))
    assert (found.exit_code, "HTTP 401" in found.output) == (2, True)
    found = CliRunner().invoke(app, ["check", "--weights", "toy"])
    assert (found.exit_code, "add --engine http" in found.output) == (2, True)


def test_answers_are_kept_when_the_server_stops(serve: Any, command: Any, tmp_path: Path) -> None:
    found = command(serve(fails=lambda number: number >= 7), "--probes", "none")
    assert found.exit_code == 1, found.output
    assert "requests failed: HTTP 503" in found.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert sum(bool(row["text"]) for row in rows) == 6, "the first request of all shows what the server has"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(20))
def test_clean_servers(tmp_path: Path, serve: Any, seed: int, dtype: str) -> None:
    model = write_letters(tmp_path / "model", seed)
    output = tmp_path / "out"
    output.mkdir()
    with letters_engine(model, dtype) as engine:
        server = HttpEngine(Server(serve(engine=engine), tokenizer=str(model)))
        report = run_server(server, CheckOptions(prompts=8), ServerOptions(), output)
    assert not report.fails, report.markdown()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_alone(serve: Any, check: Any, fault: str) -> None:
    report = check(serve(fault), *PROBES)
    wanted = NAMED.get(fault) or {"ignores response_format": "response_format", "counts tokens twice": "usage"}.get(
        fault, f"{fault.removeprefix('ignores ')} is ignored"
    )
    assert any(wanted in text for text in report.faults), report.faults
    if fault in TOGETHER:
        assert len(report.faults) == 1
