"""Layer-offset check: at low acceptance of an EAGLE-3 head, neighbouring feature layers are compared."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.drafters import layer_offset

from .conftest import LAYERS

LOOK = re.compile(r"of (\d+) first drafts ([\d.]+)% with ([\d,]+) are correct as run, and with --aux-layers (.*)")


@pytest.fixture
def sensitive(trained, tmp_path):
    """A head with amplified features, so that its drafts depend on the layers that it reads."""
    folder = shutil.copytree(trained["eagle3"][0], tmp_path / "sensitive")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"fc.weight": 30 * tensors["fc.weight"]}, folder / "model.safetensors")
    return folder


@pytest.fixture
def run(target_folder, trained, sensitive, prompts_file, low_acceptance_from):
    """Runs an engine; returns its warnings and its record. Any acceptance below 100% counts as low."""
    low_acceptance_from(20)
    prompts = [json.loads(line)["prompt_token_ids"] for line in prompts_file.read_text().splitlines()][:8]

    def build(aux=None, tokens=30, algorithm="eagle3", runs=2, **more):
        draft = str(sensitive if algorithm == "eagle3" else trained[algorithm][0])
        speculation = Speculation(algorithm, "v2", draft=draft, draft_tokens=1, aux_layers=aux)
        config = EngineConfig(model=str(target_folder), device="cpu", page_size=4, speculation=speculation, **more)
        log_lines: list[str] = []
        with Engine(config, log=log_lines.append) as engine:
            for _ in range(runs):
                engine.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
            record = engine.record()
            assert not engine.parts.scheduler.unfinished
        return [line for line in log_lines if "low acceptance" in line or "feature layers:" in line], record

    return build


def shares(line):
    drafted, own, layers, others = LOOK.search(line).groups()
    beside = {part.split("% with ")[1].split(" ")[0]: float(part.split("%")[0]) for part in others.split("; ")}
    return int(drafted), {layers: float(own)} | beside


@pytest.mark.slow
def test_reported_acceptance_matches_runs_with_these_layers(run):
    """The rate reported for other layers equals the one that an engine with these layers reports and achieves."""
    reported = {}
    for aux in ((2, 4, 6), (1, 3, 5), (3, 5, 7)):
        (warning, look), record = run(aux, runs=1 if reported else 2)  # once, although there may be two runs
        assert "likely causes: feature layers" in warning
        drafted, found = shares(look)
        assert drafted == 8 * 29  # the first output is no draft
        own = ",".join(map(str, aux))
        assert next(iter(found)) == own
        assert found[own] == pytest.approx(100 * record.metrics["first_draft_accept_rate"], abs=8)
        reported[own] = found
    assert len({found[own] for own, found in reported.items()}) == 3
    for found in reported.values():
        assert all(share == reported[layers][layers] for layers, share in found.items() if layers in reported)
    assert list(reported["2,4,6"]) == ["2,4,6", "1,3,5", "3,5,7"]
    assert list(reported["1,3,5"]) == ["1,3,5", "2,4,6"]  # 0 is not a valid boundary


@pytest.mark.parametrize(
    ("own", "beside", "chance"), [(5, 6, True), (0, 0, True), (0, 1, True), (10, 19, True), (10, 30, False)]
)
def test_insignificant_differences_are_reported_as_none(monkeypatch, own, beside, chance):
    found = iter([own, beside, 140])
    monkeypatch.setattr(layer_offset, "_counts", lambda *_: [(next(found), 152)])
    model = SimpleNamespace(aux=(1, 3), config=SimpleNamespace(depth=9), with_aux=lambda layers: None)
    line = layer_offset.compare_layer_offsets(model, None, [])
    assert (f"{beside / 152:.1%} with 1,3 (no difference: chance); " in line) == chance
    assert line.count("chance") == chance


def test_boundary_after_the_last_layer_is_valid(run):
    _, look = run((2, 4, LAYERS))[0]
    assert list(shares(look)[1]) == [f"2,4,{LAYERS}", f"1,3,{LAYERS - 1}"]


@pytest.mark.parametrize(("aux", "longest"), [((1, 5, LAYERS), 2048), ((2, 4, 6), 3)])
def test_impossible_comparisons_are_reported(run, monkeypatch, aux, longest):
    """Layers that cannot be shifted either way; prompts that are too long to compare."""
    monkeypatch.setattr(layer_offset, "LONGEST", longest)
    assert "nothing to compare" in run(aux, runs=1)[0][1]


def test_other_algorithms_are_not_compared(run):
    lines, _ = run(algorithm="dflash", runs=1)
    assert len(lines) == 1


def test_out_of_memory_does_not_fail_the_run(run, watch):
    def full(*_):
        raise torch.OutOfMemoryError

    watch(layer_offset, "_counts", before=full)
    assert "not compared" in run(runs=1)[0][1]
