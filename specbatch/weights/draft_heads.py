"""Published draft heads: folders with config.json and safetensors or pytorch_model.bin, without a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse, shown
from specbatch.weights import hub
from specbatch.weights.checkpoint import read_config
from specbatch.weights.dummy import random_tensor
from specbatch.weights.folder import SafetensorsFiles, lora_hint

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
_DTYPES = {f"torch.{name}" for name in ("float32", "float16", "bfloat16", "int64", "int32", "bool")}
HEAD_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin"]
_WEIGHT_FILES = ("*.safetensors*", "*.bin", "*.gguf")
_SPELLINGS = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)


@dataclass(frozen=True)
class DraftFiles:
    """An opened draft head.

    origin  where it came from, for messages
    config  its config.json, unchanged
    shapes  name -> shape of its tensors, with the names of all formats in one spelling
    tensor  returns a tensor in its stored dtype, on the CPU; it must not be written to
    """

    name: str
    origin: str
    config: dict[str, Any]
    shapes: Shapes
    tensor: Callable[[str], torch.Tensor]


def open_draft(draft: str, described: str = "config.json") -> DraftFiles:
    """Open a folder, or a hub id `owner/name`, optionally with `@revision`. described: the name of its config. Raises
    SpecbatchError for `draft`."""
    folder = Path(os.path.expanduser(draft))
    if not os.path.isdir(folder):
        if draft == "dummy":
            raise refuse("draft", draft, "is a draft with random weights only; add load_format='dummy'")
        works = f"give a folder with {described} and safetensors, or a hub id"
        if draft.count("/") != 1 or draft.startswith((".", "~", "/")):
            raise refuse("draft", draft, f"no such folder; {works}")
        folder = hub.snapshot("draft", draft, [*HEAD_FILES, described], works=works)
    if not (folder / described).is_file():
        raise refuse("draft", draft, f"the folder has no {described}{lora_hint(folder)}")
    config = read_config(folder / described)
    if any(folder.glob("*.safetensors*")):
        files = SafetensorsFiles(folder)
        names = {_canonical(name): name for name in files.shapes}
        shapes = {name: files.shapes[stored] for name, stored in names.items()}
        return DraftFiles(folder.resolve().name, draft, config, shapes, lambda name: files.tensor(names[name]))
    tensors = _torch_file(folder / "pytorch_model.bin", draft)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return DraftFiles(folder.resolve().name, draft, config, shapes, tensors.__getitem__)


def dummy_draft(
    config: dict[str, Any], shapes: Shapes, seed: int, device: str, maps: dict[str, torch.Tensor] | None = None
) -> DraftFiles:
    """A head of random weights with these shapes, generated on `device`: on a GPU in bfloat16; `maps`: given tensors,
    such as d2t."""
    fixed = maps or {}

    def tensor(name: str) -> torch.Tensor:
        if name in fixed:
            return fixed[name]
        import torch

        return random_tensor(name, shapes[name], seed, device, None if device == "cpu" else torch.bfloat16)

    return DraftFiles("dummy", f"random weights, seed {seed}", config, shapes, tensor)


def check_random(draft: str) -> None:
    """Refuse a folder with weights as a draft of random weights, for which only its config.json would be read."""
    folder = Path(os.path.expanduser(draft))
    if os.path.isdir(folder) and any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        works = (
            "with load_format='dummy' its weights are not read; use 'dummy' or its config.json for random weights, or "
            "leave out load_format='dummy'"
        )
        raise refuse("draft", draft, works)


def dummy_config(draft: str, described: str = "config.json") -> dict[str, Any] | None:
    """Read the config `draft`, or that of a folder, where it is named `described`; None for "dummy", for which each
    algorithm has a usual shape."""
    if draft == "dummy":
        return None
    path = Path(os.path.expanduser(draft))
    path = path / described if os.path.isdir(path) else path
    if not os.path.isfile(path):
        works = f"with load_format='dummy' give a {described}, its folder, or 'dummy' for the usual shape"
        raise refuse("draft", draft, works)
    return read_config(path)


def _torch_file(path: Path, draft: str) -> dict[str, torch.Tensor]:
    import torch

    if not path.is_file():
        raise refuse("draft", draft, "the folder has neither safetensors nor a pytorch_model.bin")
    works = "it is damaged or not a file of tensors ({})"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the errors of pickle, zip and torch have no common class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise refuse("draft", str(path), works.format(reason)) from None
    if not isinstance(found, dict):
        raise refuse("draft", str(path), works.format(f"it holds a {type(found).__name__}"))
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise refuse("draft", str(path), works.format(f"{shown(name)} is a {type(tensor).__name__}"))
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or str(tensor.dtype) not in _DTYPES:
            raise refuse("draft", str(path), works.format(f"{shown(name)} is not a plain tensor of numbers"))
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a view of a few values can have any size
            raise refuse("draft", str(path), works.format(f"{shown(name)} is larger than its data"))
    return {_canonical(name): tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _canonical(name: str) -> str:
    for spelling, ours in _SPELLINGS:
        if name.startswith(spelling):
            name = ours + name.removeprefix(spelling)
    return name
