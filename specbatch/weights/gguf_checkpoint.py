"""GGUF checkpoints: a file is converted once to a checkpoint folder in the cache, which is opened from then on.

The folder's name is the sha256 of the file. Quantized tensors are stored as float32, which represents the dequantized
values exactly; float32, float16 and bfloat16 tensors keep their dtype, and experts of gpt-oss in MXFP4 stay so.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.files.text_files import UnreadableError, open_regular
from specbatch.models.config import ModelConfig
from specbatch.models.gguf_layout import GgufLayout
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights.cache import cache_folder, file_hash, keep, staging
from specbatch.weights.checkpoint import Log
from specbatch.weights.folder import FolderCheckpoint, check_tensors
from specbatch.weights.gguf_file import GgufFile, layout_of, read_config, rename
from specbatch.weights.gguf_groups import grouped_bytes, grouped_weight, has_groups
from specbatch.weights.gguf_tensors import Stored, dequantize_tensor, join_experts

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.grouped import GroupedWeight
    from specbatch.weights.gguf_header import GgufTensor

SHARD_BYTES = 1 << 30  # size of the files with converted weights, which bounds the memory in use
FORMAT = "gguf-3"  # the cache's subfolder; raise the number when the conversion changes


class GgufCheckpoint(FolderCheckpoint):
    """A GGUF file, opened as its converted folder in the cache."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        origin: str,
        tokenizer: Tokenizer | None = None,
        log: Log | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(convert(path, log, sha256), name=name, origin=origin, tokenizer=tokenizer)
        self.path = path
        self.grouped = _Grouped(path)
        if self.config.rope.source == "rope_parameters":
            self.config = replace(self.config, rope=replace(self.config.rope, source="gguf"))

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None and not (self.folder / "tokenizer.json").is_file():
            from specbatch.weights.gguf_tokenizer import write_tokenizer

            write_tokenizer(self.path, self.folder)
        return super().tokenizer()


class _Grouped:
    """The quantized matrices of a file, as a `GroupedSource`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _tensors(self) -> dict[str, tuple[GgufTensor, int | None]]:
        """By name in the checkpoint, with the heads by which rows are permuted."""
        file = GgufFile(self._path)
        permuted = permuted_heads(layout_of(file), read_config(file))
        return {
            name: (stored.parts[0], permuted.get(name.split(".")[-2]))
            for name, stored in join_experts(file, rename(file)).items()
            if stored.make is dequantize_tensor and has_groups(stored.parts[0])
        }

    @cached_property
    def bytes(self) -> dict[str, int]:
        return {name: grouped_bytes(tensor) for name, (tensor, _) in self._tensors.items()}

    def __call__(self, name: str) -> GroupedWeight:
        return grouped_weight(*self._tensors[name])


def convert(path: Path, log: Log | None = None, sha256: str | None = None) -> Path:
    """Convert a GGUF file to a checkpoint folder in the cache (config, safetensors), unless it is there already.

    `sha256` is that of the file, if it is known; hashing a large file takes seconds. Raises SpecbatchError for a
    damaged file or an unsupported architecture, quantization or rope.
    """
    try:
        target = cache_folder() / FORMAT / (sha256 or _hash_of(path, _version(path)))
    except UnreadableError as error:
        raise refuse("model", str(path), f"it {error}") from None
    except OSError as error:
        raise refuse("model", str(path), f"it cannot be read ({error.strerror})") from None
    if target.is_dir():
        return target
    file = GgufFile(path)
    config = read_config(file)
    tensors = join_experts(file, rename(file))
    model = ModelConfig.from_dict(config)
    shapes = {name: tensor.shape for name, tensor in tensors.items() if not model.is_mtp(name)}
    check_tensors(tensor_shapes(model.fit(shapes)), shapes, path)
    size = sum(4 * tensor.size for tensor in tensors.values())
    if log:
        log(f"dequantizing {path.name} once, to {size / 2**30:.1f} GiB in {target}")
    with staging(size) as scratch:
        folder = scratch / "model"
        folder.mkdir()
        _write(folder, tensors, config, layout_of(file))
        keep(folder, target)
    return target


@cache
def _hash_of(path: Path, version: tuple[int, ...]) -> str:
    """`file_hash` of one version of a file. Each configuration of a sweep asks for it."""
    return file_hash(path)


def _version(path: Path) -> tuple[int, ...]:
    """What differs after the file at `path` has been written or replaced."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write(folder: Path, tensors: dict[str, Stored], config: dict[str, Any], layout: GgufLayout) -> None:
    """Write config, index and the dequantized tensors, in files of about SHARD_BYTES, with a few threads."""
    from safetensors.torch import save_file

    permuted = permuted_heads(layout, config)

    def converted(name: str) -> torch.Tensor:
        tensor, heads = tensors[name], permuted.get(name.split(".")[-2])
        found = tensor.tensor() if heads is None else dequantize_tensor(tensor.parts[0], heads)
        # Files hold what a norm multiplies by.
        return found.float() - layout.norm_offset if layout.norm_offset and name.endswith("norm.weight") else found

    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=4) as pool:
        for number, names in enumerate(_shards(tensors)):
            shard = f"model-{number:05d}.safetensors"
            save_file(dict(zip(names, pool.map(converted, names), strict=True)), folder / shard)
            weight_map |= dict.fromkeys(names, shard)
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def permuted_heads(layout: GgufLayout, config: dict[str, Any]) -> dict[str, int]:
    """The projections whose rows a file has in another order, and their heads."""
    if not layout.interleaved_qk:
        return {}
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def _shards(tensors: dict[str, Stored]) -> list[list[str]]:
    """Names in groups of about SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size >= SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 4 * tensor.size
    return shards
