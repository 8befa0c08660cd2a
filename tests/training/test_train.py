"""Training: losses fall, and a trained head is far better than an untrained one on held-out answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from crossed import first_quick, slow_but
from safetensors.torch import load_file
from trained import FILES_ONLY, TRAINED

from specbatch.algorithms import ALGORITHMS
from specbatch.errors import SpecbatchError
from specbatch.training import run
from specbatch.training.data import Example
from specbatch.training.dflash import DFlashHead
from specbatch.training.head import Scores
from specbatch.training.recipe import HEADS, Recipe
from specbatch.training.trainer import FLOOR, rate

from .conftest import LR, STEPS


@pytest.mark.parametrize("algorithm", slow_but({*HEADS} - {*FILES_ONLY}, HEADS))
def test_trained_head_beats_an_untrained_one(trained, algorithm):
    record = trained[algorithm][1]
    history = record["history"]
    before, after = history["measured"][0], history["measured"][record["recipe"]["steps"]]
    assert len(after["accuracy"]) == (4 if ALGORITHMS[algorithm].tree == "block" else 3)
    for untrained, learnt in zip(before["accuracy"], after["accuracy"], strict=True):
        assert learnt > untrained + 0.25 or learnt == 1  # an untrained DSpark row may copy what its token predicts
    assert after["accept_length"] > before["accept_length"] + 0.5
    losses = list(history["losses"].values())
    assert losses[-1] < losses[0] * TRAINED[algorithm].loss_falls_to


@pytest.mark.parametrize("algorithm", first_quick(1, ["dflash", "dflash2", "peagle"]))
def test_training_is_deterministic_per_seed(train, answers_file, tmp_path, algorithm):
    first, again, other = (
        train(tmp_path / name, algorithm, answers=answers_file, steps=3, seed=seed)["history"]["losses"]
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert first == again
    assert first != other
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "again")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_record_holds_training_settings(trained, answers_file):
    folder = trained["eagle3"][0]
    written = json.loads((folder / "record.json").read_text())
    recipe = Recipe("eagle3", STEPS, 200, 48, LR, 10, unroll=3, vocab=24, draft_layers=1)
    assert written["recipe"] == recipe.as_dict()
    assert written["data"]["answers"] == str(answers_file)
    assert written["data"]["answers_used"] == 70
    assert len(written["data"]["answers_sha256"]) == 64
    assert written["versions"]["torch"] == version("torch")
    assert written["history"]["steps"] == STEPS
    assert not written["history"]["interrupted"]
    assert list(map(int, written["history"]["measured"])) == list(range(0, STEPS + 1, STEPS // 4))


@pytest.mark.parametrize("algorithm", first_quick(1, ["dflash", "mtp", "eagle3"]))
def test_interrupted_training_continues_as_if_it_had_not_been(train, answers_file, tmp_path, algorithm):
    def stop_at(step: int) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            if done == step:
                raise KeyboardInterrupt

        return report

    folder, whole = tmp_path / "head", train(tmp_path / "whole", algorithm, answers=answers_file, steps=8)
    lines: list[str] = []
    for step in (3, 4, 8):
        with pytest.raises(
            KeyboardInterrupt, match=f"{step} of 8 steps is in .*; the same command with --out {folder}"
        ):
            train(folder, algorithm, answers=answers_file, steps=8, report=stop_at(step), log=lines.append)
        written = json.loads((folder / "record.json").read_text())["history"]
        assert (written["steps"], written["interrupted"]) == (step, True)
    found = train(folder, algorithm, answers=answers_file, steps=8, log=lines.append)
    assert [line for line in lines if line.startswith("continuing")] == [
        f"continuing after {step} of 8 steps" for step in (3, 4, 8)
    ]
    assert not found["history"]["interrupted"]
    for name in ("losses", "measured"):
        assert found["history"][name] == whole["history"][name]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    for path in folder.glob("*.safetensors"):
        expected = load_file(tmp_path / "whole" / path.name)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(path).items())


def test_ctrl_c_within_a_step_waits_for_its_end(train, answers_file, tmp_path, watch):
    """Else the state would have the random numbers of a step that runs again."""
    whole = train(tmp_path / "whole", "dflash", answers=answers_file, steps=6)
    steps: list[int] = []

    def interrupt(*_: Any) -> None:
        if torch.is_grad_enabled():
            steps.append(len(steps))
            if len(steps) == 4:
                signal.raise_signal(signal.SIGINT)

    watch(DFlashHead, "_draw", after=interrupt)
    with pytest.raises(KeyboardInterrupt, match="4 of 6 steps is in"):
        train(tmp_path / "head", "dflash", answers=answers_file, steps=6)
    found = train(tmp_path / "head", "dflash", answers=answers_file, steps=6)
    assert found["history"]["losses"] == whole["history"]["losses"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "head")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_state_of_another_training_is_refused(train, answers_file, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "eagle3", answers=answers_file, report=stop)
    with pytest.raises(
        SpecbatchError, match=rf"training.pt': is of a training with another lr \({LR} there, 0.5 now\)"
    ):
        train(tmp_path, "eagle3", answers=answers_file, lr=0.5)
    (tmp_path / "training.pt").write_bytes(b"PK torn")
    with pytest.raises(SpecbatchError, match=r"training.pt': is not the state of a training \(\w+\); remove"):
        train(tmp_path, "eagle3", answers=answers_file)


@pytest.mark.parametrize(("steps", "bad"), [(1, 0), (8, 3), (8, 7)])
def test_loss_that_is_not_finite_is_refused(train, answers_file, tmp_path, monkeypatch, steps, bad):
    """Also that of the last step, although losses are read one step late."""
    score, done = DFlashHead.score, []

    def diverges(self: DFlashHead, *batch: Any) -> Scores:
        found = score(self, *batch)
        if torch.is_grad_enabled():
            done.append(found)
        return replace(found, loss=found.loss * (torch.nan if len(done) > bad else 1))

    monkeypatch.setattr(DFlashHead, "score", diverges)
    with pytest.raises(SpecbatchError, match=rf"lr=0.01: the loss is not finite after {bad} steps; lower it"):
        train(tmp_path, "dflash", answers=answers_file, steps=steps)
    assert len(done) <= bad + 2
    assert not list(tmp_path.iterdir())


def test_learning_rate_warmup_and_decay():
    rates = [rate(step, 100) for step in range(100)]
    assert rates.index(max(rates)) in (3, 4)
    assert max(rates) == 1
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rate(100, 100) == pytest.approx(FLOOR)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_training_on_prompts_sees_them_and_measures_answers(train, answers_file, tmp_path, watch, algorithm):
    shown = watch(run, "train", before=lambda head, target, kept, held_out, *_, **__: (kept, held_out))
    for name, on_prompts in (("answers", False), ("all", True)):
        how = {"held_out": 2, "steps": 1, "train_on_prompts": on_prompts}
        train(tmp_path / name, algorithm, answers=answers_file, **how)
    (kept, held_out), (all_kept, all_held_out) = shown
    assert held_out == all_held_out
    assert all_kept == [Example(item.tokens, 1) for item in kept]
    assert any(item.prompt > 1 for item in kept)
