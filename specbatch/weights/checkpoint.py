"""`Checkpoint`, the interface of an opened model, and the reader of its config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specbatch.errors import refuse
from specbatch.files.text_files import read_json
from specbatch.models.config import ModelConfig
from specbatch.models.formats.grouped import GroupedSource

if TYPE_CHECKING:
    import torch

    from specbatch.text.tokenizer import Tokenizer

Log = Callable[[str], None]
Read = Callable[[dict[str, Any]], ModelConfig]


class Checkpoint(Protocol):
    """An opened model whose files are complete and whose tensor shapes are checked. No tensor is loaded yet.

    origin  where it came from, for the log
    bytes   size of its tensors as stored
    mtp     name -> shape of the MTP draft head stored in the same files, empty without one
    grouped the matrices that the files have in groups of whole numbers and `tensor` has dequantized; None without such
    cache   name -> shape of what the files have for an FP8 KV cache (`read_cache_scales`), usually empty
    """

    name: str
    origin: str
    config: ModelConfig
    bytes: int
    mtp: dict[str, tuple[int, ...]]
    grouped: GroupedSource | None
    cache: dict[str, tuple[int, ...]]

    def names(self) -> list[str]:
        """The names of `tensor_shapes(config)`, in the order that reads the files sequentially."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, on the CPU (random weights: on the device that generates them). It may be a
        view of the file, so it must not be written to."""

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises SpecbatchError if there is none or it does not fit the model."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json."""
    found = read_json("model", path, "download it again")
    if not isinstance(found, dict):
        raise refuse("model", str(path), "it must hold a JSON object")
    return found
