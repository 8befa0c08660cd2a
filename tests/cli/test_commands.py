"""eval, send-one, doctor and models: what they pass on and what they print."""

from __future__ import annotations

import hashlib
import json
import types
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture
def evals(monkeypatch):
    """What `prepare` was given, and an evaluation that answers one question and may be interrupted after it."""
    from specbatch.evals import run

    seen = {"interrupt": False}

    class Report:
        def table(self):
            return "| exact_match | 0.5 |"

        def as_dict(self):
            return {"exact_match": 0.5}

    class Ready:
        def __init__(self, options):
            seen["options"] = options
            self.task = types.SimpleNamespace(generates=True)

        def engine_config(self, config):
            return config

        def run(self, engine, progress=None):
            seen["engine"] = engine.config
            progress(1, 2)
            (seen["options"].output / run.PARTIAL).write_text("{}\n")
            if seen["interrupt"]:
                raise KeyboardInterrupt
            return Report()

    monkeypatch.setattr(run, "prepare", Ready)
    return seen


def test_eval_passes_its_options_on(run, evals, tmp_path):
    words = "--limit 3 --num-fewshot 2 --data d.jsonl --concurrency 7 --seed 9 --chat-template --no-thinking --spec v1"
    result = run("eval", "gsm8k", *words.split(), "--max-new-tokens", 11, "--output", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert "| exact_match | 0.5 |" in result.stdout
    engine = evals["engine"]
    assert (engine.speculation.algorithm, engine.speculation.schedule) == ("ngram", "v1")
    assert (engine.max_running, engine.seed) == (7, 9)
    assert vars(evals["options"]) == {
        "task": "gsm8k", "limit": 3, "num_fewshot": 2, "data": Path("d.jsonl"), "fewshot_data": None,
        "chat_template": True, "max_new_tokens": 11, "concurrency": 7, "seed": 1234, "output": tmp_path / "o",
            "thinking": False,
    }  # fmt: skip


def test_eval_json(run, evals):
    result = run("eval", "gsm8k", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["exact_match"] == 0.5
    assert Path(json.loads(line)["output"]).is_dir()


def test_an_interrupted_eval_says_what_was_kept(run, evals, tmp_path):
    evals["interrupt"] = True
    result = run("eval", "gsm8k", "--output", tmp_path / "o")
    assert result.exit_code == 130
    assert f"interrupted; kept 1 finished answers in {tmp_path / 'o' / 'answers.partial.jsonl'}" in result.stderr


def test_an_eval_interrupted_before_its_first_answer_leaves_nothing(run, engine, evals, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "__enter__", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("eval", "gsm8k", "--output", tmp_path / "o").exit_code == 130
    assert not (tmp_path / "o").exists()


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
    both = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--stream", "--json")
    assert json.loads(both.stdout.splitlines()[-1])["text"] == json.loads(whole.stdout)["text"]


def test_models(run, monkeypatch, tmp_path):
    from specbatch.weights import known_models

    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(known_models, "pull", lambda name, log, _: log(f"downloading {name}") or Path("/cache") / name)
    shown = run("models", "list").stdout
    assert "Apache-2.0" in shown
    assert known_models.KNOWN_MODELS["smollm2-135m"].sha256 not in shown
    (row, *_) = json.loads(run("models", "list", "--json").stdout)["models"]
    assert (row["name"], row["sha256"]) == ("smollm2-135m", known_models.KNOWN_MODELS["smollm2-135m"].sha256)
    pulled = run("models", "pull", "smollm2-135m")
    assert pulled.stdout == "/cache/smollm2-135m\n"
    assert "downloading" in pulled.stderr


def test_doctor_gives_a_reason_for_everything(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path))
    found = json.loads(run("doctor", "--json").stdout)
    assert found["cache"] == str(tmp_path)
    assert all(row["why"] for row in found["features"])
    why = {row["feature"]: row for row in found["features"]}
    assert why["engine on the CPU"]["runs"]
    assert not why["model smollm2-135m"]["runs"]
    assert "specbatch models pull smollm2-135m" in why["model smollm2-135m"]["why"]
    assert "HF_HUB_OFFLINE" in why["models and data of the hub"]["why"]
    assert "| feature" in run("doctor").stdout


def test_a_local_copy_of_a_known_model_is_pulled(run, monkeypatch, tmp_path):
    from specbatch.weights import known_models

    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "copy.gguf").write_bytes(b"weights")
    model = known_models.KNOWN_MODELS["qwen2.5-coder-0.5b"]
    model = replace(model, size=7, sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(known_models.KNOWN_MODELS, model.name, model)
    pulled = run("models", "pull", model.name, "--from", tmp_path / "copy.gguf")
    assert pulled.stdout == f"{model.path}\n"
    assert model.path.read_bytes() == b"weights"
