"""GGUF files: reads their metadata as a config.json, and renames their tensors to checkpoint names.

Unknown architectures, rope scalings and tensors are refused: ignoring them would compute another model.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.config_values import count_of, positive_of
from specbatch.files.text_files import UnreadableError
from specbatch.models.gguf_layout import LAYER_NAMES, GgufLayout, short
from specbatch.models.registry import family_modules

if TYPE_CHECKING:
    from specbatch.weights.gguf_header import GgufTensor

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NAMES |= {"token_embd_norm": "model.embedding_norm"}  # the final norm of LFM2
_NO_TOKEN = (-1, 2**32 - 1, 2**64 - 1)  # llama.cpp's LLAMA_TOKEN_NULL, -1, also as an unsigned number
_DIVISORS = "rope_freqs.weight"
_SCALES = ("scale", "input_scale")  # beside a weight in NVFP4
_ROPE_KEYS = {
    ".rope.dimension_count",
    ".rope.freq_base",
    ".rope.scaling.type",
    ".rope.scaling.factor",
    ".rope.scaling.original_context_length",
    ".rope.scaling.finetuned",
    ".rope.scaling.yarn_beta_fast",
    ".rope.scaling.yarn_beta_slow",
}


class GgufFile:
    """An open GGUF file. is_whole: refuse one part of several, of which the first has all metadata.

    arch     its `general.architecture`
    tensors  name in the file -> tensor
    """

    def __init__(self, path: Path, *, is_whole: bool = True) -> None:
        from specbatch.weights.gguf_header import GgufError, read_gguf

        self.path = path
        try:
            self._metadata, self.tensors = read_gguf(path)
        except (GgufError, UnreadableError) as error:
            raise self.refusal(str(error)) from None
        if is_whole and self.metadata("split.count", 1) != 1:
            raise self.refusal("it is one part of several; merge them with llama-gguf-split --merge")
        self.arch: str = self.required("general.architecture", str)

    def refusal(self, works: str) -> SpecbatchError:
        return refuse("model", str(self.path), works)

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a key: a text, a number, a boolean or a list of them. A key that starts with a dot gets the
        architecture as prefix."""
        return self._metadata.get(self.full(key), default)

    def token_ids(self, role: str, count: int = 2**31) -> list[int]:
        """The ids of the tokens with a role, such as "bos", of which the file has `count` tokens. It states one id or
        a list, or a number that means that there is no such token."""
        key = f"tokenizer.ggml.{role}_token_id"
        stated = self.metadata(key)
        listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
        found = list(dict.fromkeys(index for index in listed if index not in _NO_TOKEN))
        if not all(type(index) is int and 0 <= index < count for index in found):
            raise refuse(key, stated, f"it must be the id of one of {count} tokens")
        return found

    def required(self, key: str, *kinds: type) -> Any:
        """The value of a key, of one of these types, if any are given."""
        value = self.metadata(key)
        if value is None:
            raise self.refusal(f"its metadata has no {self.full(key)}")
        if kinds and type(value) not in kinds:
            raise refuse(self.full(key), value, f"it must be of type {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """The whole number of at least `least` under a key; without a default it is required."""
        return count_of({self.full(key): self.metadata(key)}, self.full(key), default, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under a key; without a default it is required."""
        return positive_of({self.full(key): self.metadata(key)}, self.full(key), default)

    def vector(self, name: str) -> list[float]:
        """The numbers of a tensor that is part of the settings."""
        found = self.tensors[name].data if name in self.tensors else np.empty(())
        if found.dtype != np.float32 or found.ndim != 1:
            raise self.refusal(f"tensor {name} must be a vector of float32 numbers")
        return [float(number) for number in found]

    def full(self, key: str) -> str:
        return f"{self.arch}{key}" if key.startswith(".") else key

    def keys(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, in the form that `metadata` takes."""
        return [
            prefix + key.removeprefix(self.full(prefix)) for key in self._metadata if key.startswith(self.full(prefix))
        ]


@cache
def layouts() -> dict[str, GgufLayout]:
    """The layouts of all families by `general.architecture`."""
    return {
        arch: layout for name in family_modules() for arch, layout in vars(import_module(name)).get("GGUF", {}).items()
    }


def layout_of(file: GgufFile) -> GgufLayout:
    layout = layouts().get(file.arch)
    if layout is None:
        raise refuse("general.architecture", file.arch, f"supported are {', '.join(layouts())}")
    return layout


def read_config(file: GgufFile) -> dict[str, Any]:
    """A GGUF's metadata as a `config.json`."""
    layout = layout_of(file)
    if file.metadata(".expert_count", 0) and not layout.is_mixture:
        mixtures = ", ".join(arch for arch, each in layouts().items() if each.is_mixture)
        works = f"mixtures of experts are read from {mixtures} files; use safetensors for others"
        raise refuse(file.full(".expert_count"), file.metadata(".expert_count"), works)
    if "token_embd.weight" not in file.tensors:
        raise file.refusal("tensor token_embd.weight is missing")
    heads, hidden = _same_in_all_layers(file, ".attention.head_count"), file.count(".embedding_length")
    head_dim = file.count(".attention.key_length", hidden // heads)
    for key in (".attention.value_length", *[".rope.dimension_count"] * layout.rotates_all):
        if file.metadata(key, head_dim) != head_dim:
            raise refuse(file.full(key), file.metadata(key), f"it must equal the head size, {head_dim}")
    window = file.metadata(".attention.sliding_window")
    if window and not layout.has_windows:
        windowed = ", ".join(arch for arch, each in layouts().items() if each.has_windows)
        works = f"of GGUF files those of {windowed} may have windows; use safetensors"
        raise refuse(file.full(".attention.sliding_window"), window, works)
    kv_heads = _same_in_all_layers(
        file, ".attention.head_count_kv", heads, others=(0,) if layout.has_convolutions else ()
    )
    # Mixtures without dense layers state the width of experts only.
    inner = file.count(".expert_feed_forward_length") if layout.is_mixture else None
    usual = {
        "architectures": [layout.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _same_in_all_layers(file, ".feed_forward_length", inner),
        "num_hidden_layers": file.required(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.required(".context_length"),
        "rms_norm_eps": short(file.number(".attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, layout, head_dim),
        "bos_token_id": next(iter(file.token_ids("bos")), None),
        "eos_token_id": file.token_ids("eos"),
    }
    return usual | layout.settings(file, usual)


def _rope(file: GgufFile, layout: GgufLayout, head_dim: int) -> dict[str, Any]:
    for key in file.keys(".rope."):
        if key not in _ROPE_KEYS and key not in layout.rope_keys:
            raise refuse(file.full(key), file.metadata(key), "rope with this key is not supported")
    rope: dict[str, Any] = {"rope_type": "default"}
    if file.metadata(".rope.freq_base") is not None:
        rope["rope_theta"] = short(file.number(".rope.freq_base"))
    has_factor = file.metadata(".rope.scaling.factor") is not None
    kind = file.metadata(".rope.scaling.type", "linear" if has_factor else "none")  # as in llama.cpp
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": short(file.number(".rope.scaling.factor"))}
    elif kind != "none":
        raise refuse(file.full(".rope.scaling.type"), kind, "supported are none, linear and yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.required(".rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            key = f".rope.scaling.yarn_{name}"
            if file.metadata(key) is not None:
                rope[name] = short(file.number(key))
    if not layout.rotates_all:
        rope["partial_rotary_factor"] = file.count(".rope.dimension_count", head_dim) / head_dim
    if _DIVISORS in file.tensors:
        if kind != "none":
            raise refuse(file.full(".rope.scaling.type"), kind, f"with {_DIVISORS} it must be none")
        rope |= {"rope_type": "divisors", "divisors": file.vector(_DIVISORS)}
    return rope


def _same_in_all_layers(file: GgufFile, key: str, default: int | None = None, *, others: tuple[int, ...] = ()) -> int:
    """The value of a key that may have a list with one value per layer. others: values of layers that do not count."""
    value = file.required(key) if default is None else file.metadata(key, default)
    layers = [one for one in value if one not in others] if isinstance(value, list) else [value]
    if len(set(layers)) != 1:
        raise refuse(file.full(key), value, "layers that differ in size are not supported")
    return count_of({file.full(key): layers[0]}, file.full(key))


def rename(file: GgufFile) -> dict[str, GgufTensor]:
    """Tensors by their checkpoint names. Unknown ones are refused. Those in NVFP4 have their `scale`; `input_scale` is
    of activations, which are not quantized here."""
    layout = layout_of(file)
    layer_names, of_rope = LAYER_NAMES | dict(layout.names), {_DIVISORS, *layout.rope_tensors}
    renamed = {}
    for name, tensor in file.tensors.items():
        weight, _, kind = name.rpartition(".")
        quantized = file.tensors.get(f"{weight}.weight")
        if name in of_rope or (kind in _SCALES and quantized is not None and quantized.kind.name == "NVFP4"):
            continue
        if (scale := file.tensors.get(f"{weight}.scale")) is not None and tensor.kind.name == "NVFP4":
            if scale.data.dtype != np.float32 or scale.shape not in ((1,), tensor.shape[:-2]):
                raise file.refusal(f"tensor {scale.name} is no number in F32, nor one for each matrix of a stack")
            if not (np.isfinite(scale.data) & (scale.data > 0)).all():
                raise file.refusal(f"tensor {scale.name} holds values that are not positive and finite; it is damaged")
            tensor = tensor._replace(scale=scale.data)
        if in_layer := re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name):
            names, (layer, inner) = layer_names, in_layer.groups()
            prefix = f"model.layers.{layer}."
        else:
            names, inner, prefix = NAMES, name, ""
        stem, _, kind = inner.rpartition(".")
        if inner not in names and stem not in names:
            raise file.refusal(f"tensor {name!r} is not part of any supported model")
        renamed[prefix + (names[inner] if inner in names else f"{names[stem]}.{kind}")] = tensor
    return renamed
