"""Checkpoint folders as published on the hub: config.json, safetensors (one file or shards), tokenizer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import SpecbatchError, refuse, shown
from specbatch.files.config_values import table_of
from specbatch.files.text_files import UnreadableError, open_regular
from specbatch.models.config import ModelConfig
from specbatch.models.formats.cache_scales import is_of_cache
from specbatch.models.formats.format import SCALES, Format, is_input_scale, scaled
from specbatch.models.formats.grouped import GroupedSource
from specbatch.models.formats.registry import FILE_TYPES, FORMATS
from specbatch.models.formats.settings import KEY
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights.checkpoint import Log, Read, read_config

if TYPE_CHECKING:
    import torch

_TYPES = ("F32", "F16", "BF16", *FILE_TYPES)  # of safetensors
LM_HEAD = "lm_head.weight"
MAPS = ("d2t", "t2d")  # maps between the vocabularies of a draft and its target, with integer or bool dtype


class SafetensorsFiles:
    """The tensors of a folder's safetensors (one file or shards). Headers are read and files checked for completeness.

    shapes  name -> shape, without rope tables
    types   name -> type of safetensors
    bytes   size of the tensors as stored
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        self.bytes = 0
        quantized: dict[str, tuple[str, Path]] = {}  # weights that keep their name: type and file
        for path, expected in _weight_files(folder).items():
            file = _open_file(path)
            held = list(file.keys())
            for name in sorted(expected - set(held)):
                raise _damaged(path, f"the index lists {name} in it, but it is missing")
            for name in held:
                if expected and name not in expected:
                    continue
                view = file.get_slice(name)
                kind, (types, works) = view.get_dtype(), _types_of(name)
                if kind not in types and name.rpartition(".")[2] not in MAPS:
                    raise _damaged(path, f"tensor {name} is {kind}; {works}")
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # rope frequencies in old files are not weights
                if kind in FILE_TYPES and not is_of_cache(name) and not _is_part(name):
                    quantized[name] = kind, path
                self._files[name], self.types[name] = file, kind
                self.shapes[name] = tuple(view.get_shape())
                bits = re.search(r"\d+", kind)
                self.bytes += math.prod(view.get_shape()) * (int(bits[0]) // 8 if bits else 8)
        for name, (kind, path) in quantized.items():
            if not any(name + suffix in self.shapes for suffix in SCALES):
                raise _damaged(
                    path, f"tensor {name} is {kind} and there is no {' or '.join(name + end for end in SCALES)}"
                )
        for name in self.shapes:
            weight = scaled(name)
            if weight is not None and weight not in quantized and f"{weight}_packed" not in self.shapes:
                raise _damaged(folder, f"there is {name}, but no {' or '.join(FILE_TYPES)} tensor that it scales")

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found


class FolderCheckpoint:
    """A checkpoint folder. All tensors are present with the expected shapes, and no file is truncated."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        origin: str,
        tokenizer: Tokenizer | None = None,
        read: Read = ModelConfig.from_dict,
        log: Log | None = None,
    ) -> None:
        self.folder = folder
        self.name = name
        self.origin = origin
        self.grouped: GroupedSource | None = None
        self._tokenizer = tokenizer
        self._log = log
        if not (folder / "config.json").is_file():
            raise refuse("model", str(folder), f"the folder has safetensors but no config.json{lora_hint(folder)}")
        self.config = read(_described(folder))
        self._tensors = SafetensorsFiles(folder)
        self.bytes = self._tensors.bytes
        stored = self.config.quantization
        self._respelled = {} if stored is None else stored.respelled(self._tensors.shapes)
        found = self._tensors.shapes | self._respelled
        self.cache = {name: found.pop(name) for name in filter(is_of_cache, [*found])}
        if stored is not None:
            stored = stored.for_values(found, self._tensors.tensor)
            self.config = replace(self.config, quantization=stored)
        unused = [] if stored is None else [name for name in found if stored.is_unused(name)]
        scales = list(filter(is_input_scale, unused))
        if scales and log is not None:
            quantizes = stored is not None and any(form.has_fp8_gemm for form in stored.forms)
            works = "activations get scales as the model runs" if quantizes else "activations are not quantized"
            log(f"{name}: {len(scales)} scales are not used, such as {min(scales)}: {works}")
        head = {name: shape for name, shape in found.items() if self.config.is_mtp(name)}
        spare = [name for name in found if self.config.is_spare(name)]
        if spare and log is not None:
            log(f"{name}: {len(spare)} tensors are not used for text and not read, such as {min(spare)}")
        own = {name: shape for name, shape in found.items() if name not in head and name not in spare}
        self.config = self.config.fit(own)
        own, self.mtp = ({name: part[name] for name in part if name not in unused} for part in (own, head))
        _check_ends(self.config, own, folder)
        wanted = tensor_shapes(self.config)
        if stored is not None:
            idle = [name for name in own if name not in wanted and stored.is_idle(name, own, self._tensors.tensor)]
            own = {name: shape for name, shape in own.items() if name not in idle}
            self._check_types(stored, (*own, *self.mtp))
        check_tensors(wanted, own, folder)
        self._names = list(own)

    def _check_types(self, stored: Format, names: Iterable[str]) -> None:
        """Refuse parts of quantized weights in types that another format has."""
        for name in names:
            kind = self._tensors.types[name]
            types = stored.types_of(name) if kind in FILE_TYPES or stored.weight_of(name) else None
            if types is not None and kind not in types:
                own = stored.of(stored.weight_of(name) or name).name
                works = f"tensor {name} is {kind}; {own} has it in {' or '.join(types)}"
                raise refuse("model", str(self.folder), works)

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors.tensor(name)
        shape = self._respelled.get(name)
        if shape is None:
            return stored
        return stored.reshape(shape) if stored.numel() == math.prod(shape) else stored.reshape(-1, 1).expand(shape)

    def tokenizer(self) -> Tokenizer:
        most = self.config.vocab_size
        found = self._tokenizer or Tokenizer.from_folder(self.folder, name=self.name, log=self._log, most=most)
        if found.vocab_size > most:
            works = f"it has {found.vocab_size} ids and {self.name} has embeddings for {most}"
            raise refuse("tokenizer", found.name, works)
        self._tokenizer = found  # cached: a draft's vocabulary is compared with it
        return found


def lora_hint(folder: Path) -> str:
    """The end of a message about a folder without config.json."""
    return "; it has a LoRA, for which use algorithm 'uno'" if (folder / "adapter_config.json").is_file() else ""


def _described(folder: Path) -> dict[str, Any]:
    """The config.json, with the quantization that ModelOpt describes in a file beside it: old versions only there, and
    later ones the size of groups."""
    described, beside = read_config(folder / "config.json"), folder / "hf_quant_config.json"
    found = table_of(described, KEY)
    if found.get("quant_method", "modelopt") == "modelopt" and beside.is_file():
        described[KEY] = {"quant_method": "modelopt"} | table_of(read_config(beside), "quantization") | found
    return described


def _types_of(name: str) -> tuple[tuple[str, ...], str]:
    """The types of safetensors that a tensor of this name may have, and what an error message says of others."""
    found = [part for form in FORMATS if (part := form.types_of_part(name)) is not None]
    if not found:
        return _TYPES, f"supported are {', '.join(_TYPES)}"
    types, works = zip(*found, strict=True)
    return tuple(kind for some in types for kind in some), "; ".join(works)


def _is_part(name: str) -> bool:
    """Whether a tensor is a part of a quantized weight, such as its scales, under a name of its own."""
    return scaled(name) is not None or any(form.types_of_part(name) for form in FORMATS)


def _check_ends(config: ModelConfig, found: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse a quantized embedding or output matrix."""
    if config.quantization is None:
        return
    for name in found:
        weight = config.quantization.weight_of(name) or ""
        if weight.removesuffix(".weight") in config.unquantized_ends:
            works = f"{weight} is quantized, and an embedding or output matrix must not be; put it on the ignore list"
            raise refuse("model", str(folder), works)


def check_tensors(
    wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: Path | str, setting: str = "model"
) -> None:
    """Refuse a model or draft (`setting`) whose tensors (name -> shape) differ from those of its config."""
    for name, shape in wanted.items():
        if name not in found:
            hint = "; is tie_word_embeddings missing in its config?" if name == LM_HEAD else ""
            raise refuse(setting, str(where), f"tensor {name} is missing{hint}")
        if found[name] != shape:
            works = f"tensor {name} is {list(found[name])}; its config requires {list(shape)}"
            raise refuse(setting, str(where), works)
    for name in found:
        if name not in wanted:
            # Ignoring it would compute another model.
            raise refuse(setting, str(where), f"its config describes no tensor {name}, but the file has one")


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """File -> names of its tensors; an empty set means all tensors of the file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_config(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _damaged(index, "it has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file:
                raise _damaged(index, f"its weight_map has {shown(file)} for {shown(name)}; it must name a file")
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise _damaged(index, f"its weight_map names {shown(file)}, which is outside of the folder")
            files.setdefault(folder / file, set()).add(name)
        return files
    found = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in found:
        return {folder / "model.safetensors": set()}
    if len(found) != 1:
        raise _damaged(folder, f"{len(found)} safetensors files and no model.safetensors.index.json")
    return {found[0]: set()}


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(path):
        raise _damaged(path, "the file is in the index, but missing")
    try:
        open_regular(path).close()
    except UnreadableError as error:
        raise _damaged(path, f"it {error}") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise _damaged(path, f"it is damaged or truncated ({reason}); download it again") from None


def _damaged(path: Path, what: str) -> SpecbatchError:
    return refuse("model", str(path), what)
