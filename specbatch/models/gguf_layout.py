"""How GGUF files hold the models of a family: names of tensors, and settings that a config.json would have.

`weights.gguf_file` reads files by them. A family's module has `GGUF`, a `GgufLayout` for each `general.architecture`
that it reads. Names and keys are those of the `gguf` package; what files do not state is what llama.cpp computes for
the architecture (https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.config_values import flag_of

LAYER_NAMES = {
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
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SIGMOID = 2  # of expert_gating_func


class GgufMetadata(Protocol):
    """An open GGUF file, see `weights.gguf_file.GgufFile`."""

    arch: str

    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def metadata(self, key: str, default: Any = None) -> Any: ...
    def required(self, key: str, *kinds: type) -> Any: ...
    def count(self, key: str, default: int | None = None, least: int = 1) -> int: ...
    def number(self, key: str, default: float | None = None) -> float: ...
    def vector(self, name: str) -> list[float]: ...
    def full(self, key: str) -> str: ...
    def refusal(self, works: str) -> SpecbatchError: ...


def _model_type(file: GgufMetadata, usual: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": file.arch, "sliding_window": file.metadata(".attention.sliding_window") or None}


@dataclass(frozen=True)
class GgufLayout:
    """The models of one `general.architecture`.

    architecture       of the config.json
    names              of the parts of a layer that are not named as in `LAYER_NAMES`. A name with a kind, such as
                       "attn_sinks.weight", is that of a tensor
    settings           the values of the config.json that are the family's own, from the file and the usual values
    has_windows        whether files may state a window
    is_mixture         whether files have experts
    rotates_all        whether rope rotates all channels of a head; else `partial_rotary_factor` is set
    rope_keys          keys of the metadata about rope that only these files have
    rope_tensors       tensors that `settings` reads, which are not weights
    has_convolutions   whether some layers are convolutions, whose number of KV heads is 0
    interleaved_qk     whether q and k are stored for a rope that rotates neighbouring channels
    interleaved_experts  whether rows of gate and up alternate in the checkpoint, transposed
    norm_offset        what is subtracted from norms: the checkpoint has the difference from it
    sentencepiece      whether the tokenizer "llama" is SentencePiece's BPE
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[GgufMetadata, dict[str, Any]], dict[str, Any]] = _model_type
    has_windows: bool = False
    is_mixture: bool = False
    rotates_all: bool = True
    rope_keys: tuple[str, ...] = ()
    rope_tensors: tuple[str, ...] = ()
    has_convolutions: bool = False
    interleaved_qk: bool = False
    interleaved_experts: bool = False
    norm_offset: float = 0.0
    sentencepiece: bool = False


def layer_types(file: GgufMetadata, *, unstated: int | None = None, counts: bool = False) -> dict[str, Any]:
    """Which layers have windows, as in a config.json. Empty if the file does not state it. llama.cpp reads a number n,
    by which every n-th layer has full attention, or true for each layer with a window. unstated: the number that is the
    default; counts: whether other numbers are read."""
    key = ".attention.sliding_window_pattern"
    pattern = file.metadata(key)
    if pattern is None or (unstated is not None and pattern == unstated):
        return {}
    if isinstance(pattern, list) and all(isinstance(slides, bool) for slides in pattern):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    if counts and not isinstance(pattern, list):
        return {"sliding_window_pattern": file.count(key)}
    works = f"it must {'' if unstated is None else f'be {unstated} or '}have true or false for each layer"
    raise refuse(file.full(key), pattern, works)


def mixture_settings(file: GgufMetadata) -> dict[str, Any]:
    """The settings that all mixtures have."""
    return {
        "num_experts_per_tok": file.count(".expert_used_count"),
        "moe_intermediate_size": file.count(".expert_feed_forward_length"),
    }


def sigmoid_settings(file: GgufMetadata) -> dict[str, Any]:
    """Those of mixtures whose scores are sigmoids."""
    if file.metadata(".expert_gating_func", _SIGMOID) != _SIGMOID:
        works = f"the scores of {file.arch} files are sigmoids; {_SIGMOID}"
        raise refuse(file.full(".expert_gating_func"), file.metadata(".expert_gating_func"), works)
    scale = file.number(".expert_weights_scale", 1.0)
    return mixture_settings(file) | {"norm_topk_prob": normalises(file), "routed_scaling_factor": scale}


def normalises(file: GgufMetadata) -> bool:
    """Whether the weights of the chosen experts sum to 1."""
    key = file.full(".expert_weights_norm")
    return flag_of({key: file.metadata(".expert_weights_norm")}, key, True)


def has_mxfp4(file: GgufMetadata) -> bool:
    """Whether all experts are in MXFP4."""
    stacks = [tensor for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    return bool(stacks) and all(tensor.kind.name == "MXFP4" for tensor in stacks)


def short(value: float) -> float:
    """A float32 of the file as the shortest decimal number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
