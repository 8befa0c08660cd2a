"""How a run was started: complete enough to repeat it, and without secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from made_runs import make_record, metrics_of

from specbatch.errors import SpecbatchError
from specbatch.records.environment import nvidia_driver
from specbatch.records.provenance import command, environment, installed_revision, revision, without_secrets
from specbatch.records.runs import how_started
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
def test_command_of_a_program(program: str, name: str | None, head: list[str] | None) -> None:
    """The arguments of other programs may hold anything, so they are not kept."""
    found = command([program, "sweep", "--seed", "1"], name or "")
    assert found == ([*head, "sweep", "--seed", "1"] if head else [])


def test_revision_of_a_checkout_and_of_an_installation(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    source, find = tmp_path / "source.py", revision.__wrapped__
    source.write_text("")
    assert find(tmp_path) is None  # no checkout: as pip installed it, which is from a folder here
    git("init", "-q")
    assert find(tmp_path) is None  # no commit
    git("add", ".")
    git("commit", "-q", "-m", "x")
    assert find(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    source.write_text("changed")
    assert find(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": True}


def test_revision_as_pip_records_it() -> None:
    assert installed_revision(json.dumps({"vcs_info": {"commit_id": "abc"}})) == {"revision": "abc", "dirty": False}
    assert installed_revision('{"dir_info": {"editable": true}}') is installed_revision("damaged") is None


def test_driver_of_nvidia(tmp_path: Path) -> None:
    assert nvidia_driver(tmp_path) is None
    for file, text in (
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"),
        ("sys/module/nvidia/version", "570.86.15\n"),
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"{text}GCC version: 12.2.0\n" if "proc" in file else text)
        assert nvidia_driver(tmp_path) == "570.86.15"


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
    assert how_started(found) == {"git revision": "abc-dirty", "driver": None, "OMP_NUM_THREADS": "1"}

    body = json.loads((tmp_path / "record.json").read_text())
    del body["provenance"]
    (tmp_path / "record.json").write_text(json.dumps(body))
    before = load_record("path", tmp_path)
    assert (before.provenance, before.command, before.revision, how_started(before)) == ({}, "", None, {})
    (tmp_path / "record.json").write_text(json.dumps(body | {"provenance": {"command": "rm"}}))
    with pytest.raises(SpecbatchError, match=r"provenance\.command"):
        load_record("path", tmp_path)
