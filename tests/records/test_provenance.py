"""How a run was started: complete enough to repeat it, and without secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import make_record, metrics_of

from specbatch.errors import SpecbatchError
from specbatch.records import environment as hardware_of
from specbatch.records import provenance as module
from specbatch.records.provenance import command, environment, revision, without_secrets
from specbatch.records.runs import _started
from specbatch.records.store import load_record


def test_only_known_variables_without_secrets_are_kept() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO", "PYTORCH_ALLOC_CONF": "x", "TRITON_INTERPRET": "1"}
    secret = {"SPECBATCH_API_KEY": "s", "NCCL_TOKEN": "s", "TORCH_PASSWORD": "s", "HF_TOKEN": "s", "HOME": "/home/me"}
    assert environment(kept | secret) == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", "sk-1", "--model", "m"], ["--api-key", "***", "--model", "m"]),
        (["--api-key=sk-1", "--hf-token=x"], ["--api-key=***", "--hf-token=***"]),
        (["--password", "--json"], ["--password", "--json"]),  # nothing followed
        (["--draft-tokens", "3", "--api-key-env", "NAME", "--tokenizer", "t"],) * 2,
        (["--base-url", "http://me:pw@host:80/v1?key=s"], ["--base-url", "http://***@host:80/v1?***"]),
        (["--base-url=https://host/v1"], ["--base-url=https://host/v1"]),
        (["http://[broken"], ["***"]),
    ],
)
def test_secrets_are_no_part_of_the_command(given: list[str], kept: list[str]) -> None:
    assert without_secrets(given) == kept


@pytest.mark.parametrize(
    ("program", "name", "head"),
    [
        ("/venv/bin/specbatch", None, ["specbatch"]),
        ("/x/specbatch/__main__.py", "specbatch.__main__", ["specbatch"]),
        ("/x/__main__.py", "specbatch.sweeps.microbench.__main__", ["python", "-m", "specbatch.sweeps.microbench"]),
        ("train.py", None, None),
        ("/x/pytest/__main__.py", "pytest.__main__", None),
    ],
)
def test_command_of_a_program(monkeypatch, program, name, head) -> None:
    """The arguments of other programs may hold anything, so they are not kept."""
    monkeypatch.setattr(sys, "argv", [program, "sweep", "--seed", "1"])
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=name and SimpleNamespace(name=name)))
    assert command() == ([*head, "sweep", "--seed", "1"] if head else [])


def test_revision_of_a_checkout_and_of_an_installation(monkeypatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    source = tmp_path / "specbatch" / "records" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    monkeypatch.setattr(module, "__file__", str(source))
    metadata = SimpleNamespace(read_text=lambda _: json.dumps({"vcs_info": {"commit_id": "abc"}}))
    monkeypatch.setattr(module.metadata, "distribution", lambda _: metadata)
    find = revision.__wrapped__
    assert find() == {"revision": "abc", "dirty": False}  # no checkout: as pip installed it
    git("init", "-q")
    assert find() is None  # no commit
    git("add", ".")
    git("commit", "-q", "-m", "x")
    assert find() == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    source.write_text("changed")
    assert find() == {"revision": git("rev-parse", "HEAD"), "dirty": True}


def test_driver_of_nvidia(monkeypatch, tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"
    (tmp_path / "version").write_text(text)
    files = {"/proc/driver/nvidia/version": tmp_path / "version"}
    monkeypatch.setattr(hardware_of, "Path", lambda name: files.get(name, tmp_path / "none"))
    assert hardware_of._driver() == "570.86.15"
    files.clear()
    assert hardware_of._driver() is None


def test_record_keeps_it_and_earlier_ones_have_none(tmp_path: Path) -> None:
    made = make_record([metrics_of()])
    made.provenance = {
        "command": ["specbatch", "sweep", "--model", "my model"],
        "git": {"revision": "abc", "dirty": True},
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    made.save(tmp_path)
    found = load_record("path", tmp_path)
    assert found == made
    assert (found.command, found.revision) == ("specbatch sweep --model 'my model'", "abc-dirty")
    assert _started(found) == {"git revision": "abc-dirty", "driver": None, "OMP_NUM_THREADS": "1"}

    body = json.loads((tmp_path / "record.json").read_text())
    del body["provenance"]
    (tmp_path / "record.json").write_text(json.dumps(body))
    before = load_record("path", tmp_path)
    assert (before.provenance, before.command, before.revision, _started(before)) == ({}, "", None, {})
    (tmp_path / "record.json").write_text(json.dumps(body | {"provenance": {"command": "rm"}}))
    with pytest.raises(SpecbatchError, match=r"provenance\.command"):
        load_record("path", tmp_path)
