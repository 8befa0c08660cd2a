"""`ModelConfig`: sizes and options of a model from config.json, in the form of the dense families (Llama, Qwen3, ...).

Published configs use two spellings of the same settings (transformers 4 and 5). `ModelConfig.from_dict` reads both, and
passes configs of other families to their classes (`models.registry`). It refuses values it does not know instead of
using a default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, positive_of, spelled, token_ids
from specbatch.models.formats.cache_scales import cache_type
from specbatch.models.formats.format import Format
from specbatch.models.formats.registry import format_of
from specbatch.models.formats.settings import KEY
from specbatch.models.layer_types import read_windows
from specbatch.models.registry import dense_family, own_reader
from specbatch.models.rope import Rope, read_rope

if TYPE_CHECKING:
    import torch

    from specbatch.memory.recurrent_state import StateShape

DTYPES = ("float32", "bfloat16", "float16")
DEEPEST = 10_000  # layers; configs list them
_MOST_TOKENS = 1 << 22  # of a vocabulary; tokenizers list them


class Ends(NamedTuple):
    """Names of a checkpoint's tensors before and after its layers; the norm without its ".weight"."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm"
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a dense decoder.

    qkv_bias, o_bias, mlp_bias: which projections have biases; qk_norm: a norm per head before rope (Qwen3).
    `eos_ids` and `bos_id` are those of the config; the tokenizer's list is the complete one. `dtype` is the dtype of
    the published checkpoint and `mtp_layers` the number of layers of its MTP draft head, None if the config does not
    state them. quantization: of the checkpoint's weights, None if they have a dtype; cache_type: of the KV cache that
    it was made for (see `cache_scales`), None if it does not say. ranks: the number of ranks over which a model is
    divided, of which this is the config of one (see `models.partition`). windows: per layer, how many keys a query
    sees, itself included (None: all); empty if no layer has a window.
    """

    module: ClassVar[str] = "specbatch.models.families.llama"  # its functions `layer` and `final_norm` build the model
    mtp_module: ClassVar[str] = "specbatch.models.heads.mtp"  # its `Mtp` is the MTP draft head
    methods: ClassVar[tuple[str, ...]] = ()  # values of quant_method that only this family has

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
    quantization: Format | None = None
    cache_type: str | None = None
    ranks: int = 1
    windows: tuple[int | None, ...] = ()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a config.json. Raises SpecbatchError for a key and value that are not supported."""
        other = own_reader(config)
        quantization = format_of(config, () if other is None else other.methods)
        read: ModelConfig
        if config.get(KEY):
            read = ModelConfig.from_dict({key: value for key, value in config.items() if key != KEY})
            return replace(read, quantization=quantization, cache_type=cache_type(config[KEY]))
        if other is not None:
            read = other.from_dict(config)
            return read
        family = dense_family(config)
        if config.get("hidden_act") not in (None, "silu"):
            raise refuse("hidden_act", config["hidden_act"], f"the {family} layers here use 'silu'")
        layers, heads = count_of(config, "num_hidden_layers", most=DEEPEST), count_of(config, "num_attention_heads")
        hidden = count_of(config, "hidden_size")
        kv_heads = count_of(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads={heads}")
        if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
            raise refuse("num_attention_heads", heads, f"it must divide hidden_size={hidden}")
        head_dim = count_of(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise refuse("head_dim", head_dim, "rope rotates pairs of channels; it must be even")
        max_position = count_of(config, "max_position_embeddings")
        rope = read_rope(config, head_dim, max_position)
        if rope.kind == "yarn" and rope.original_max_position is not None:
            # Qwen recommends adding the scaling and leaving max_position_embeddings at the unscaled length.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        attention_bias = family != "qwen2" and flag_of(config, "attention_bias")
        return cls(
            family=family,
            vocab_size=count_of(config, "vocab_size", most=_MOST_TOKENS),
            hidden_size=hidden,
            intermediate_size=count_of(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_of(config, "rms_norm_eps"),
            rope=rope,
            max_position=max_position,
            tie_embeddings=flag_of(config, "tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and flag_of(config, "mlp_bias"),
            qk_norm=family == "qwen3",
            eos_ids=token_ids(config, "eos_token_id"),
            bos_id=next(iter(token_ids(config, "bos_token_id")), None),
            dtype=_dtype(config),
            mtp_layers=_mtp_layers(config),
            windows=read_windows(config, family, layers, max_position),
        )

    def divided(self, ranks: int) -> Self:
        """The config of one of `ranks` ranks: its heads and its share of the MLPs. KV heads are replicated where there
        are fewer of them than ranks. Raises SpecbatchError for sizes that cannot be divided."""
        heads, kv = self.heads_per_rank(self.head_dim, self.num_kv_heads, ranks)
        return replace(
            self,
            num_heads=heads,
            num_kv_heads=kv,
            intermediate_size=shared_out("intermediate_size", self.intermediate_size, ranks, self.input_step),
            ranks=ranks,
        )

    def heads_per_rank(self, dim: int, kv: int, ranks: int) -> tuple[int, int]:
        """Heads of one of `ranks` ranks, and KV heads. dim: channels of a head; kv: KV heads of the whole layer."""
        if kv % ranks and ranks % kv:
            raise refuse("tensor_parallel", ranks, f"it must divide num_key_value_heads={kv}, or be a multiple of it")
        heads = shared_out("num_attention_heads", self.num_heads, ranks)
        if ranks > 1 and heads * dim % self.input_step:
            works = f"each rank has {heads} heads of {dim}, and quantized weights are cut every"
            raise refuse("tensor_parallel", ranks, f"{works} {self.input_step} inputs; use fewer")
        return heads, max(kv // ranks, 1)

    @property
    def input_step(self) -> int:
        """A rank's share of the inputs of a weight is a multiple of it."""
        return 1 if self.quantization is None else self.quantization.input_step

    def sections(self, name: str) -> tuple[int, ...]:
        """Of a tensor that concatenates several along its outputs and is divided over ranks: their sizes on a rank."""
        return ()

    def rope_of(self, layer: int) -> Rope:
        return self.rope

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by, rounded to their dtype; None: nothing."""
        return None

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap * tanh(logits / cap) with this cap; None: as they are."""
        return None

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def largest_window(self) -> int | None:
        """The most keys that a query of any layer sees; None: all."""
        return max(filter(None, self.windows)) if self.windows and all(self.windows) else None

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks (see `QKVLayout`)."""
        return False

    @property
    def cache_dims(self) -> tuple[int, int]:
        """Numbers per token and KV head in the caches of keys and of values."""
        return self.head_dim, self.head_dim

    @property
    def usual_heads(self) -> tuple[int, int]:
        """KV heads, and channels of a head, of drafts with layers of this model's sizes."""
        return self.num_kv_heads, self.head_dim

    @property
    def has_latents(self) -> bool:
        """Whether attention is multi-head latent attention (see `LatentLayout`)."""
        return False

    @property
    def names(self) -> Ends:
        return Ends()

    @property
    def depth(self) -> int:
        """Number of published layers, as draft heads count them."""
        return self.num_layers

    def published(self, index: int) -> tuple[int, ...]:
        """Indices of the published layers that layer `index` consists of."""
        return (index,)

    def ends_in(self, layers: Iterable[int]) -> bool:
        """Whether the last layer includes one of these published layers."""
        return any(layer in self.published(self.num_layers - 1) for layer in layers)

    @property
    def has_kv(self) -> tuple[bool, ...]:
        """Whether each layer has attention; the others have a recurrent state."""
        return (True,) * self.num_layers

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values this one attends to: itself, or an earlier one."""
        return layer

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own, which have a KV cache."""
        return tuple(layer for layer, has_kv in enumerate(self.has_kv) if has_kv and self.kv_layer(layer) == layer)

    @property
    def recurrent_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return self.has_kv.count(False)

    @property
    def layer_inputs(self) -> int:
        """Numbers per token that all layers together get beside the residual stream (`per_layer_embedding`)."""
        return 0

    @property
    def lookups(self) -> frozenset[str]:
        """Weights of which a token reads one row."""
        return frozenset({self.names.embedding})

    @property
    def mixer_widths(self) -> tuple[int, int]:
        """Maximum widths over the layers: of the projected input of a mixer (such as qkv), and of its output before the
        output projection."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return queries + 2 * keys, queries

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Of linear layers, but for experts."""
        return self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim, self.mixer_widths[1]

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per prompt token that a mixer needs at most besides its projected input and its output."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim * dtype.itemsize  # q and k

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per token that an MLP needs at most besides the residual stream."""
        # norm(x), gate, up, and silu(gate) * up
        return (self.hidden_size + 3 * self.intermediate_size) * dtype.itemsize

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Tensors of the state of each recurrent layer."""
        return ()

    @property
    def chosen(self) -> tuple[int, int] | None:
        """(number of experts, experts per token) of a mixture of experts; None for a dense model."""
        mixture = getattr(self, "mixture", None)
        return None if mixture is None else (mixture.experts, mixture.top_k)

    def is_stored_quantized(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the files have this weight quantized."""
        stored = self.format_except_ends
        return stored is not None and stored.is_quantized(name, shape)

    @property
    def format_except_ends(self) -> Format | None:
        """`quantization` without the modules that no checkpoint quantizes."""
        return None if self.quantization is None else self.quantization.except_for(self.unquantized_ends)

    @property
    def unquantized_ends(self) -> frozenset[str]:
        """Modules of this model that no checkpoint quantizes."""
        return frozenset(name.removesuffix(".weight") for name in {*self.names, *self.lookups})

    def head_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Of a draft head: name -> shape of its weights; matrices are [out, in]. None for the config of a decoder, of
        which `weight_shapes` knows them."""
        return None

    def fit(self, found: dict[str, tuple[int, ...]]) -> Self:
        """This config, adapted to the tensors of a file (name -> shape) where they determine a setting: a separate
        output matrix takes precedence over `tie_embeddings`."""
        tied = self.tie_embeddings and self.names.head not in found
        return replace(self, tie_embeddings=tied, quantization=self.quantization and self.quantization.fit(found))

    def may_dequantize(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this quantized weight may have to be dequantized, because it becomes part of a matrix with other
        blocks of scales."""
        stored = self.format_except_ends
        return stored is not None and stored.is_quantized(name, shape) and stored.of(name).may_dequantize(shape)

    def for_length(self, max_model_len: int | None) -> Self:
        """This config for an engine with this `max_model_len`, where that decides on the rope: `max_position` is the
        length without it."""
        return self

    @property
    def note(self) -> str | None:
        """What a reader of the log would not expect of this model; None: nothing."""
        return None

    def stacked(self) -> Self:
        """This config for files with all experts of a layer in one tensor."""
        return self

    def is_spare(self, name: str) -> bool:
        """Whether a file may contain this tensor although it is not used."""
        return False

    def is_mtp(self, name: str) -> bool:
        """Whether a file's tensor belongs to an MTP draft head, which the drafter checks."""
        return name.startswith("mtp.")

    @property
    def copied_parameters(self) -> int:
        """Number of parameters that are in memory twice."""
        return 0


def follows_layers(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer after the first `layers` ones, where MTP heads are stored."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= layers


def without_windows(config: ModelConfig, layers: str) -> ModelConfig:
    """This config. Refuses sliding windows; layers: of what they are, for the error message."""
    for window in filter(None, config.windows):
        raise refuse("sliding_window", window, f"{layers} have full attention only; set use_sliding_window to false")
    return config


def _mtp_layers(config: dict[str, Any]) -> int | None:
    key = spelled(config, "mtp_num_hidden_layers", "num_nextn_predict_layers")
    return None if config.get(key) is None else count_of(config, key, least=0)


def _dtype(config: dict[str, Any]) -> str | None:
    found = config.get(spelled(config, "dtype", "torch_dtype"))
    if found in (None, "auto"):
        return None
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise refuse("dtype", found, f"a checkpoint's dtype must be one of {', '.join(DTYPES)}")
    return name


def shared_out(setting: str, size: int, ranks: int, step: int = 1) -> int:
    """size / ranks. Refused: a share that is no multiple of `step`."""
    if size % (ranks * step):
        each = f", each share a multiple of {step}" if step > 1 else ""
        raise refuse("tensor_parallel", ranks, f"it must divide {setting}={size}{each}")
    return size // ranks
