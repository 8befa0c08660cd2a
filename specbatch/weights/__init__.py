"""Where a model comes from: `open_checkpoint("smollm2-135m")` finds and checks it; its tensors are read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from specbatch.errors import refuse
from specbatch.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from specbatch.tokenizer import Tokenizer

Log = Callable[[str], None]
Read = Callable[[dict[str, Any]], ModelConfig]


class Checkpoint(Protocol):
    """An opened model: checked for completeness and shapes, nothing loaded yet.

    `origin` says in words where it came from; `bytes` is the size of its tensors as they are stored; `mtp` holds names
    and shapes of the draft head that lies beside the model, if any.
    """

    name: str
    origin: str
    config: ModelConfig
    bytes: int
    mtp: dict[str, tuple[int, ...]]

    def names(self) -> list[str]:
        """Names of `config.tensor_shapes()`, in the order in which they are best read."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in the stored type, on the CPU or where random ones are made. It may be a view of the file: not
        to be written to."""

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises SpecbatchError where there is none, or it does not fit the model."""


def open_checkpoint(
    model: str,
    load_format: str = "auto",
    *,
    seed: int = 0,
    tokenizer: str | None = None,
    log: Log | None = None,
    read: Read = ModelConfig.from_dict,
    device: str = "cpu",
) -> Checkpoint:
    """Find a model and check it.

    `model` is, in this order: a bundled name, a .gguf file, a folder (safetensors, or a single .gguf), or a
    hub id `owner/name`, optionally with `@revision`. With load_format "dummy" it is a named shape, a
    config.json or a folder with one, and the weights are random from `seed`. `tokenizer` is used in place of the
    model's own, see `open_tokenizer`. `log` is told of downloads and conversions. `read` makes the config of what a
    `config.json` says; a draft may have its own. Random weights are made on `device`. Raises SpecbatchError, one
    line, for everything that cannot be opened.
    """
    override = open_tokenizer(tokenizer, log) if tokenizer else None
    if load_format == "dummy":
        return _open_dummy(model, seed, override, read, device)
    from specbatch.weights.bundled import MODELS, pull

    path = Path(model).expanduser()
    if model in MODELS:
        _refuse_safetensors(load_format, model)
        known = MODELS[model]
        return _open_gguf(pull(model, log), model, known.origin, override, log, known.sha256)
    if path.is_file() and path.suffix == ".gguf":
        _refuse_safetensors(load_format, model)
        return _open_gguf(path, path.stem, str(path), override, log)
    if path.is_dir():
        return _open_folder(path, path.resolve().name, str(path), load_format, override, log, read)
    if _looks_like_a_path(model):
        found = "this file is not a model" if path.exists() else "no such file"
        raise refuse("model", model, f"{found}; give a .gguf file or a folder with config.json and safetensors")
    return _open_hub(model, load_format, override, log, read)


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json` as a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse("model", str(path), f"it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise refuse("model", str(path), f"it is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise refuse("model", str(path), "it must hold one JSON table")
    return found


def _open_dummy(model: str, seed: int, tokenizer: Tokenizer | None, read: Read, device: str) -> Checkpoint:
    from specbatch.weights.dummy import SHAPES, DummyCheckpoint

    path = Path(model).expanduser()
    if model in SHAPES:
        config, name = SHAPES[model], model
    elif path.is_dir() and (path / "config.json").is_file():
        config, name = read_config(path / "config.json"), path.resolve().name
    elif path.is_file() and path.suffix == ".json":
        config, name = read_config(path), path.resolve().parent.name
    else:
        works = f"with load_format='dummy' give a config.json, its folder, or one of {', '.join(SHAPES)}"
        raise refuse("model", model, works)
    return DummyCheckpoint(read(config), name=name, seed=seed, tokenizer=tokenizer, device=device)


def _open_folder(
    folder: Path,
    name: str,
    origin: str,
    load_format: str,
    tokenizer: Tokenizer | None,
    log: Log | None,
    read: Read,
) -> Checkpoint:
    from specbatch.weights.folder import FolderCheckpoint

    ggufs = sorted(folder.glob("*.gguf"))
    if any(folder.glob("*.safetensors*")) and load_format != "gguf":
        return FolderCheckpoint(folder, name=name, origin=origin, tokenizer=tokenizer, read=read, log=log)
    if len(ggufs) == 1:
        _refuse_safetensors(load_format, origin)
        return _open_gguf(ggufs[0], ggufs[0].stem, str(ggufs[0]), tokenizer, log)
    if ggufs:
        raise refuse("model", origin, f"name one of its files: {', '.join(path.name for path in ggufs)}")
    wanted = "gguf files" if load_format == "gguf" else "safetensors"
    raise refuse("model", origin, f"the folder holds no {wanted}; give one with config.json and safetensors")


def _open_gguf(
    path: Path, name: str, origin: str, tokenizer: Tokenizer | None, log: Log | None, sha256: str | None = None
) -> Checkpoint:
    from specbatch.weights.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path, name=name, origin=origin, tokenizer=tokenizer, log=log, sha256=sha256)


def _open_hub(model: str, load_format: str, tokenizer: Tokenizer | None, log: Log | None, read: Read) -> Checkpoint:
    from specbatch.weights import hub
    from specbatch.weights.bundled import MODELS

    works = (
        f"give a bundled name ({', '.join(MODELS)}), a folder or a .gguf file; "
        "for a model without the hub type: specbatch models pull smollm2-135m"
    )
    if model.count("/") != 1:
        raise refuse("model", model, f"no such name, file or folder; {works}")
    if load_format == "gguf":
        raise refuse("load_format", load_format, f"from the hub only safetensors are fetched; {works}")
    folder = hub.snapshot("model", model, hub.MODEL_FILES, works=works)
    return _open_folder(folder, model, model, load_format, tokenizer, log, read)


def open_tokenizer(tokenizer: str, log: Log | None = None) -> Tokenizer:
    """That of a bundled name, of a folder with tokenizer.json or of a hub id, in this order. `log` is told of
    downloads. Raises SpecbatchError where there is none."""
    from specbatch.tokenizer import Tokenizer
    from specbatch.weights import hub
    from specbatch.weights.bundled import MODELS, pull

    if tokenizer in MODELS:
        from specbatch.weights.gguf_tokenizer import write_tokenizer

        with TemporaryDirectory() as scratch:  # its weights need no conversion for that
            write_tokenizer(pull(tokenizer, log), Path(scratch))
            return Tokenizer.from_folder(Path(scratch), name=tokenizer)
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        if _looks_like_a_path(tokenizer) or tokenizer.count("/") != 1:
            works = f"give a bundled name ({', '.join(MODELS)}), a folder with tokenizer.json, or a hub id"
            raise refuse("tokenizer", tokenizer, f"no such name or folder; {works}")
        folder = hub.snapshot("tokenizer", tokenizer, hub.TOKENIZER_FILES, works="give a folder with tokenizer.json")
    return Tokenizer.from_folder(folder, name=tokenizer)


def _refuse_safetensors(load_format: str, model: str) -> None:
    if load_format == "safetensors":
        raise refuse("load_format", load_format, f"{model} is a GGUF file; use 'auto' or 'gguf'")


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".json", ".safetensors")) or Path(name).exists()


__all__ = ["Checkpoint", "open_checkpoint", "read_config"]
