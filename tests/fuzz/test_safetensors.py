"""Mutated safetensors, weight maps and torch files: each opens or is refused in one line, with bounded memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import write_folder
from draft_heads import eagle3, llama, write_head
from fuzzing import Fuzz
from limits import limited
from mutate import HOSTILE, dump_json, mutate_bytes, mutate_json_text, mutate_value

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint
from specbatch.weights.draft_heads import open_draft

HOSTILE_NAMES = ["", "a", "\x00", "../x", "model.layers.9.a.weight", "lm_head.weight", "mtp.fc.weight", "\ud800"]
SIZES = [0, 1, 7, 8, 2**20, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]


def mutated(random: Random, content: bytes) -> bytes:
    """Broken bytes, another header, or another length of the header."""
    size = struct.unpack_from("<Q", content)[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    match random.randrange(5):
        case 0:
            return mutate_bytes(random, content)
        case 1:
            return struct.pack("<Q", random.choice([*SIZES, size + 1, size - 1, size + 8])) + content[8:]
        case 2:
            name = random.choice([name for name in header if name != "__metadata__"])
            place = random.choice(("dtype", "shape", "data_offsets"))
            other: list[Any] = ["F64", "I64", "F8_E4M3", "U8", "BF16", "BOOL", [2**62, 4], [[0, 2**63]], [-1], [0, 0]]
            header[name][place] = random.choice(other + HOSTILE)
        case 3:
            names = list(header)
            header[random.choice(HOSTILE_NAMES)] = header.pop(random.choice(names))
        case _:
            header = mutate_value(random, header)
    text = dump_json(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def test_safetensors_of_models(fuzz: Fuzz, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for random in fuzz.rounds(quick=100):
        path.write_bytes(mutated(random, content))
        try:
            with limited():
                checkpoint = open_checkpoint(str(folder))
                assert all(isinstance(checkpoint.tensor(name), torch.Tensor) for name in checkpoint.names())
            fuzz.outcome("opened")
        except SpecbatchError as error:
            fuzz.refused(error)


def test_weight_maps(fuzz: Fuzz, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    names = open_checkpoint(str(folder)).names()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    path = folder / "model.safetensors.index.json"
    for random in fuzz.rounds(quick=100):
        path.write_bytes(mutate_json_text(random, json.dumps(index).encode()))
        try:
            with limited():
                open_checkpoint(str(folder))
            fuzz.outcome("opened")
        except SpecbatchError as error:
            fuzz.refused(error)


def test_draft_files(fuzz: Fuzz, tmp_path: Path) -> None:
    for binary in (False, True):
        write_head(tmp_path / str(binary), llama(draft_vocab_size=9), eagle3(), binary=binary)
    for random in fuzz.rounds(quick=60):
        binary = random.random() < 0.4
        folder = tmp_path / str(binary)
        path = folder / ("pytorch_model.bin" if binary else "model.safetensors")
        content = path.read_bytes()
        if binary:
            path.write_bytes(mutate_bytes(random, content) if random.random() < 0.7 else objects(random, tmp_path))
        else:
            path.write_bytes(mutated(random, content))
        try:
            with limited():
                files = open_draft(str(folder))
                assert all(files.tensor(name).shape == shape for name, shape in files.shapes.items())
            fuzz.outcome("opened")
        except SpecbatchError as error:
            fuzz.refused(error)
        finally:
            path.write_bytes(content)


def objects(random: Random, folder: Path) -> bytes:
    """A torch file of other objects than tensors, or of odd tensors."""
    values: list[Any] = [
        torch.zeros(1).expand(10**9), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"), torch.nn.Parameter(torch.zeros(2)), *HOSTILE,
    ]  # fmt: skip
    path = folder / "objects.bin"
    found: Any = {random.choice(["fc.weight", "", 5, None, "\ud800"]): random.choice(values) for _ in range(3)}
    torch.save(random.choice([found, found, found, random.choice(values)]), path)
    return path.read_bytes()
