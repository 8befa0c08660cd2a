"""GGUF files: converted once to an ordinary checkpoint folder in the cache, and opened from there ever after.

The folder is keyed by the sha256 of the whole file. Quantised tensors are stored as float32, which holds the
dequantised values exactly; float32, float16 and bfloat16 tensors are stored as they are.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.errors import refuse
from specbatch.models.config import FAMILIES, ModelConfig
from specbatch.tokenizer import Tokenizer
from specbatch.weights import Log
from specbatch.weights.bundled import file_hash
from specbatch.weights.cache import cache_folder, keep, staging
from specbatch.weights.folder import FolderCheckpoint, check_tensors

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30  # converted weights are written in files of about this size, to bound the memory in use
FORMAT = "gguf-1"  # the cache's subfolder; raise the number when the conversion changes

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_KEYS = {
    "dimension_count",
    "freq_base",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
}


class GgufFile:
    """An open GGUF file: `metadata(key)`, and its `tensors` by their GGUF names."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # a damaged file fails wherever the reader first trips over it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            works = f"it is not a whole GGUF file ({reason}); download it again"
            raise refuse("model", str(path), works) from None
        if self._reader.byte_order == "S":
            raise refuse(
                "model", str(path), "big-endian GGUF files are not supported; use the little-endian one"
            )
        if self.metadata("split.count", 1) > 1:
            raise refuse(
                "model", str(path), "it is one part of several; merge them with llama-gguf-split --merge"
            )
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def metadata(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def keys(self, prefix: str) -> list[str]:
        return [key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)]

    def required(self, key: str) -> Any:
        value = self.metadata(key)
        if value is None:
            raise refuse("model", str(self.path), f"its metadata lack {key}")
        return value


class GgufCheckpoint(FolderCheckpoint):
    """A GGUF file, opened through its converted folder in the cache."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        origin: str,
        tokenizer: Tokenizer | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(convert(path, log), name=name, origin=origin, tokenizer=tokenizer)
        self.path = path
        if self.config.rope.source == "rope_parameters":
            self.config = replace(self.config, rope=replace(self.config.rope, source="gguf"))

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None and not (self.folder / "tokenizer.json").is_file():
            from specbatch.weights.gguf_tokenizer import write_tokenizer

            write_tokenizer(self.path, self.folder)
        return super().tokenizer()


def convert(path: Path, log: Log | None = None) -> Path:
    """The cache's checkpoint folder of a GGUF file (config, safetensors), made now if it is not there yet.

    Raises SpecbatchError for a damaged file, an unsupported architecture, quantisation or rope.
    """
    target = cache_folder() / FORMAT / file_hash(path)
    if target.is_dir():
        return target
    file = GgufFile(path)
    config = read_config(file)
    tensors = rename(file)
    shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}
    check_tensors(ModelConfig.from_dict(config), shapes, path)
    size = sum(4 * tensor.n_elements for tensor in tensors.values())
    if log:
        log(f"dequantising {path.name} once, to {size / 2**30:.1f} GiB in {target}")
    with staging(size) as scratch:
        folder = scratch / "model"
        folder.mkdir()
        _write(folder, tensors, config)
        keep(folder, target)
    return target


def read_config(file: GgufFile) -> dict[str, Any]:
    """A GGUF's metadata as a `config.json`."""
    arch = file.required("general.architecture")
    architecture = {family: name for name, family in FAMILIES.items()}.get(arch)
    if architecture is None:
        raise refuse("general.architecture", arch, f"supported GGUF files are {', '.join(FAMILIES.values())}")
    if file.metadata(f"{arch}.expert_count", 0):
        raise refuse(
            f"{arch}.expert_count", file.metadata(f"{arch}.expert_count"), "only dense models are supported"
        )

    heads = same_in_all_layers(f"{arch}.attention.head_count", file.required(f"{arch}.attention.head_count"))
    key = f"{arch}.attention.head_count_kv"
    hidden = file.required(f"{arch}.embedding_length")
    head_dim = file.metadata(f"{arch}.attention.key_length", hidden // heads)
    for other in ("attention.value_length", "rope.dimension_count"):
        if file.metadata(f"{arch}.{other}", head_dim) != head_dim:
            raise refuse(
                f"{arch}.{other}", file.metadata(f"{arch}.{other}"), f"it must be the head size, {head_dim}"
            )
    key_inner = f"{arch}.feed_forward_length"
    config = {
        "architectures": [architecture],
        "model_type": arch,
        "vocab_size": int(_tensor(file, "token_embd.weight").shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": same_in_all_layers(key_inner, file.required(key_inner)),
        "num_hidden_layers": file.required(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": same_in_all_layers(key, file.metadata(key, heads)),
        "head_dim": head_dim,
        "max_position_embeddings": file.required(f"{arch}.context_length"),
        "rms_norm_eps": _short(file.required(f"{arch}.attention.layer_norm_rms_epsilon")),
        "sliding_window": file.metadata(f"{arch}.attention.sliding_window") or None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, arch),
        "bos_token_id": file.metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata("tokenizer.ggml.eos_token_id"),
    }
    if config["sliding_window"]:
        config["use_sliding_window"], config["max_window_layers"] = True, 0
    return config


def _rope(file: GgufFile, arch: str) -> dict[str, Any]:
    for key in file.keys(f"{arch}.rope."):
        if key not in _ROPE_KEYS:
            raise refuse(
                f"{arch}.rope.{key}", file.metadata(f"{arch}.rope.{key}"), "this rope is not supported"
            )
    rope: dict[str, Any] = {"rope_type": "default"}
    theta = file.metadata(f"{arch}.rope.freq_base")
    if theta is not None:
        rope["rope_theta"] = _short(theta)
    scaling = f"{arch}.rope.scaling"
    kind = file.metadata(f"{scaling}.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _short(file.required(f"{scaling}.factor"))}
    elif kind != "none":
        raise refuse(f"{scaling}.type", kind, "supported are none, linear and yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.required(f"{scaling}.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if file.metadata(f"{scaling}.{theirs}") is not None:
                rope[ours] = _short(file.metadata(f"{scaling}.{theirs}"))
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise refuse(f"{scaling}.type", kind, "a file with rope_freqs.weight must have none")
        rope |= {"rope_type": "divisors", "divisors": file.tensors["rope_freqs.weight"].data.tolist()}
    return rope


def _tensor(file: GgufFile, name: str) -> Any:
    if name not in file.tensors:
        raise refuse("model", str(file.path), f"tensor {name} is missing")
    return file.tensors[name]


def same_in_all_layers(key: str, value: int | list[int]) -> int:
    """The one value of a key that may be a list with an entry per layer."""
    if isinstance(value, int):
        return value
    if len(set(value)) != 1:
        raise refuse(key, value, "layers that differ in size are not supported")
    return value[0]


def _short(value: float) -> float:
    """A float32 of the file as the number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rename(file: GgufFile) -> dict[str, Any]:
    """Tensors by their checkpoint names. One that the architecture does not know is refused."""
    renamed = {}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue  # part of the rope's description
        stem, _, kind = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            known, known_name = part in _LAYER_NAMES, f"model.layers.{layer}.{_LAYER_NAMES.get(part)}.{kind}"
        else:
            known, known_name = stem in _NAMES, f"{_NAMES.get(stem)}.{kind}"
        if not known:
            raise refuse("model", str(file.path), f"no supported model has its tensor {name}")
        renamed[known_name] = tensor
    return renamed


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k matrix [heads * head_dim, in] (or bias) from interleaved pairs to halves, per head."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Write config, index and the tensors in files of about SHARD_BYTES, dequantised on a few threads."""
    from safetensors.torch import save_file

    permuted = {}
    if config["model_type"] == "llama":  # only these files store q and k for the other pairing of rope
        permuted = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def converted(name: str) -> torch.Tensor:
        return dequantise(tensors[name], permuted.get(name.split(".")[-2]))

    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=4) as pool:
        for number, names in enumerate(_shards(tensors)):
            shard = f"model-{number:05d}.safetensors"
            save_file(dict(zip(names, pool.map(converted, names), strict=True)), folder / shard)
            weight_map |= dict.fromkeys(names, shard)
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(tensors: dict[str, Any]) -> list[list[str]]:
    """Names in groups of about SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size >= SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 4 * tensor.n_elements
    return shards


def dequantise(tensor: Any, permuted_heads: int | None) -> torch.Tensor:
    """One tensor in its own type or float32, its rows in the order of the checkpoint."""
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, values = tensor.tensor_type, tensor.data
    if kind == GGMLQuantizationType.BF16:
        values = values.view(np.uint16)  # numpy has no bfloat16; torch reads the same bits below
    elif kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        try:
            values = dequantize(values, kind)
        except NotImplementedError:
            raise refuse(tensor.name, kind.name, "use a file in Q4_K_M, Q8_0, F16 or another") from None
    if permuted_heads is not None:
        values = unpermute(values, permuted_heads)
    stored = torch.from_numpy(np.array(values))  # a copy: the file's own memory must not be written to
    return stored.view(torch.bfloat16) if kind == GGMLQuantizationType.BF16 else stored
