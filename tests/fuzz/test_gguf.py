"""Mutated GGUF files: each opens with its tokenizer or is refused in one line, in bounded time and memory."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from random import Random

import pytest
from checkpoints import Field, gguf_bytes, gguf_tensors, metadata, text_bytes
from fuzzing import Fuzz
from gguf.constants import GGMLQuantizationType, GGUFValueType
from limits import limited
from mutate import mutate_bytes

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint

EXTREMES = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**61,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
NUMBERS = {
    GGUFValueType.UINT32: [0, 1, 2, 3, 15, 64, 2**31 - 1, 2**31, 2**32 - 1],
    GGUFValueType.INT32: [0, -1, 1, 2**31 - 1, -(2**31)],
    GGUFValueType.UINT64: [0, 1, 2**63, 2**64 - 1],
    GGUFValueType.INT64: [0, -1, 2**63 - 1, -(2**63)],
    GGUFValueType.FLOAT32: [0.0, -0.0, 1e-38, 3e38, float("nan"), float("inf"), -1.0],
    GGUFValueType.FLOAT64: [0.0, 1e308, float("nan"), float("-inf"), 0.5],
    GGUFValueType.BOOL: [True, False],
    GGUFValueType.UINT8: [0, 255],
    GGUFValueType.STRING: ["", "\0", "a" * 10_000, "\ud800", "../..", "qwen2", "none", "yarn", "{{ 1", "Ġ"],
}
WHOLE = gguf_bytes()
HEADER = WHOLE.index(text_bytes("output_norm.weight")) + 200


def _field(random: Random, item: Field) -> Field:
    """Another value of the same type, or one of another type."""
    if item.kind == GGUFValueType.ARRAY and random.random() < 0.6:
        value = list(item.value)
        options = NUMBERS[item.items or GGUFValueType.UINT32]
        match random.randrange(4):
            case 0:
                value = value[: random.randrange(len(value) + 1)]
            case 1:
                value *= 2
            case 2 if value:
                value[random.randrange(len(value))] = random.choice(options)
            case _:
                value.append(random.choice(options))
        return Field(item.kind, item.items, value)
    kind = item.kind if item.kind in NUMBERS and random.random() < 0.5 else random.choice(list(NUMBERS))
    if random.random() < 0.2:
        return Field(GGUFValueType.ARRAY, kind, random.choices(NUMBERS[kind], k=random.randrange(4)))
    return Field(kind, None, random.choice(NUMBERS[kind]))


def mutated(random: Random) -> bytes:
    match random.randrange(6):
        case 0:  # broken bytes anywhere
            return mutate_bytes(random, WHOLE)
        case 1:  # broken bytes in the header
            return mutate_bytes(random, WHOLE[:HEADER]) + WHOLE[HEADER:]
        case 2:  # extreme lengths and counts
            out = bytearray(WHOLE)
            for _ in range(random.randint(1, 2)):
                at = random.choice((8, 16, random.randrange(HEADER)))
                size = random.choice("IQ")
                struct.pack_into(f"<{size}", out, at, random.choice(EXTREMES) % 256 ** struct.calcsize(size))
            return bytes(out)
        case 3:  # other dimensions, types and offsets
            tensors = gguf_tensors()
            changes = {}
            for name in random.sample(list(tensors), k=random.randint(1, 2)):
                dims = [*tensors[name].shape][::-1]
                if random.random() < 0.7:
                    dims[random.randrange(len(dims))] = random.choice(EXTREMES)
                if random.random() < 0.3:
                    dims += random.choices(EXTREMES, k=random.randint(1, 4))
                kind = random.choice([0, 1, 30, random.choice(list(GGMLQuantizationType)), random.choice(EXTREMES)])
                offset = random.choice([0, 32, *EXTREMES])
                changes[name] = (len(dims), tuple(dims), kind % 2**32, offset)
            return gguf_bytes(tensors=tensors, changes=changes)
        case 4:  # removed, added and renamed tensors
            tensors = gguf_tensors()
            name = random.choice(list(tensors))
            tensor = tensors.pop(name)
            for _ in range(random.randrange(3)):
                other = random.choice(["blk.0.attn_q.bias", "blk.1.attn_q.weight", "blk.x", "blk..", "a", "", name])
                tensors[other] = tensor
            return gguf_bytes(tensors=tensors)
        case _:  # other values and types of metadata
            fields = metadata()
            for key in random.sample(list(fields), k=random.randint(1, 3)):
                if random.random() < 0.15:
                    del fields[key]
                else:
                    fields[key] = _field(random, fields[key])
            return gguf_bytes(fields)


def test_gguf_files(fuzz: Fuzz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    for random in fuzz.rounds(quick=60):
        path.write_bytes(mutated(random))
        try:
            with limited():
                checkpoint = open_checkpoint(str(path))
                for name in checkpoint.names():
                    checkpoint.tensor(name)
                fuzz.outcome("opened")
                checkpoint.tokenizer().encode("abc the 12")
                fuzz.outcome("with tokenizer")
        except SpecbatchError as error:
            fuzz.refused(error)
        finally:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
