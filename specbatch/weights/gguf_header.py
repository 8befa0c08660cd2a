"""Parser of GGUF files: metadata and tensors, with every count, length and offset checked against the file.

The reader of the gguf package trusts them: a wrong length makes it loop or allocate without end. It also keeps one
NumPy array per element of a list. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specbatch.files.text_files import open_regular

MOST_ITEMS = 1 << 22  # of a list; large vocabularies have 300,000 tokens
LONGEST_TEXT = 1 << 24  # bytes
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16
_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d", GGUFValueType.BOOL: "?",
}  # fmt: skip
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


class GgufError(ValueError):
    """What is wrong with a file, as the rest of a sentence."""


class GgufTensor(NamedTuple):
    """A tensor of a file.

    kind    of its values
    shape   as in a checkpoint: the fastest dimension last
    data    a read-only view of the file: float32 or float16 values, else bytes, with the blocks of a row last
    scale   what values are multiplied by, one number, or of a stack one for each matrix; None: nothing
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any] | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata by key and tensors by name. Raises GgufError, or UnreadableError if the file cannot be opened."""
    with open_regular(path) as file:
        if file.seek(0, 2) < 24:
            raise GgufError("it is not a complete GGUF file (it is shorter than a header)")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Parser(content).parse()


class _Parser:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != b"GGUF":
            raise GgufError("it is not a GGUF file (magic invalid)")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise GgufError("big-endian files are not supported; use the little-endian one")
        if version not in _VERSIONS:
            raise GgufError(f"it has version {version} of the format; supported are 2 and 3")
        tensors, keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in metadata:
                raise GgufError(f"its metadata has {key} twice")
            metadata[key] = self._value(self._type())
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise GgufError(f"its general.alignment is {alignment!r}; use a power of two up to {_MOST_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        return metadata, self._tensors(infos, start)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise GgufError("it is not a complete GGUF file; download it again")
        found = self._content[self._at : end]
        self._at = end
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _text(self) -> str:
        size = self._number("Q")
        if size > LONGEST_TEXT:
            raise GgufError(f"it has a text of {size} bytes; at most {LONGEST_TEXT} are read")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise GgufError("it has a text that is not UTF-8") from None

    def _type(self) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise GgufError(f"its metadata has a value of the unknown type {number}") from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        kind, count = self._type(), self._number("Q")
        if count > MOST_ITEMS:
            raise GgufError(f"its metadata has a list of {count} items; at most {MOST_ITEMS} are read")
        if kind == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise GgufError("its metadata has lists in a list, which are not supported")
        form = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def _tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Name, kind, shape and offset of a tensor."""
        name, dimensions = self._text(), self._number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise GgufError(f"its tensor {name!r} has {dimensions} dimensions; use 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise GgufError(f"its tensor {name!r} has the unknown type {number}") from None
        return name, kind, shape, offset

    def _tensors(
        self, infos: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], start: int
    ) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        left = len(self._content) - start
        for name, kind, shape, offset in infos:
            if name in found:
                raise GgufError(f"it has tensor {name!r} twice")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not all(shape) or shape[-1] % block:
                raise GgufError(f"its tensor {name!r} is {list(shape)}; rows of {kind.name} are multiples of {block}")
            size = math.prod(shape) // block * block_bytes
            left -= size
            if start + offset + size > len(self._content) or left < 0:  # together they may not share bytes, either
                raise GgufError(f"it is not a complete GGUF file (tensor {name!r} ends after it); download it again")
            data = np.frombuffer(self._content, np.uint8, size, start + offset).view(_PLAIN.get(kind, np.uint8))
            found[name] = GgufTensor(name, kind, shape, data.reshape(*shape[:-1], -1))
        return found
