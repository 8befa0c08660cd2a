"""Shards and weight maps that are not what they seem: pipes, folders, links in circles, files outside of the folder."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_folder
from limits import limited

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint
from specbatch.weights.draft_heads import open_draft
from specbatch.weights.opening import open_tokenizer


def refusal(folder: Path) -> str:
    with limited(5), pytest.raises(SpecbatchError) as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_map(folder: Path, file: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("../other.safetensors", "names '../other.safetensors', which is outside of the folder"),
        ("a/../../other.safetensors", "which is outside of the folder"),
        ("/etc/passwd", "which is outside of the folder"),
        ("/dev/zero", "which is outside of the folder"),
        ("pipe", "model/pipe': it is not a regular file"),
        ("device", "model/device': it is not a regular file"),
        ("circle", "model/circle': the file is in the index, but missing"),
        ("folder", "model/folder': it is not a regular file"),
        (".", "it is not a regular file"),
        ("", "it must name a file"),
        (5, "it must name a file"),
        (["model.safetensors"], "it must name a file"),
        ("a" * 300, "missing"),
        ("a\0b", "missing"),
    ],
)
def test_shards(file: Any, reason: str, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "circle").symlink_to("circle")
    (folder / "folder").mkdir()
    (folder.parent / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert reason in refusal(with_map(folder, file))


def test_links_to_files_are_followed(folder: Path) -> None:
    target = (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(target)
    assert open_checkpoint(str(folder)).names()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_pipes_in_place_of_files(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    opened = name.endswith("index.json")  # it is not a file, so that there is none
    assert opened or "not a regular file" in refusal(folder) or "no config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_pipes_in_place_of_files_of_a_tokenizer(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with limited(5):
        if name == "tokenizer.json":
            with pytest.raises(SpecbatchError, match="the folder has no tokenizer"):
                open_checkpoint(str(folder)).tokenizer()
        else:
            assert open_checkpoint(str(folder)).tokenizer().encode("a")


@pytest.mark.parametrize(
    "name", ["a" * 300, "/" + "a/" * 3_000, "a\0b", "~no-such-user/m", "\ud800", "a/\ud800", "a/" + "b" * 300, ""]
)
def test_names_that_no_file_can_have(name: str) -> None:
    for opens in (open_checkpoint, lambda name: open_checkpoint(name, "dummy"), open_tokenizer, open_draft):
        with pytest.raises(SpecbatchError) as caught:
            opens(name)  # type: ignore[operator]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([torch.zeros(2)], "it holds a list"),
        ({"fc.weight": 5}, "'fc.weight' is a int"),
        ({5: torch.zeros(2)}, "5 is a Tensor"),
        ({"fc.weight": torch.zeros(1).expand(10**12)}, "'fc.weight' is larger than its data"),
        ({"fc.weight": torch.zeros(2, dtype=torch.complex64)}, "'fc.weight' is not a plain tensor of numbers"),
        ({"fc.weight": torch.zeros(4, 4).to_sparse()}, "'fc.weight' is not a plain tensor of numbers"),
        ({"fc.weight": torch.zeros(2, device="meta")}, "'fc.weight' is not a plain tensor of numbers"),
    ],
)
def test_torch_files_without_plain_tensors(content: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "pytorch_model.bin")
    with limited(20), pytest.raises(SpecbatchError, match=reason) as caught:
        open_draft(str(tmp_path))
    assert str(caught.value).startswith("draft=")


def test_damaged_torch_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for content in (b"", b"PK\x03\x04", pickle.dumps(open_draft), pickle.dumps({"a": print}), b"\x80\x02" * 1_000):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(SpecbatchError, match="damaged or not a file of tensors"):
            open_draft(str(tmp_path))
