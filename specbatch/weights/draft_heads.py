"""Published draft heads: folders with config.json and safetensors or pytorch_model.bin, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.weights import hub
from specbatch.weights.checkpoint import read_config
from specbatch.weights.dummy import random_tensor
from specbatch.weights.folder import SafetensorsFiles

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
HEAD_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin"]
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


def open_draft(draft: str) -> DraftFiles:
    """Open a folder, or a hub id `owner/name`, optionally with `@revision`. Raises SpecbatchError for `draft`."""
    folder = Path(draft).expanduser()
    if not folder.is_dir():
        works = "give a folder with config.json and safetensors, or a hub id"
        if draft.count("/") != 1 or draft.startswith((".", "~", "/")):
            raise refuse("draft", draft, f"no such folder; {works}")
        folder = hub.snapshot("draft", draft, HEAD_FILES, works=works)
    if not (folder / "config.json").is_file():
        raise refuse("draft", draft, "the folder has no config.json")
    config = read_config(folder / "config.json")
    if any(folder.glob("*.safetensors*")):
        files = SafetensorsFiles(folder)
        names = {_canonical(name): name for name in files.shapes}
        shapes = {name: files.shapes[stored] for name, stored in names.items()}
        return DraftFiles(folder.resolve().name, draft, config, shapes, lambda name: files.tensor(names[name]))
    tensors = _torch_file(folder / "pytorch_model.bin", draft)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return DraftFiles(folder.resolve().name, draft, config, shapes, tensors.__getitem__)


def dummy_draft(
    config: dict[str, Any], shapes: Shapes, seed: int, maps: dict[str, torch.Tensor] | None = None
) -> DraftFiles:
    """A head of random weights with these shapes; `maps`: given tensors, such as d2t."""
    fixed = maps or {}

    def tensor(name: str) -> torch.Tensor:
        return fixed[name] if name in fixed else random_tensor(name, shapes[name], seed)

    return DraftFiles("dummy", f"random weights, seed {seed}", config, shapes, tensor)


def dummy_config(draft: str) -> dict[str, Any] | None:
    """Read the config.json `draft`, or that of a folder; None for "dummy", for which each algorithm has a usual
    shape."""
    if draft == "dummy":
        return None
    path = Path(draft).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        works = "with load_format='dummy' give a config.json, its folder, or 'dummy' for the usual shape"
        raise refuse("draft", draft, works)
    return read_config(path)


def _torch_file(path: Path, draft: str) -> dict[str, torch.Tensor]:
    import torch

    if not path.is_file():
        raise refuse("draft", draft, "the folder has neither safetensors nor a pytorch_model.bin")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the errors of pickle, zip and torch have no common class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise refuse("draft", str(path), f"it is damaged or not a file of tensors ({reason})") from None
    return {_canonical(name): tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _canonical(name: str) -> str:
    for spelling, ours in _SPELLINGS:
        if name.startswith(spelling):
            name = ours + name.removeprefix(spelling)
    return name
