"""Opening checkpoints: `open_checkpoint(model)` finds a model, checks its files and returns a `Checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from specbatch.errors import SpecbatchError, refuse
from specbatch.models.config import ModelConfig
from specbatch.text.tokenizer_files import TOKENIZER_FILES
from specbatch.weights.checkpoint import Checkpoint, Log, Read, read_config

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer


def open_checkpoint(
    model: str,
    load_format: str = "auto",
    *,
    seed: int = 0,
    tokenizer: str | None = None,
    log: Log | None = None,
    read: Read = ModelConfig.from_dict,
    device: str = "cpu",
    works: str | None = None,
    max_model_len: int | None = None,
) -> Checkpoint:
    """Find a model and check its files.

    `model` is, in this order: the name of a known model, a .gguf file, a folder (safetensors or a single .gguf), or a
    hub id `owner/name`, optionally with `@revision`. With load_format "dummy" it is a named shape, a config.json or a
    folder with one, and the weights are random from `seed`, generated on `device`. `tokenizer` replaces that of the
    model, see `open_tokenizer`. `log` receives lines about downloads and conversions. `read` turns a config.json into
    the config; drafts have configs of their own, and `works` is the advice where there is no such draft.
    `max_model_len` is that of the engine, see `ModelConfig.for_length`. Raises SpecbatchError, in one line, for
    whatever cannot be opened.
    """
    found = _open(model, load_format, seed, tokenizer, log, read, device, works)
    found.config = found.config.for_length(max_model_len)
    return found


def _open(
    model: str,
    load_format: str,
    seed: int,
    tokenizer: str | None,
    log: Log | None,
    read: Read,
    device: str,
    works: str | None,
) -> Checkpoint:
    override = open_tokenizer(tokenizer, log) if tokenizer else None
    if load_format == "dummy":
        return _open_dummy(model, seed, override, read, device)
    from specbatch.weights.known_models import KNOWN_MODELS, pull

    path = Path(os.path.expanduser(model))
    if model in KNOWN_MODELS:
        _refuse_safetensors(load_format, model)
        known = KNOWN_MODELS[model]
        return _open_gguf(pull(model, log), model, known.origin, override, log, known.sha256)
    # os.path reports a name that is too long or not allowed as missing; pathlib raises.
    if os.path.isfile(path) and path.suffix == ".gguf":
        _refuse_safetensors(load_format, model)
        return _open_gguf(path, path.stem, str(path), override, log)
    if os.path.isdir(path):
        return _open_folder(path, path.resolve().name, str(path), load_format, override, log, read)
    if _looks_like_a_path(model):
        found = "this file is not a model" if os.path.exists(path) else "no such file"
        raise refuse("model", model, f"{found}; give a .gguf file or a folder with config.json and safetensors")
    return _open_hub(model, load_format, override, log, read, works)


def _open_dummy(model: str, seed: int, tokenizer: Tokenizer | None, read: Read, device: str) -> Checkpoint:
    from specbatch.weights.dummy import SHAPES, DummyCheckpoint

    path = Path(os.path.expanduser(model))
    if model in SHAPES:
        config, name = SHAPES[model], model
    elif os.path.isdir(path) and (path / "config.json").is_file():
        config, name = read_config(path / "config.json"), path.resolve().name
    elif os.path.isfile(path) and path.suffix == ".json":
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


def _open_hub(
    model: str, load_format: str, tokenizer: Tokenizer | None, log: Log | None, read: Read, works: str | None
) -> Checkpoint:
    from specbatch.weights import hub
    from specbatch.weights.known_models import KNOWN_MODELS
    from specbatch.weights.shapes import SHAPES

    if model in SHAPES or model == "dummy":
        kind = "a named shape, which has" if model in SHAPES else "a draft with"
        raise refuse("model", model, f"is {kind} random weights only; add load_format='dummy'")
    works = works or (
        f"give a known name ({', '.join(KNOWN_MODELS)}), a folder or a .gguf file; "
        "without access to the hub: specbatch models pull smollm2-135m"
    )
    if model.count("/") != 1:
        raise refuse("model", model, f"no such name, file or folder; {works}")
    if load_format == "gguf":
        raise refuse("load_format", load_format, f"from the hub only safetensors are fetched; {works}")
    folder = hub.snapshot("model", model, hub.MODEL_FILES, works=works)
    return _open_folder(folder, model, model, load_format, tokenizer, log, read)


def open_tokenizer(tokenizer: str, log: Log | None = None) -> Tokenizer:
    """The tokenizer of a known model, of a .gguf file, of a folder (with tokenizer.json or a single .gguf) or of a hub
    id, in this order. `log` receives lines about downloads and about files that disagree. Raises SpecbatchError if
    there is none."""
    from specbatch.text.tokenizer import Tokenizer
    from specbatch.weights import hub
    from specbatch.weights.known_models import KNOWN_MODELS, pull

    path = Path(os.path.expanduser(tokenizer))
    if tokenizer in KNOWN_MODELS:
        return _tokenizer_of_gguf(pull(tokenizer, log), tokenizer)
    if os.path.isfile(path) and path.suffix == ".gguf":
        return _tokenizer_of_gguf(path, tokenizer)
    if not os.path.isdir(path):
        if _looks_like_a_path(tokenizer) or tokenizer.count("/") != 1:
            names = ", ".join(KNOWN_MODELS)
            works = f"give a known name ({names}), a folder with tokenizer.json, a .gguf file or a hub id"
            raise refuse("tokenizer", tokenizer, f"no such name, file or folder; {works}")
        path = hub.snapshot("tokenizer", tokenizer, hub.TOKENIZER_FILES, works="give a folder with tokenizer.json")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return _tokenizer_of_gguf(ggufs[0], tokenizer)
    return Tokenizer.from_folder(path, name=tokenizer, log=log)


def _tokenizer_of_gguf(path: Path, name: str) -> Tokenizer:
    """The tokenizer of a GGUF file, whose weights are not converted."""
    from specbatch.text.tokenizer import Tokenizer
    from specbatch.weights.gguf_tokenizer import write_tokenizer

    with TemporaryDirectory() as scratch:
        try:
            write_tokenizer(path, Path(scratch))
        except SpecbatchError as error:
            if error.setting != "model" or error.works is None:
                raise
            raise refuse("tokenizer", error.value, error.works) from None
        return Tokenizer.from_folder(Path(scratch), name=name)


def _refuse_safetensors(load_format: str, model: str) -> None:
    if load_format == "safetensors":
        raise refuse("load_format", load_format, f"{model} is a GGUF file; use 'auto' or 'gguf'")


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".json", ".safetensors")) or os.path.exists(name)
