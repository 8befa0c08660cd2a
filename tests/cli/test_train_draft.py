"""`specbatch train-draft`: errors before anything is loaded, and whole runs on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.training import files

TOY = ("--model", "toy", "--load-format", "dummy", "--device", "cpu")
TRAINED = ("--steps", "4", "--max-len", "48", "--batch-tokens", "100", "--held-out", "2")
SMALL = (*TRAINED, "--max-new-tokens", "12")
REFUSED = [
    ("--algorithm magic --data {in}", "algorithm='magic': heads that can be trained are eagle3, mtp, dflash"),
    ("--algorithm eagle3", "data=None: give either --data (prompts) or --answers"),
    ("--algorithm eagle3 --data {in} --answers {in}", "give either --data (prompts) or --answers"),
    ("--algorithm eagle3 --data {tmp}/none.jsonl", "No such file"),
    ("--algorithm eagle3 --answers {in}", "in.jsonl:1': a row has prompt_token_ids and token_ids below"),
    (
        "--algorithm eagle3 --data {in} --block-size 8",
        "block_size=8: algorithm 'eagle3' has no such setting; it belongs",
    ),
    ("--algorithm dflash --data {in} --vocab 8", "it belongs to eagle3"),
    ("--algorithm dflash --data {in} --unroll 2", "it belongs to eagle3, mtp"),
    ("--algorithm dflash --data {in} --block-size 1", "block_size=1: use 2 to 64"),
    ("--algorithm dflash --data {in} --draft-layers 0", "draft_layers=0: use 1 to 64"),
    ("--algorithm eagle3 --data {in} --unroll 17", "unroll=17: use 1 to 16"),
    ("--algorithm eagle3 --data {in} --vocab 0", "vocab=0:"),
    ("--algorithm eagle3 --data {in} --vocab 100000", "vocab=100000: the target has"),
    ("--algorithm eagle3 --data {in} --steps 0", "steps=0:"),
    ("--algorithm eagle3 --data {in} --lr 0", "lr=0.0: use a number above 0"),
    ("--algorithm eagle3 --data {in} --lr 3", "lr=3.0:"),
    ("--algorithm eagle3 --data {in} --limit 0", "limit=0:"),
    ("--algorithm eagle3 --answers {in} --max-new-tokens 3", "no prompts are answered in this run; leave out"),
    ("--algorithm eagle3 --data {in} --temperature -1", "temperature=-1.0:"),
    ("--algorithm eagle3 --data {in} --batch-tokens 100", "batch_tokens=100: use at least max_len=1024"),
    ("--algorithm eagle3 --data {in} --max-len 9000000 --batch-tokens 9000000", "positions; use at most that"),
    ("--algorithm eagle3 --data {in} --dtype float16", "dtype='float16': small gradients underflow"),
    ("--algorithm mtp --data {in}", "its head is stored with the target's files, and toy has none"),
    ("--algorithm eagle3 --data {in} --out {tmp}", "this folder is not empty"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cde", "fg", "hij", "klm", "no")))
    return path


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["train-draft", *map(str, words), *TOY])


@pytest.mark.parametrize(("command", "says"), REFUSED, ids=[row[0] for row in REFUSED])
def test_errors_are_one_line(source, tmp_path, monkeypatch, command, says):
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{in}", str(source)).replace("{tmp}", str(tmp_path)) for word in command.split()]
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_head_from_prompts_and_another_from_its_answers(source, tmp_path):
    out = tmp_path / "head"
    result = call("--algorithm", "eagle3", "--data", source, "--out", out, "--unroll", 2, *SMALL)
    assert result.exit_code == 0, result.output
    assert "draft 2 (%)" in result.stdout
    assert "held out" in result.stderr
    names = ["answers.jsonl", "config.json", "model.safetensors", "record.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float32

    beside = tmp_path / "b"
    again = call("--algorithm", "dflash", "--answers", out / "answers.jsonl", "--out", beside, *TRAINED, "--json")
    assert again.exit_code == 0, again.output
    record = json.loads(again.stdout)
    assert record["recipe"]["block_size"] == 8
    first = json.loads((out / "record.json").read_text())
    assert record["data"]["answers_sha256"] == first["data"]["answers_sha256"]
    assert first["data"]["prompts"] == 6


def test_weights_are_stored_in_the_type_that_they_run_in(source, tmp_path):
    out = tmp_path / "head"
    result = call("--algorithm", "eagle3", "--data", source, "--out", out, "--dtype", "bfloat16", *SMALL)
    assert result.exit_code == 0, result.output
    tensors = load_file(out / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_training_continues_after_a_crash_while_writing(source, tmp_path, monkeypatch):
    out, seen = tmp_path / "head", []
    command = ("--algorithm", "eagle3", "--data", source, "--out", out, *SMALL)
    write = files.write_atomic
    monkeypatch.setattr(files, "write_atomic", lambda *what: (seen.extend(out.iterdir()), write(*what)))
    assert call(*command).exit_code == 0
    assert sorted(path.name for path in seen) == [".unfinished", "answers.jsonl"]
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "record.json"}
    (out / ".unfinished").mkdir()
    for name in ("config.json", "record.json"):  # as it is where the weights alone have been moved
        (out / name).rename(out / ".unfinished" / name)
    again = call(*command)
    assert again.exit_code == 0, again.output
    assert "answers: 6 of 6 are finished" in again.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "record.json"} == whole


def test_a_learning_rate_that_is_too_high_is_reported_and_loses_no_answers(source, tmp_path, monkeypatch):
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
