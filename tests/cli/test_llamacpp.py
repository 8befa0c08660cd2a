"""`eval`, `check` and `sweep` of a real server: llama.cpp's, with and without drafts, sound and with faults.

Needs `pip install xllamacpp` (or the extra test-servers) and `specbatch models pull smollm2-135m`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llamacpp_server import serving_llamacpp, write_changed
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.weights.known_models import KNOWN_MODELS

NAME = "smollm2-135m"
MODEL = KNOWN_MODELS[NAME].path
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
    pytest.mark.skipif(not MODEL.exists(), reason=f"{NAME} is not downloaded"),
]
SKIPPED = range(12, 16)  # layers: as a draft, "self:skip=12-15"
SHORT = ("--prompts", 4, "--max-new-tokens", 16, "--concurrency", 4)
GSM8K = ("gsm8k", "--num-fewshot", 1, "--limit", 20, "--max-new-tokens", 24, "--concurrency", 4)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_changed(MODEL, tmp_path_factory.mktemp("draft") / "draft.gguf", skip=SKIPPED)


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with serving_llamacpp(MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def drafts(draft: Path) -> Iterator[str]:
    with serving_llamacpp(MODEL, "--drafts", "model", "--draft", str(draft)) as url:
        yield url


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(command: str, *words: object, url: str | None = None, exit_code: int = 0) -> Result:
    server = () if url is None else ("--engine", "http", "--base-url", url)
    result = CliRunner().invoke(app, [command, *map(str, (*words, *server))], env={"COLUMNS": "1000"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result


def read(name: str) -> Any:
    return json.loads(Path(name).read_text())


def probed(name: str) -> dict[str, str]:
    return {probe["name"]: probe["result"] for probe in read(name)["workload"]["probes"]}


@pytest.mark.parametrize("words", [(), ("--chat-template",)], ids=["text", "chat"])
def test_scores_with_and_without_drafts(plain: str, drafts: str, words: tuple[str, ...]) -> None:
    call("eval", *GSM8K, *words, "--out", "plain", url=plain)
    call("eval", *GSM8K, *words, "--out", "drafts", url=drafts)
    texts = [[row["text"] for row in map(json.loads, Path(f"{name}/questions.jsonl").read_text().splitlines())]
             for name in ("plain", "drafts")]  # fmt: skip
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 5, "activations of 8 bits round much"
    found = read("drafts/record.json")["metrics"]
    assert 1.5 < found["accept_length"] < 4.0
    assert 0.2 < found["accept_rate"] < 0.95
    assert read("plain/record.json")["metrics"]["accept_length"] is None
    assert "Acceptance, greedy" in Path("drafts/summary.md").read_text()
    assert "exact_match" in call("compare", "plain", "drafts").stdout
    Path("gate.toml").write_text('[accuracy]\nfilter = "flexible-extract"\nunparsed_at_most = 1.0\n')
    call("gate", "drafts", "--policy", "gate.toml", "--baseline", "plain")


def test_settings(plain: str) -> None:
    result = call("check", *SHORT, "--out", "out", url=plain, exit_code=1)
    found = probed("out/record.json")
    ignored = {name for name, what in found.items() if what == "ignored"}
    assert ignored == {"min_tokens", "response_format"}, result.stdout
    assert all(found[name] == "honored" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"))
    assert all(found[name] == "honored" for name in ("stop", "max_tokens", "usage", "logprobs")), found
    assert "it shows token ids and log-probabilities" in result.stdout


def test_answers_of_the_model(plain: str, drafts: str) -> None:
    """It rounds activations to 8 bits, which the check allows for in any type."""
    call("check", *SHORT, "--probes", "none", "--weights", NAME, "--dtype", "float32", "--out", "plain", url=plain)
    judged = read("plain/record.json")["workload"]["referee"]["alone"]
    assert 0.01 < judged["error_nats"] < judged["most_error_nats"] == 0.15
    result = call(
        "check", *SHORT, "--probes", "stop,logprobs", "--weights", NAME, "--dtype", "bfloat16", "--out", "drafts",
        url=drafts, exit_code=1,
    )  # fmt: skip
    assert probed("drafts/record.json") == {"stop": "honored", "logprobs": "wrong"}
    (fault,) = read("drafts/record.json")["workload"]["faults"]
    assert "logprobs is wrong: none are sent for" in fault
    assert "THE SERVER SHOWS NO LOG-PROBABILITIES" in result.stdout


def test_drafts_that_a_request_cannot_switch_off(drafts: str) -> None:
    call("check", *SHORT, "--probes", "none", "--out", "out", url=drafts)
    assert "drafts all the same with speculative.n_max=0" in read("out/record.json")["workload"]["against"]


def test_drafts_beside_a_server_without(plain: str, drafts: str) -> None:
    """It shows no log-probabilities, so those of the other side alone judge its divergences."""
    words = ("check", *SHORT, "--probes", "none", "--baseline-url", plain, "--out", "out")
    result = CliRunner().invoke(app, [*map(str, words), "--engine", "http", "--base-url", drafts])
    found = read("out/record.json")["workload"]
    assert result.exit_code == (found["unjudged"] > 0), result.output
    assert not found["faults"]
    rows = [json.loads(line) for line in Path("out/divergences.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows} <= {"expected"}


def test_faults_of_a_server_that_shows_no_log_probabilities(plain: str, tmp_path: Path) -> None:
    """Another base of rope, with drafts: the log-probabilities of the server without drafts judge alone."""
    wrong = write_changed(MODEL, tmp_path / "theta.gguf", llama_rope_freq_base=1000.0)
    with serving_llamacpp(wrong, "--drafts", "model", "--draft", str(wrong)) as url:
        words = ("--prompts", 3, "--max-new-tokens", 10, "--probes", "none", "--baseline-url", plain, "--out", "out")
        result = call("check", *words, url=url, exit_code=1)
    assert "FAILED: " in result.stdout
    rows = [json.loads(line) for line in Path("out/divergences.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows} == {"expected"}
    assert "fault" in {row["verdict"] for row in rows}


def test_sampled_tokens(plain: str, drafts: str) -> None:
    words = ("--sampled", "--prompts", 1, "--seeds", 60, "--weights", NAME, "--dtype", "float32")
    call("check", *words, "--out", "out", url=plain)
    assert "shows no token ids" in call("check", *words, "--out", "drafts", url=drafts, exit_code=2).stderr


def test_acceptance_is_that_of_this_engine(drafts: str) -> None:
    """The same weights, draft and prompts: the accept lengths differ by rounding."""
    words = (
        "--dataset",
        "gsm8k",
        "--prompts-per-concurrency",
        2,
        "--output-len",
        32,
        "--concurrency",
        4,
        "--repeats",
        1,
    )
    call("sweep", *words, "--tokenizer", NAME, "--out", "server", url=drafts)
    own = ("--draft", "self:skip=12-15", "--draft-tokens", 3, "--dtype", "float32", "--configs", "v1")
    call("sweep", *words, "--model", NAME, *own, "--out", "ours")
    theirs, ours = (
        next(json.loads(path.read_text())["metrics"] for path in Path(name).rglob("record.json"))
        for name in ("server", "ours")
    )
    assert theirs["accept_length"] == pytest.approx(ours["accept_length"], rel=0.15)
    assert "accept" in call("acceptance", "server").stdout


def test_faults_are_found(plain: str, tmp_path: Path) -> None:
    """Another base of rope, and a chain of samplers without temperature."""
    wrong = write_changed(MODEL, tmp_path / "theta.gguf", llama_rope_freq_base=1000.0)
    with serving_llamacpp(wrong) as url:
        result = call(
            "check", *SHORT, "--probes", "none", "--baseline-url", plain, "--out", "theta", url=url, exit_code=1
        )
        assert "FAILED: " in result.stdout
        call(
            "check", *SHORT, "--probes", "none", "--weights", NAME, "--dtype", "float32", "--out", "weights",
            url=url, exit_code=1,
        )  # fmt: skip
    with serving_llamacpp(MODEL, "--samplers", "top_k;top_p;min_p") as url:
        call("check", *SHORT, "--probes", "temperature", "--out", "samplers", url=url, exit_code=1)
        assert probed("samplers/record.json") == {"temperature": "ignored"}


def test_draft_with_another_rope_is_seen_in_the_acceptance(tmp_path: Path) -> None:
    rates = {}
    for theta in (100_000.0, 100.0):  # 100,000 is the model's
        file = write_changed(MODEL, tmp_path / f"{theta:g}.gguf", llama_rope_freq_base=theta)
        with serving_llamacpp(MODEL, "--drafts", "model", "--draft", str(file)) as url:
            call("eval", *GSM8K[:-6], "--limit", 4, "--max-new-tokens", 24, "--out", f"{theta:g}", url=url)
        rates[theta] = read(f"{theta:g}/record.json")["metrics"]["accept_rate"]
    assert rates[100_000.0] == 1.0
    assert rates[100.0] < 0.8
