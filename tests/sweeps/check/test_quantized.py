"""`specbatch check --engine http --weights` of servers that quantize: rounding passes, another model does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_server import EngineServer, serving_engine
from letters import letters_engine, write_letters
from quantized_weights import fp8, int4
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.records.store import load_record

Change = Callable[[str, torch.Tensor], torch.Tensor]
ENDS = ("embed", "lm_head")  # checkpoints leave these as they are


def write_changed(folder: Path, seed: int, change: Change | None = None, **config: Any) -> Path:
    """The model of letters with other weights or another configuration."""
    write_letters(folder, seed)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        for name, weight in weights.items():
            if weight.dim() == 2 and not any(end in name for end in ENDS):
                weights[name] = change(name, weight)
        save_file(weights, folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | config))
    return folder


QUANTIZED: dict[str, Change] = {
    "FP8": lambda name, weight: fp8("channel", "_scale")(name, weight)[1],
    "INT4": lambda name, weight: int4("gptq", 16)(name, weight)[1],
}


def check(tmp_path: Path, served: Path, *options: str, shows: bool = True) -> Result:
    """Of a server with the weights of one folder, against those of another, `right`."""
    with letters_engine(served) as engine:
        server = EngineServer(engine, model="letters", kind="test", root=str(served), shows=shows)
        with serving_engine(server) as url:
            words = ["check", "--engine", "http", "--base-url", url, "--prompts", "8", "--max-new-tokens", "16"]
            words += ["--probes", "none", "--weights", str(tmp_path / "right"), "--device", "cpu"]
            return CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), *options])


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "seed"), [("INT4", 0), *(slow(name, seed) for name in QUANTIZED for seed in range(1, 7))]
)
def test_quantized_server_passes(tmp_path: Path, name: str, seed: int) -> None:
    write_letters(tmp_path / "right", seed)
    found = check(tmp_path, write_changed(tmp_path / "served", seed, QUANTIZED[name]), "--quantized")
    assert found.exit_code == 0, found.output
    assert "THE SERVER QUANTIZES" in found.output
    judged = load_record("run", tmp_path / "out").workload["referee"]["alone"]
    assert judged["diverging"], "quantization changes answers"
    assert 0.05 < judged["error_nats"] < judged["most_error_nats"] == 0.65


@pytest.mark.slow
def test_without_the_setting_it_fails_and_the_setting_is_named(tmp_path: Path) -> None:
    write_letters(tmp_path / "right", 2)
    found = check(tmp_path, write_changed(tmp_path / "served", 2, QUANTIZED["INT4"]))
    assert found.exit_code == 1
    assert "If the server quantizes weights or activations, --quantized allows for that." in found.output


@pytest.mark.parametrize(("theta", "shows"), [(1e6, True), slow(10.0, True), slow(1e6, False), slow(10.0, False)])
def test_other_base_of_rope_is_found(tmp_path: Path, theta: float, shows: bool) -> None:
    write_letters(tmp_path / "right", 0)
    served = write_changed(tmp_path / "served", 0, QUANTIZED["INT4"], rope_theta=theta)
    found = check(tmp_path, served, "--quantized", shows=shows)
    assert found.exit_code == 1, found.output
    assert "nats below the referee's best, and quantization explains 5" in found.output
    assert ("nats per token from the referee's, and quantization explains 0.65" in found.output) == shows


def test_refused_without_weights() -> None:
    found = CliRunner().invoke(app, ["check", "--engine", "http", "--base-url", "http://a", "--quantized"])
    assert found.exit_code == 2
    assert "error: --quantized: is for the referee; add weights, or leave it out" in found.output
