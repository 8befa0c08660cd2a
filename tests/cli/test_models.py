"""`specbatch models`: list and pull."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path


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


def test_local_copy_of_a_known_model_is_pulled(run, monkeypatch, tmp_path):
    from specbatch.weights import known_models

    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "copy.gguf").write_bytes(b"weights")
    model = known_models.KNOWN_MODELS["qwen2.5-coder-0.5b"]
    model = replace(model, size=7, sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(known_models.KNOWN_MODELS, model.name, model)
    pulled = run("models", "pull", model.name, "--from", tmp_path / "copy.gguf")
    assert pulled.stdout == f"{model.path}\n"
    assert model.path.read_bytes() == b"weights"
