"""`specbatch train-draft`: whole runs on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.files.atomic_file import is_leftover
from specbatch.training import files

TOY = ("--model", "toy", "--load-format", "dummy", "--device", "cpu")
TRAINED = ("--steps", "4", "--max-len", "48", "--batch-tokens", "100", "--held-out", "2")
SMALL = (*TRAINED, "--max-new-tokens", "12")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cde", "fg", "hij", "klm", "no")))
    return path


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["train-draft", *map(str, words), *TOY])


def test_heads_from_prompts_and_from_answers(source, tmp_path):
    out = tmp_path / "head"
    result = call("--algorithm", "eagle3", "--data", source, "--out", out, "--unroll", 2, *SMALL)
    assert result.exit_code == 0, result.output
    assert "draft 2 (%)" in result.stdout
    assert "held out" in result.stderr
    names = ["answers.jsonl", "config.json", "model.safetensors", "record.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float32

    beside = tmp_path / "b"
    again = call("--algorithm", "dflash", "--answers", out / "answers.jsonl", "--out", beside, *TRAINED, "--json",
                 "--dtype", "bfloat16")  # fmt: skip
    assert again.exit_code == 0, again.output
    record = json.loads(again.stdout)
    assert record["recipe"]["block_size"] == 8
    first = json.loads((out / "record.json").read_text())
    assert record["data"]["answers_sha256"] == first["data"]["answers_sha256"]
    assert first["data"]["prompts"] == 6
    tensors = load_file(beside / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert json.loads((beside / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_layers_that_a_head_reads(source, tmp_path):
    out = tmp_path / "head"
    words = ("--algorithm", "eagle3", "--data", source, "--out", out, "--unroll", 1, *SMALL)
    refused = {
        "1,x": "--aux-layers='1,x': write layers with commas",
        "2,1": "--aux-layers=2,1: give a tuple of layers, ascending",
        "1,99": "--aux-layers=1,99: toy has ",
    }
    for layers, message in refused.items():
        result = call(*words, "--aux-layers", layers)
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith(f"error: {message}")
        for path in out.iterdir() if out.exists() else ():
            path.unlink()
    result = call(*words, "--aux-layers", "1,2")
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    hidden, columns = load_file(out / "model.safetensors")["fc.weight"].shape
    assert columns == 2 * hidden


def test_training_continues_after_a_crash_while_writing(source, tmp_path, monkeypatch):
    out, seen = tmp_path / "head", []
    command = ("--algorithm", "eagle3", "--data", source, "--out", out, *SMALL)
    write = files.write_json
    monkeypatch.setattr(files, "write_json", lambda *what: (seen.extend(out.iterdir()), write(*what)))
    assert call(*command).exit_code == 0
    stage, answers = sorted(seen)
    assert (is_leftover(stage), answers.name) == (True, "answers.jsonl")
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "record.json"}
    stage.mkdir()
    for name in ("config.json", "record.json"):  # only the weights were moved before the crash
        (out / name).rename(stage / name)
    again = call(*command)
    assert again.exit_code == 0, again.output
    assert "answers: 6 of 6 are finished" in again.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "record.json"} == whole


def test_non_finite_loss_is_reported_and_keeps_the_answers(source, tmp_path, monkeypatch):
    from specbatch.training import trainer

    command = ("--algorithm", "eagle3", "--data", source, "--out", tmp_path / "head", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "rate", lambda step, steps: float("nan"))
        result = call(*command)
    assert result.exit_code == 2
    assert "the loss is not finite after" in result.stderr
    again = call(*command)
    assert again.exit_code == 0, again.output
    assert "answers: 6 of 6 are finished" in again.stderr
    assert "this folder is not empty" in call(*command).stderr


def test_questions_asked_as_a_task_does(tmp_path):
    data, out = tmp_path / "train.jsonl", tmp_path / "head"
    rows = ({"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(7))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("--algorithm", "eagle3", "--task", "gsm8k", "--data", data, "--out", out, "--unroll", 1, *SMALL)
    result = call(*command, "--num-fewshot", 0)
    assert result.exit_code == 0, result.output
    described = json.loads((out / "record.json").read_text())["data"]
    assert described["asked"] == {"task": "gsm8k", "num_fewshot": 0}
    assert described["answered"]["sampling"]["stop"][0] == "Question:"
    row = json.loads((out / "answers.jsonl").read_text().splitlines()[1])
    assert bytes(row["prompt_token_ids"]).decode() == f"Question: What is {row['index']} + 1?\nAnswer:"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-fewshot", 2], "--num-fewshot=2: goes with --task"),
        (["--task", "gsm8k"], "task='gsm8k': asks the questions of --data=FILE"),
    ],
)
def test_a_task_without_its_questions_is_refused(words, message):
    result = call("--algorithm", "eagle3", *words)
    assert result.exit_code == 2
    assert message in result.stderr
