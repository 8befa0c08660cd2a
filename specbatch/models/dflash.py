"""DFlash: a draft that fills a block of mask tokens in one pass, over the target's own features as its context.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036, github.com/z-lab/dflash). A few
Qwen3 layers without embedding and head, for which the target's serve. The context is no text: at a verified position
the target's hidden states behind some layers, side by side, become one vector c = fc(features), and each layer's keys
and values there are those of norm(c), the same for all layers. Only the block itself runs through the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbatch.config_values import count_of, flag_of, names_of, places_of, table_of
from specbatch.core.attention_metadata import Mask
from specbatch.errors import refuse
from specbatch.kernels.attention.context_kv import ContextKVLayout
from specbatch.kernels.gemm.linear import Linear
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.layers import Attention, Reader

ARCHITECTURE = "DFlashDraftModel"
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Options of later drafts, each with the values that leave it off. Ignored, they would draft something else.
_OFF: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "sample_from_anchor": (None, False),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(ModelConfig):
    """The draft's own layers, and how it reads its target.

    block_size     rows of a pass: the newest token, then masks
    mask_token     its id in the target's vocabulary
    target_layers  the layers, counted from 0, whose OUTPUT the draft reads, in this order
    target_depth   layers of the target it was made for, where the file says it
    masks          what a block's rows see, one for each layer
    whole_file     the file holds copies of the target's embedding and head, too; they are not read
    draft_vocab    tokens that it drafts, where they are not all of the target's; the file then has a head of its own
                   for them, and `d2t`, what is to be added to such a token's place to get its id
    """

    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    target_depth: int | None
    masks: tuple[Mask, ...]
    whole_file: bool = False
    draft_vocab: int | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DFlashConfig:
        """Read a `config.json` as z-lab publishes it, or one of speculators. SpecbatchError names what cannot be run.

        z-lab's own keys stand at the top or inside `dflash_config`, which wins.
        """
        if config.get("speculators_model_type") is not None:
            return cls._from_speculators(config)
        if config.get("architectures") != [ARCHITECTURE]:
            raise refuse("architectures", config.get("architectures"), f"a DFlash draft says [{ARCHITECTURE!r}]")
        if config.get("model_type") != "qwen3":
            raise refuse("model_type", config.get("model_type"), "the layers of a DFlash draft are 'qwen3'")
        own = config | {key: value for key, value in table_of(config, "dflash_config").items() if value is not None}
        depth = None if own.get("num_target_layers") is None else count_of(own, "num_target_layers")
        layers = places_of(own, "target_layer_ids")
        if layers is None:
            if depth is None:
                raise refuse("target_layer_ids", None, "the config must give it, or num_target_layers")
            layers = published_layers(depth, count_of(own, "num_hidden_layers"))
        return cls._of(config, own, layers, depth, None if own.get("is_causal") is None else flag_of(own, "is_causal"))

    @classmethod
    def _from_speculators(cls, config: dict[str, Any]) -> DFlashConfig:
        """vllm-project/speculators: the layers in `transformer_layer_config`, with what its class has for default left
        out; feature layers as boundaries, where k is what enters layer k."""
        if config["speculators_model_type"] != "dflash":
            raise refuse("speculators_model_type", config["speculators_model_type"], "a DFlash draft says 'dflash'")
        given = table_of(config, "transformer_layer_config")
        inner = _class_defaults(given.get("model_type", "qwen3")) | given
        known, total = config.get("draft_vocab_size"), count_of(inner, "vocab_size")
        if known is not None and not 1 <= count_of(config, "draft_vocab_size") <= total:
            raise refuse("draft_vocab_size", known, f"the target's vocabulary has {total}")
        if config.get("target_hidden_size") not in (None, inner.get("hidden_size")):
            works = f"it must be the draft's hidden_size={inner.get('hidden_size')}"
            raise refuse("target_hidden_size", config["target_hidden_size"], works)
        boundaries = places_of(config, "aux_hidden_state_layer_ids")
        if boundaries is None:
            raise refuse("aux_hidden_state_layer_ids", None, "the config must list the layers")
        causal = False if flag_of(config, "sliding_window_non_causal") else None
        read = cls._of(inner, config, [boundary - 1 for boundary in boundaries], None, causal)
        return replace(read, whole_file=True, draft_vocab=None if known == total else known)

    @classmethod
    def _of(
        cls, inner: dict[str, Any], own: dict[str, Any], layers: list[int], depth: int | None, causal: bool | None
    ) -> DFlashConfig:
        """inner: the keys of the Qwen3 layers; own: those of the block."""
        for key, off in _OFF.items():
            if own.get(key) not in off:
                raise refuse(key, own[key], "this version cannot run it; leave it out")
        plain = ModelConfig.from_dict(
            inner | {"architectures": None, "model_type": "qwen3", "layer_types": None, "use_sliding_window": False}
        )
        _one_rope(inner)
        if not layers or min(layers) < 0:
            raise refuse("target_layer_ids", layers, "list layers of the target, counted from 0")
        if len(set(layers)) < len(layers):
            raise refuse("target_layer_ids", layers, "each layer may be there once")
        block = count_of(own, "block_size")
        if not 2 <= block <= 64:
            raise refuse("block_size", block, "use 2 to 64 (a verify has at most 64 rows)")
        return cls(
            **vars(plain) | {"tie_embeddings": False},
            block_size=block,
            mask_token=count_of(own, "mask_token_id", least=0),
            target_layers=tuple(layers),
            target_depth=depth,
            masks=_masks(inner, plain.num_layers, causal, block),
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the file; see `ModelConfig`."""
        ends = ("model.embed_tokens.weight", "lm_head.weight")
        shapes = {name: shape for name, shape in super().weight_shapes().items() if name not in ends}
        shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
        shapes["fc.weight"] = (self.hidden_size, len(self.target_layers) * self.hidden_size)
        shapes["hidden_norm.weight"] = (self.hidden_size,)
        if self.draft_vocab is not None:
            shapes |= {"lm_head.weight": (self.draft_vocab, self.hidden_size), "d2t": (self.draft_vocab,)}
        return shapes

    def is_spare(self, name: str) -> bool:
        copies = (
            ("embed_tokens.weight", "lm_head.weight") if self.draft_vocab is None else ("embed_tokens.weight", "t2d")
        )
        return self.whole_file and name in copies

    def parameter_count(self) -> int:
        """In memory: the weights of keys and values are there twice, for blocks and, in one matrix, for context."""
        twice = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.hidden_size
        return super().parameter_count() + twice

    def differences(self, target: ModelConfig) -> list[str]:
        """What keeps the draft from reading this target."""
        depth = target.depth
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.target_depth or depth, depth),
        )
        found = [f"{name} is {ours} and the target has {theirs}" for name, ours, theirs in pairs if ours != theirs]
        # What stands behind the last layer is read with its final norm by some and without it by others.
        far = [layer for layer in self.target_layers if layer >= depth - 1]
        if far:
            found.append(f"feature layer {far[0]} is not among the target's 0 to {depth - 2}")
        if self.mask_token >= target.vocab_size:
            found.append(f"mask token {self.mask_token} is outside the target's vocabulary of {target.vocab_size}")
        return found

    def lines(self) -> list[str]:
        """What matters about the draft, for a person to compare with the target's line."""
        sliding = [f"{mask.window}" for mask in self.masks if mask.window]
        windows = f", {len(sliding)} of them with a window of {sliding[0]}" if sliding else ""
        known = "" if self.draft_vocab is None else f"; {self.draft_vocab} of {self.vocab_size} tokens drafted"
        causal = sum(mask.causal for mask in self.masks)
        order = "none causal" if not causal else "all causal" if causal == self.num_layers else f"{causal} causal"
        return [
            f"  features of layers {', '.join(map(str, self.target_layers))} (outputs, counted from 0); block of "
            f"{self.block_size}, mask token {self.mask_token}{known}",
            f"  {self.num_layers} layers{windows}, {order} in the block; {self.num_heads} heads of {self.head_dim}, "
            f"{self.num_kv_heads} for keys; {self.rope}",
        ]


class DFlash:
    """The draft's weights; embedding and head are the target's. `read` gives a tensor by its name in the file.

    ids: int64 [draft_vocab] of the tokens that its logits stand for, None if they are all of the target's.
    """

    def __init__(
        self, config: DFlashConfig, read: Callable[[str], torch.Tensor], target: Decoder, max_positions: int
    ) -> None:
        device, dtype = target.device, target.dtype
        fetch = Reader(config, read, dtype, device, of_draft=True)

        def of_layers(kind: str) -> torch.Tensor:
            stems = [f"layers.{index}.self_attn" for index in range(config.num_layers)]
            return fetch(*(f"{stem}.{part}_proj.{kind}" for stem in stems for part in "kv"))

        self.config = config
        self.block = Decoder(
            config,
            lambda name: read(name.removeprefix("model.")),
            dtype=dtype,
            device=device,
            max_positions=max_positions,
            ends=target,
            of_draft=True,
        )
        self.ids: torch.Tensor | None = None
        if config.draft_vocab is not None:
            self.block.head = Linear(fetch("lm_head.weight"))
            self.ids = token_ids(read("d2t")).to(device)
        self._fc = Linear(fetch("fc.weight"))
        self._norm = fetch.norm("hidden_norm")
        self._kv = Linear(of_layers("weight"), of_layers("bias") if config.qkv_bias else None)
        every = [layer.mixer.heads for layer in self.block.layers if isinstance(layer.mixer, Attention)]
        heads, norms = every[0], [own.k_norm for own in every if own.k_norm is not None]
        self.heads = ContextKVLayout(
            config.num_kv_heads, config.head_dim, torch.stack(norms), heads.eps, heads.cos, heads.sin
        )

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """features [T, n * hidden_size] of the target -> keys and values of all layers there, not yet normalised and
        rotated: [T, layers * 2 * kv_heads * head_dim], for `ContextKVLayout`. No layer's input norm is applied."""
        return self._kv(self._fc(features), norm=self._norm)


def token_ids(d2t: torch.Tensor) -> torch.Tensor:
    """int64 [draft_vocab]: `d2t` holds offsets."""
    return torch.arange(len(d2t)) + d2t.long()


def published_layers(depth: int, drafts: int) -> list[int]:
    """Feature layers of a draft whose config names none: `drafts` of the target's `depth`, from the second to the
    fourth from the end (z-lab/dflash, build_target_layer_ids)."""
    if drafts == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (drafts - 1)) for index in range(drafts)]


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as z-lab makes them for a target of this shape: for Qwen3-8B that of Qwen3-8B-DFlash-b16,
    up to 5 layers of the target's sizes and blocks of 16."""
    mask = 151669  # Qwen3's first id without a token
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": min(5, max(1, target.depth - 3)),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position,
        "rope_theta": target.rope.theta,
        "num_target_layers": target.depth,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask if mask < target.vocab_size else target.vocab_size - 1},
    }


def _masks(config: dict[str, Any], layers: int, causal: bool | None, block: int) -> tuple[Mask, ...]:
    """causal: for all layers; None: for those with a window."""
    window, used = config.get("sliding_window"), flag_of(config, "use_sliding_window")
    kinds = names_of(config, "layer_types")
    if kinds is None:
        first = count_of(config, "max_window_layers", 28, least=0) if used and window is not None else layers
        kinds = [_FULL] * min(first, layers) + [_SLIDING] * max(layers - first, 0)
    if len(kinds) != layers:
        raise refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise refuse("layer_types", kind, f"a DFlash draft has {_FULL!r} and {_SLIDING!r} layers")
    if _SLIDING not in kinds:
        return (Mask(causal=bool(causal)),) * layers
    if not used:
        raise refuse(
            "use_sliding_window", used, "some layers are sliding; what that means where it is not true differs"
        )
    window = count_of(config, "sliding_window")
    slides = True if causal is None else causal
    if not slides and window < block:
        # Rows in front of a query would have to be hidden too.
        raise refuse("sliding_window", window, f"where rows see what follows, use at least block_size={block}")
    return tuple(Mask(slides, window) if kind == _SLIDING else Mask(bool(causal)) for kind in kinds)


def _one_rope(config: dict[str, Any]) -> None:
    """Refuse tables per layer type that differ: the layers here share one."""
    for source in ("rope_scaling", "rope_parameters"):
        tables = list(table_of(config, source).values())
        if tables and all(isinstance(table, dict) for table in tables) and any(table != tables[0] for table in tables):
            raise refuse(source, config[source], "the layers of a DFlash draft share one rope")


def _class_defaults(model_type: str) -> dict[str, Any]:
    """What transformers' config class says where a file says nothing; of rope nothing is taken for granted."""
    if model_type not in ("qwen3", "llama"):
        raise refuse("transformer_layer_config.model_type", model_type, "use 'qwen3' or 'llama'")
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(model_type).to_dict()
    # Layer types depend on the number of layers; architectures are not the draft's.
    return {key: value for key, value in defaults.items() if not key.startswith("rope") and key != "layer_types"}
