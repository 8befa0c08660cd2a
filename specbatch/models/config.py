"""What a model is, in one spelling: sizes, biases and rope of the dense Llama, Qwen2 and Qwen3 families.

Published configs spell the same facts in two ways (transformers 4 and 5). Everything that reads a model's
description goes through `ModelConfig.from_dict`; a value it does not know is refused, never replaced by a
default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from specbatch.errors import refuse
from specbatch.kernels.weight import SIDE
from specbatch.models.float8 import left_plain, unconverted, with_scales

if TYPE_CHECKING:
    import torch

    from specbatch.memory.recurrent import StateShape

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# Families with a description of their own: architecture -> model_type, and where its config is read.
_OTHERS = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3_moe", "Qwen3MoeConfig"),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_next", "Qwen3NextConfig"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_next", "Qwen3NextConfig"),
    "NemotronHForCausalLM": ("nemotron_h", "nemotron_h", "NemotronHConfig"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2", "Lfm2Config"),
}
DEFAULT_THETA = 10000.0  # what all three families mean when a config says nothing
DTYPES = ("float32", "bfloat16", "float16")

# Keys that each rope type reads. A key outside its set would be ignored in silence, so it is refused instead.
_ROPE_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
_ROPE_KEYS = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "divisors": {"divisors"},  # our own spelling, written when a GGUF file is converted
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: which channels turn, and how fast.

    kind              "default", "linear", "llama3", "yarn" or "divisors" (one per frequency, as in GGUF)
    rotary_dim        leading channels of a head that turn, paired as halves (channel i with i + rotary_dim/2)
    attention_factor  factor on cos and sin
    source            where theta was read: "rope_parameters", "rope_scaling", "rope_theta", "class default"
                      or "gguf"
    The other fields are the parameters of the scaling and are read by the kinds that have them.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    attention_factor: float = 1.0
    source: str = "class default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.rotary_dim:
            return "no rope"
        scaling = "" if self.kind == "default" else f", scaled by {self.kind}"
        return f"rope theta {self.theta:g} (from {self.source}{scaling})"

    def inverse_frequencies(self) -> torch.Tensor:
        """Angle per position of each pair of channels: float32, [rotary_dim / 2]."""
        import torch

        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        periods: torch.Tensor = self.theta**exponents
        if self.kind == "default":
            return 1.0 / periods
        if self.kind == "linear":
            return 1.0 / periods / self.factor
        if self.kind == "divisors":
            return 1.0 / periods / torch.tensor(self.divisors, dtype=torch.float32)
        assert self.original_max_position is not None
        if self.kind == "llama3":
            return self._llama3(1.0 / periods, self.original_max_position)
        assert self.kind == "yarn"
        return self._yarn(periods, self.original_max_position)

    def _llama3(self, plain: torch.Tensor, original: int) -> torch.Tensor:
        """Short waves stay, long ones are divided by the factor, those between are blended."""
        import torch

        waves = 2 * math.pi / plain
        slow = torch.where(waves > original / self.low_freq_factor, plain / self.factor, plain)
        keep = (original / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = (1 - keep) * plain / self.factor + keep * plain
        between = (waves >= original / self.high_freq_factor) & (waves <= original / self.low_freq_factor)
        return torch.where(between, blend, slow)

    def _yarn(self, periods: torch.Tensor, original: int) -> torch.Tensor:
        """Fast channels stay, slow ones are divided by the factor, with a ramp between."""
        import torch

        def channel(turns: float) -> float:
            return self.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # a ramp of no width would divide by zero
        ramp = (torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep


class Ends(NamedTuple):
    """What a checkpoint calls the tensors before and behind its layers; the norm without its ".weight"."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm"
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a dense decoder.

    qkv_bias, o_bias, mlp_bias: which projections have biases; qk_norm: a norm per head before rope (Qwen3).
    `eos_ids` and `bos_id` are what the config alone says; the tokenizer's list is the complete one. `dtype`
    is the type that the checkpoint was published in, where it says so; `mtp_layers` the layers of the draft head
    beside it, likewise. float8: None, or of an FP8 checkpoint the modules that are in that type all the same
    (`models.float8`).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str | None = None
    mtp_layers: int | None = None
    float8: frozenset[str] | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a `config.json`. SpecbatchError names the key and value that cannot be run as written."""
        plain = unconverted(config)
        if plain is not None:
            read = ModelConfig.from_dict({key: value for key, value in config.items() if key != "quantization_config"})
            return replace(read, float8=plain)
        other = _other(config)
        if other is not None:
            return other.from_dict(config)
        family = _family(config)
        if config.get("hidden_act", "silu") != "silu":
            raise refuse("hidden_act", config["hidden_act"], f"the {family} layers here use 'silu'")
        layers, heads = count_of(config, "num_hidden_layers"), count_of(config, "num_attention_heads")
        _refuse_sliding_window(config, layers)
        hidden = count_of(config, "hidden_size")
        kv_heads = count_of(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads={heads}")
        if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
            raise refuse("num_attention_heads", heads, f"it must divide hidden_size={hidden}")
        head_dim = count_of(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise refuse("head_dim", head_dim, "rope pairs channels; it must be even")
        max_position = count_of(config, "max_position_embeddings")
        rope = _rope(config, head_dim, max_position)
        if rope.kind == "yarn" and rope.original_max_position is not None:
            # Qwen's advice is to add the scaling and leave max_position_embeddings at the unscaled length.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        attention_bias = family != "qwen2" and _flag(config, "attention_bias")
        return cls(
            family=family,
            vocab_size=count_of(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count_of(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rope=rope,
            max_position=max_position,
            tie_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
            qk_norm=family == "qwen3",
            eos_ids=token_ids(config, "eos_token_id"),
            bos_id=next(iter(token_ids(config, "bos_token_id")), None),
            dtype=_dtype(config),
            mtp_layers=config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers")),
        )

    @property
    def module(self) -> str:
        """Whose `layer` makes the layers."""
        return "specbatch.models.llama"

    @property
    def names(self) -> Ends:
        return Ends()

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values; the others keep a state."""
        return self.num_layers

    @property
    def mixer_widths(self) -> tuple[int, int]:
        """The most columns that a layer projects before its cut, and that come out of it."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return queries + 2 * keys, queries

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What each recurrent layer keeps."""
        return ()

    @property
    def chosen(self) -> tuple[int, int] | None:
        """Experts of a mixture, and to how many of them a token goes; None in a family without."""
        mixture = getattr(self, "mixture", None)
        return None if mixture is None else (mixture.experts, mixture.top_k)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a checkpoint of this model must hold, scales of float8 ones too."""
        if self.float8 is None:
            return self.weight_shapes()
        ends = {name.removesuffix(".weight") for name in self.names}
        return with_scales(self.weight_shapes(), self.float8 | ends)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights; matrices are [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for index in range(self.num_layers):
            layer = f"model.layers.{index}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            linear(f"{layer}.self_attn.q_proj", queries, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.k_proj", keys, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.v_proj", keys, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.o_proj", hidden, queries, self.o_bias)
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            linear(f"{layer}.mlp.gate_proj", inner, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.up_proj", inner, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.down_proj", hidden, inner, self.mlp_bias)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def fit(self, found: dict[str, tuple[int, ...]]) -> ModelConfig:
        """The same as a file's tensors (name -> shape) have it, where they say more than the config.json."""
        return replace(self, tie_embeddings=self.is_tied(found), float8=self.kept_plain(found))

    def is_tied(self, found: dict[str, tuple[int, ...]]) -> bool:
        """An output matrix of its own is the one to use."""
        return self.tie_embeddings and self.names.head not in found

    def kept_plain(self, found: dict[str, tuple[int, ...]]) -> frozenset[str] | None:
        """`float8` as the file's tensors have it."""
        return None if self.float8 is None else left_plain(found)

    def widens(self, name: str, shape: tuple[int, ...]) -> bool:
        """May this float8 weight have to be made wide, as it goes into a matrix whose blocks are others?"""
        return bool(shape[-2] % SIDE)

    def stacked(self) -> ModelConfig:
        """The same in files that hold the experts of a layer in one tensor."""
        return self

    def is_spare(self, name: str) -> bool:
        """Is this a tensor that a file may hold beside them?"""
        return False

    def parameter_count(self) -> int:
        """Parameters that lie in memory; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


def _other(config: dict[str, Any]) -> type[ModelConfig] | None:
    """Who reads a config.json of a family that is not dense attention throughout."""
    names, model_type = config.get("architectures"), config.get("model_type")
    for architecture, (kind, module, name) in _OTHERS.items():
        if names == [architecture] if names else model_type == kind:
            if model_type not in (None, kind):
                raise refuse("model_type", model_type, f"architectures={names!r} goes with {kind!r}")
            found: type[ModelConfig] = getattr(import_module(f"specbatch.models.{module}"), name)
            return found
    return None


def _family(config: dict[str, Any]) -> str:
    names, model_type = config.get("architectures"), config.get("model_type")
    works = f"supported are {', '.join([*FAMILIES, *_OTHERS])}"
    if names:
        family = FAMILIES.get(names[0]) if len(names) == 1 else None
        if family is None:
            raise refuse("architectures", names, works)
        if model_type not in (None, family):
            raise refuse("model_type", model_type, f"architectures={names!r} goes with {family!r}")
        return family
    if model_type not in FAMILIES.values():
        raise refuse("model_type", model_type, works)
    return str(model_type)


def _refuse_sliding_window(config: dict[str, Any], layers: int) -> None:
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
        for kind in kinds:
            if kind != "full_attention":
                raise refuse("layer_types", kind, "these families run with 'full_attention' layers only")
        return
    window = config.get("sliding_window")
    # The Qwen families name a window that is off unless use_sliding_window is true; Llama has no such switch.
    active = config.get("use_sliding_window", _family(config) == "llama") and window is not None
    if active and config.get("max_window_layers", 0) < layers:
        raise refuse("sliding_window", window, "only full attention runs; set use_sliding_window to false")


def _rope(config: dict[str, Any], head_dim: int, max_position: int) -> Rope:
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(source) or {}
    if not isinstance(found, dict):
        raise refuse(source, found, "it must be a table of rope values")
    if found and all(isinstance(value, dict) for value in found.values()):
        if "full_attention" not in found:
            raise refuse(source, sorted(found), "of tables per layer type only 'full_attention' is used")
        found = found["full_attention"]
    values = {key: value for key, value in found.items() if value is not None}

    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise refuse(f"{source}.rope_type", kind, f"supported are {', '.join(_ROPE_KEYS)}")
    for key in values:
        if key not in _ROPE_COMMON | _ROPE_KEYS[kind]:
            raise refuse(f"{source}.{key}", values[key], f"rope type {kind!r} has no such value")
    if "rope_theta" in values:
        theta = _positive(values, "rope_theta", source)
    elif config.get("rope_theta") is not None:
        theta, source = _positive(config, "rope_theta"), "rope_theta"
    else:
        theta, source = DEFAULT_THETA, "class default"
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise refuse("partial_rotary_factor", partial, "these families turn whole heads; it must be 1")
    if kind == "default":
        return Rope(theta=theta, rotary_dim=head_dim, source=source)
    if kind == "divisors":
        divisors = tuple(values.get("divisors", ()))
        if len(divisors) != head_dim // 2 or not all(divisor > 0 for divisor in divisors):
            raise refuse("rope.divisors", divisors, f"give {head_dim // 2} positive numbers")
        return Rope(theta=theta, rotary_dim=head_dim, kind=kind, source=source, divisors=divisors)

    factor = _positive(values, "factor", "rope")
    key = "original_max_position_embeddings"
    original = config.get(key) or values.get(key, max_position)
    rope = {"theta": theta, "rotary_dim": head_dim, "kind": kind, "source": source, "factor": factor}
    if kind == "linear":
        return Rope(**rope)
    rope["original_max_position"] = count_of({**values, key: original}, key)
    if kind == "llama3":
        low = _positive(values, "low_freq_factor", "rope")
        high = _positive(values, "high_freq_factor", "rope")
        if low >= high:
            raise refuse("rope.low_freq_factor", low, f"it must be below high_freq_factor={high}")
        return Rope(**rope, low_freq_factor=low, high_freq_factor=high)
    return Rope(
        **rope,
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=_positive(values, "beta_fast", "rope", 32.0),
        beta_slow=_positive(values, "beta_slow", "rope", 1.0),
        truncate=bool(values.get("truncate", True)),
    )


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    if "attention_factor" in values:
        return _positive(values, "attention_factor", "rope")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)


def _dtype(config: dict[str, Any]) -> str | None:
    found = config.get("dtype", config.get("torch_dtype"))
    if found in (None, "auto"):
        return None
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise refuse("dtype", found, f"a checkpoint's type must be one of {', '.join(DTYPES)}")
    return name


def table_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The table under `key`, which may be missing or null."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise refuse(key, found, "the config must give a table")
    return found


def attending(kinds: list[str], layers: int, known: tuple[str, str], family: str) -> tuple[bool, ...]:
    """Which of `layer_types` are attention; known: the other kind and that one; family: who has them, for a refusal."""
    if len(kinds) != layers:
        raise refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in known:
            raise refuse("layer_types", kind, f"{family} {known[0]!r} and {known[1]!r} layers")
    return tuple(kind == known[1] for kind in kinds)


def token_ids(config: dict[str, Any], key: str) -> tuple[int, ...]:
    """Token ids under `key`, which may be missing, null, one number or a list; duplicates are dropped."""
    found = config.get(key)
    listed = [] if found is None else found if isinstance(found, list) else [found]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise refuse(key, found, "token ids are whole numbers from 0")
    return tuple(dict.fromkeys(listed))


def count_of(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive whole number under `key`; default: where it is missing or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(key, value, "the config must give a positive whole number")
    return value


def _positive(config: dict[str, Any], key: str, where: str = "", default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise refuse(f"{where}.{key}".lstrip("."), value, "the config must give a positive number")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refuse(key, value, "the config must say true or false")
    return bool(value)
