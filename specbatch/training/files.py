"""Writes a trained head in its published format. Files appear when all of them are written, config.json last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specbatch.files.atomic_file import replacing, scratch_folder, write_json
from specbatch.training.answers import ANSWERS
from specbatch.training.head import Head
from specbatch.weights import read_config
from specbatch.weights.folder import FolderCheckpoint

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`. Its files are moved to `folder` when all are written; leftovers of a crash
    are removed."""
    with scratch_folder(folder, claimed=True) as stage:
        yield stage
        for path in sorted(stage.iterdir(), key=lambda path: path.name == CONFIG):
            os.replace(path, folder / path.name)


def write_head(folder: Path, head: Head, dtype: torch.dtype) -> None:
    """Write config.json and a file of weights, in `dtype`."""
    _write_tensors(folder / head.file, _stored(head, dtype))
    described = head.config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / CONFIG, described)


def write_beside(folder: Path, head: Head, dtype: torch.dtype, target: FolderCheckpoint) -> None:
    """Write the target's checkpoint with the head's tensors in an additional file. The target's files are hard-linked,
    or copied if that fails."""
    tensors = _stored(head, dtype)
    source = target.folder
    for path in source.iterdir():
        if path.is_file() and path.name not in (CONFIG, INDEX, ANSWERS):
            _link(path, folder / path.name)
    _write_tensors(folder / head.file, tensors)
    index = read_config(source / INDEX) if (source / INDEX).is_file() else {"metadata": {}}
    only = next(path.name for path in sorted(source.glob("*.safetensors")))
    index.setdefault("weight_map", dict.fromkeys(target.names(), only))
    index["weight_map"] |= dict.fromkeys(tensors, head.file)
    write_json(folder / INDEX, index)
    write_json(folder / CONFIG, read_config(source / CONFIG) | head.config())


def _stored(head: Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.detach().cpu() for name, tensor in head.tensors().items()}
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    with replacing(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)  # the library makes it readable for its owner only


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)
