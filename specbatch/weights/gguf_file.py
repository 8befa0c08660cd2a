"""GGUF files: metadata as a config.json, tensors under their checkpoint names.

Unknown architectures, rope scalings and tensors are refused: ignoring them would compute another model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.config_values import count_of, positive_of
from specbatch.files.text_files import UnreadableError
from specbatch.weights import gguf_mixtures

if TYPE_CHECKING:
    from specbatch.weights.gguf_header import GgufTensor

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES |= {"token_embd_norm": "model.embedding_norm"}  # the final norm of LFM2
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
}
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
_GEMMA3_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LFM2_NAMES = _LAYER_NAMES | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_NAMES_OF = {"gemma3": _GEMMA3_NAMES, "phi3": _PHI3_NAMES, "lfm2": _LFM2_NAMES}
_NAMES_OF |= {
    arch: (_LFM2_NAMES if arch == "lfm2moe" else _LAYER_NAMES) | names for arch, names in gguf_mixtures.NAMES.items()
}
_NO_TOKEN = (-1, 2**32 - 1, 2**64 - 1)  # llama.cpp's LLAMA_TOKEN_NULL, -1, also as an unsigned number
_WINDOWED = ("llama", "gemma3", "gpt-oss", "phi3")
# LongRoPE in a file: name of the tensor -> key of a config.json.
_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_DIVISORS, _ATTENTION_FACTOR = "rope_freqs.weight", ".rope.scaling.attn_factor"
_LOCAL_THETA = ".rope.freq_base_swa"
_ROPE_KEYS_OF = {(_ATTENTION_FACTOR, "phi3"), (_LOCAL_THETA, "gemma3")}
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

    def full(self, key: str) -> str:
        return f"{self.arch}{key}" if key.startswith(".") else key

    def keys(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, in the form that `metadata` takes."""
        return [
            prefix + key.removeprefix(self.full(prefix)) for key in self._metadata if key.startswith(self.full(prefix))
        ]


def read_config(file: GgufFile) -> dict[str, Any]:
    """A GGUF's metadata as a `config.json`."""
    architecture = _ARCHITECTURES.get(file.arch)
    if architecture is None:
        raise refuse("general.architecture", file.arch, f"supported are {', '.join(_ARCHITECTURES)}")
    is_mixture = file.arch in gguf_mixtures.NAMES
    if file.metadata(".expert_count", 0) and not is_mixture:
        works = f"mixtures of experts are read from {', '.join(gguf_mixtures.NAMES)} files; use safetensors for others"
        raise refuse(file.full(".expert_count"), file.metadata(".expert_count"), works)
    if "token_embd.weight" not in file.tensors:
        raise file.refusal("tensor token_embd.weight is missing")
    heads, hidden = _same_in_all_layers(file, ".attention.head_count"), file.count(".embedding_length")
    head_dim = file.count(".attention.key_length", hidden // heads)
    rotates_all = file.arch not in ("glm4moe", "phi3")
    for key in (".attention.value_length", *[".rope.dimension_count"] * rotates_all):
        if file.metadata(key, head_dim) != head_dim:
            raise refuse(file.full(key), file.metadata(key), f"it must equal the head size, {head_dim}")
    # Convolutions have 0.
    has_convolutions = file.arch in ("lfm2", "lfm2moe")
    kv = file.required(".attention.head_count_kv", list) if has_convolutions else []
    window = file.metadata(".attention.sliding_window")
    if window and file.arch not in _WINDOWED:
        works = f"of GGUF files those of {', '.join(_WINDOWED)} may have windows; use safetensors"
        raise refuse(file.full(".attention.sliding_window"), window, works)
    if file.arch == "gemma3":
        own = _gemma3(file, hidden, heads, head_dim)
    elif is_mixture:
        own = gguf_mixtures.mixture_config(file) | (_layer_types(file) if file.arch == "gpt-oss" else {})
    elif file.arch == "llama" and window:
        own = _mistral(file)
    else:  # without a window, files of Phi-4 state 0
        own = {"model_type": file.arch, "sliding_window": window or None}
    if has_convolutions:
        own |= {
            "layer_types": ["full_attention" if count else "conv" for count in kv],
            "norm_eps": _short(file.number(".attention.layer_norm_rms_epsilon")),
            "conv_L_cache": file.count(".shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
        }
    kv_heads = _same_in_all_layers(file, ".attention.head_count_kv", heads, others=(0,) if kv else ())
    inner = file.count(".expert_feed_forward_length") if is_mixture else None  # that of experts, without dense layers
    return {
        "architectures": [architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _same_in_all_layers(file, ".feed_forward_length", inner),
        "num_hidden_layers": file.required(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.required(".context_length"),
        "rms_norm_eps": _short(file.number(".attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, head_dim),
        "bos_token_id": next(iter(file.token_ids("bos")), None),
        "eos_token_id": file.token_ids("eos"),
    } | own


def _mistral(file: GgufFile) -> dict[str, Any]:
    """Settings of a file of "llama" with windows, in all layers or in those for which its pattern has true."""
    own = {"sliding_window": file.count(".attention.sliding_window")}
    kinds = _layer_types(file)
    if not kinds:
        return own | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return own | kinds | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}


def _layer_types(file: GgufFile) -> dict[str, Any]:
    """Which layers have windows, as in a config.json. Empty if the file does not state it. llama.cpp reads a number n,
    by which every n-th layer has full attention, or true for each layer with a window."""
    key, arch = ".attention.sliding_window_pattern", file.arch
    pattern = file.metadata(key)
    if pattern is None or (arch == "gpt-oss" and pattern == 2):  # its default
        return {}
    if isinstance(pattern, list) and all(isinstance(slides, bool) for slides in pattern):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    if arch == "gemma3" and not isinstance(pattern, list):
        return {"sliding_window_pattern": file.count(key)}
    works = f"it must {'be 2 or ' if arch == 'gpt-oss' else ''}have true or false for each layer"
    raise refuse(file.full(key), pattern, works)


def _gemma3(file: GgufFile, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Settings of Gemma 3. Most files do not state the pattern of its layers, which is the default, and none the factor
    of scores: llama.cpp takes that of the 27B, which differs, for models of 62 layers."""
    for key in (".attn_logit_softcapping", ".final_logit_softcapping"):
        if file.metadata(key):
            raise refuse(file.full(key), file.metadata(key), "soft caps are not supported")
    ropes: dict[str, Any] = {"full_attention": _rope(file, head_dim)}
    if file.metadata(_LOCAL_THETA) is not None:  # files of old converters leave it to the default
        ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": _short(file.number(_LOCAL_THETA))}
    return {
        "model_type": "gemma3_text",
        "sliding_window": file.count(".attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if file.required(".block_count") == 62 else head_dim,
        "rope_parameters": ropes,
    } | _layer_types(file)


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    for key in file.keys(".rope."):
        if key not in _ROPE_KEYS and (key, file.arch) not in _ROPE_KEYS_OF:
            raise refuse(file.full(key), file.metadata(key), "rope with this key is not supported")
    rope: dict[str, Any] = {"rope_type": "default"}
    if file.metadata(".rope.freq_base") is not None:
        rope["rope_theta"] = _short(file.number(".rope.freq_base"))
    has_factor = file.metadata(".rope.scaling.factor") is not None
    kind = file.metadata(".rope.scaling.type", "linear" if has_factor else "none")  # as in llama.cpp
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _short(file.number(".rope.scaling.factor"))}
    elif kind != "none":
        raise refuse(file.full(".rope.scaling.type"), kind, "supported are none, linear and yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.required(".rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            key = f".rope.scaling.yarn_{name}"
            if file.metadata(key) is not None:
                rope[name] = _short(file.number(key))
    if file.arch == "gpt-oss":
        rope["truncate"] = False  # which no file states
    if file.arch in ("glm4moe", "phi3"):
        rope["partial_rotary_factor"] = file.count(".rope.dimension_count", head_dim) / head_dim
    if file.arch == "phi3" and file.tensors.keys() & _FACTORS:
        for name, key in _FACTORS.items():
            rope[key] = [_short(factor) for factor in _vector(file, name)]
        rope |= {"rope_type": "longrope", "attention_factor": _short(file.number(_ATTENTION_FACTOR, 1.0))}
        rope["original_max_position_embeddings"] = file.count(".rope.scaling.original_context_length")
    elif _DIVISORS in file.tensors:
        if kind != "none":
            raise refuse(file.full(".rope.scaling.type"), kind, f"with {_DIVISORS} it must be none")
        rope |= {"rope_type": "divisors", "divisors": _vector(file, _DIVISORS)}
    return rope


def _vector(file: GgufFile, name: str) -> list[float]:
    """The numbers of a tensor that is part of the rope parameters."""
    found = file.tensors[name].data if name in file.tensors else np.empty(())
    if found.dtype != np.float32 or found.ndim != 1:
        raise file.refusal(f"tensor {name} must be a vector of float32 numbers")
    return [float(number) for number in found]


def _same_in_all_layers(file: GgufFile, key: str, default: int | None = None, *, others: tuple[int, ...] = ()) -> int:
    """The value of a key that may have a list with one value per layer. others: values of layers that do not count."""
    value = file.required(key) if default is None else file.metadata(key, default)
    layers = [one for one in value if one not in others] if isinstance(value, list) else [value]
    if len(set(layers)) != 1:
        raise refuse(file.full(key), value, "layers that differ in size are not supported")
    return count_of({file.full(key): layers[0]}, file.full(key))


def _short(value: float) -> float:
    """A float32 of the file as the shortest decimal number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rename(file: GgufFile) -> dict[str, GgufTensor]:
    """Tensors by their checkpoint names. Unknown tensors are refused."""
    layer_names, of_rope = _NAMES_OF.get(file.arch, _LAYER_NAMES), {_DIVISORS}
    if file.arch == "phi3":
        of_rope |= _FACTORS.keys()
    renamed = {}
    for name, tensor in file.tensors.items():
        if name in of_rope:
            continue
        if in_layer := re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name):
            names, (layer, inner) = layer_names, in_layer.groups()
            prefix = f"model.layers.{layer}."
        else:
            names, inner, prefix = _NAMES, name, ""
        stem, _, kind = inner.rpartition(".")
        if inner not in names and stem not in names:
            raise file.refusal(f"tensor {name!r} is not part of any supported model")
        renamed[prefix + (names[inner] if inner in names else f"{names[stem]}.{kind}")] = tensor
    return renamed
