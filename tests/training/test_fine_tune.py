"""The script that fine-tunes a target writes checkpoints of it that load like the original."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from letters import letters_engine, write_letters
from safetensors.torch import load_file

from specbatch.core.sampling_params import SamplingParams

SCRIPT = Path(__file__).parents[2] / "docs/grids/fine_tune.py"


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("adapters", [[], ["--lora", "4"]], ids=["all-weights", "lora"])
def test_checkpoints_move_away_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: list[str]
) -> None:
    model, out = write_letters(tmp_path / "model"), tmp_path / "out"
    described = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}  # as transformers 5 writes it
    (model / "config.json").write_text(json.dumps(described))
    words = ["--steps", "0,2,20", "--lr", "3e-3", "--batch", "2", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(model), *words, *adapters])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 20]
    assert 0 == lines[0]["moved"] < lines[1]["moved"] < lines[2]["moved"]
    assert lines[2]["loss"] < lines[1]["loss"]
    first, last = (load_file(out / f"step-{step}/model.safetensors") for step in (0, 20))
    assert {name: weight.tolist() for name, weight in first.items()} == {
        name: weight.bfloat16().tolist() for name, weight in load_file(model / "model.safetensors").items()
    }
    assert {weight.dtype for weight in last.values()} == {torch.bfloat16}
    assert first.keys() == last.keys()
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert any("q_proj" in name for name in moved)
    assert any("norm" in name or "embed" in name for name in moved) == (not adapters)
    with letters_engine(out / "step-20") as engine:
        assert engine.generate(["Question: 1 + 1?"], SamplingParams(max_new_tokens=4))[0].token_ids


@pytest.mark.slow  # imports transformers
def test_wrong_values_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_letters(Path("model"))
    Path("two.jsonl").write_text('{"question": "1", "answer": "2"}\n' * 2)
    shutil.copytree("model", "other")
    Path("other/tokenizer.json").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    wrong = {
        "owner/name": "MODEL='owner/name': must be a folder",
        "model --out .": "--out='.' exists",
        "other": "tokenizer.json",
        "model --steps 0,5,": "argument --steps: '0,5,': use numbers of steps",
        "model --steps 5,-1": "argument --steps: '5,-1'",
        "model --batch 0": "argument --batch: '0': use a number of 1 or more",
        "model --lora 0": "argument --lora: '0'",
        "model --lr -1": "argument --lr: '-1'",
        "model --lr nan": "argument --lr: 'nan'",
        "model --data two.jsonl": "--batch=16: there are 2 questions; use at most as many",
        "model --lora 4": "--lora=4 needs peft: pip install peft",
        "model --device abacus": "--device='abacus': ",
    }
    for words, message in wrong.items():
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split(), *([] if "--out" in words else ["--out", "new"])])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        *_, last = capsys.readouterr().err.splitlines()
        assert (ended.value.code, message in last) == (2, True), last
        assert not Path("new").exists()
