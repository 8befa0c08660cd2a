"""eval, send-one, doctor and models: what they pass on and what they print."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest


@pytest.fixture
def evals(monkeypatch):
    """The eval module's agreed surface."""
    from dataclasses import dataclass, fields

    seen = {}

    @dataclass
    class EvalOptions:
        task: str
        limit: int | None
        num_fewshot: int | None
        data: Path | None
        fewshot_data: Path | None
        chat_template: bool
        max_new_tokens: int | None
        concurrency: int | None
        seed: int
        output: Path | None

    class Report:
        def table(self):
            return "| exact_match | 0.5 |"

        def as_dict(self):
            return {"exact_match": 0.5}

        def save(self, folder):
            (folder / "record.json").write_text("{}")

    def run_eval(engine, options, progress=None):
        seen.update(
            {item.name: getattr(options, item.name) for item in fields(options)}, engine=engine.config
        )
        progress(1, 1)
        return Report()

    module = types.ModuleType("specbatch.evals.run")
    module.EvalOptions, module.run_eval = EvalOptions, run_eval
    monkeypatch.setitem(sys.modules, "specbatch.evals.run", module)
    return seen


@pytest.fixture
def bundled(monkeypatch):
    module = types.ModuleType("specbatch.weights.bundled")
    module.rows = lambda: [{"name": "tiny", "licence": "Apache-2.0", "here": "no", "sha256": "0" * 64}]

    def pull(name, log=None):
        log(f"downloading {name}")
        return Path("/cache") / name

    module.pull = pull
    monkeypatch.setitem(sys.modules, "specbatch.weights.bundled", module)
    cache = types.ModuleType("specbatch.weights.cache")
    cache.cache_folder = lambda: Path("/cache")
    monkeypatch.setitem(sys.modules, "specbatch.weights.cache", cache)
    import specbatch.weights

    monkeypatch.setattr(specbatch.weights, "bundled", module, raising=False)


def test_eval_passes_its_options_on(run, evals, tmp_path):
    words = "--limit 3 --num-fewshot 2 --data d.jsonl --concurrency 7 --seed 9 --chat-template --spec v1"
    result = run("eval", "gsm8k", *words.split(), "--max-new-tokens", 11, "--output", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert "| exact_match | 0.5 |" in result.stdout
    assert (tmp_path / "o/record.json").exists()
    engine = evals.pop("engine")
    assert (engine.speculation.algorithm, engine.speculation.schedule) == ("ngram", "v1")
    assert (engine.max_running, engine.seed) == (7, 9)
    assert evals == {
        "task": "gsm8k", "limit": 3, "num_fewshot": 2, "data": Path("d.jsonl"), "fewshot_data": None,
        "chat_template": True, "max_new_tokens": 11, "concurrency": 7, "seed": 9, "output": tmp_path / "o",
    }  # fmt: skip


def test_eval_json(run, evals):
    result = run("eval", "gsm8k", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["exact_match"] == 0.5
    assert Path(json.loads(line)["output"]).is_dir()


def test_send_one_table(run, engine):
    result = run("send-one", "--max-new-tokens", 5, "--spec", "v2", "--prompt", "abc")
    lines = result.stdout.splitlines()
    assert lines[0] == "defgh"
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "Latency (s)", "Tokens", "Acc Length", "Speed (token/s)",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == ["0.500", "5", "2.000", "10.00"]
    assert engine.built[0].max_running == 1
    assert not engine.built[0].prefix_cache


def test_send_one_streams_the_same_text(run):
    result = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--stream")
    whole = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--json")
    assert result.stdout.split("\n\n|")[0].strip("\n") == json.loads(whole.stdout)["text"].strip("\n")
    assert json.loads(whole.stdout)["accept_length"] == 1.0


def test_models(run, bundled):
    assert "Apache-2.0" in run("models", "list").stdout
    assert json.loads(run("models", "list", "--json").stdout)["models"][0]["name"] == "tiny"
    assert run("models", "pull", "tiny").stdout == "/cache/tiny\n"


def test_doctor_gives_a_reason_for_everything(run, bundled, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = json.loads(run("doctor", "--json").stdout)
    assert all(row["why"] for row in found["features"])
    why = {row["feature"]: row for row in found["features"]}
    assert why["engine on the CPU"]["runs"]
    assert "specbatch models pull tiny" in why["bundled model tiny"]["why"]
    assert "HF_HUB_OFFLINE" in why["models and data of the hub"]["why"]
    assert "| feature" in run("doctor").stdout
