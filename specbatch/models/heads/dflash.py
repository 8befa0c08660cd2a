"""Network and config of DFLASH drafts, which fill a block of mask tokens in one pass with the target's features.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036, github.com/z-lab/dflash). A few
Qwen3 layers that use the target's embedding and output matrix. The context is not text: at a verified position the
concatenated hidden states of the target after some layers become one vector c = fc(features), and every layer's keys
and values there are computed from the same norm(c). Only the block itself passes through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.algorithms import ALGORITHMS, algorithm_of
from specbatch.config.draft_shape import MOST
from specbatch.errors import counted, refuse
from specbatch.files.config_values import count_of, flag_of, names_of, places_of, table_of
from specbatch.kernels.attention.queries import ContextKVLayout, Mask
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import MatrixShape, Shapes
from specbatch.models.heads.feature_layers import FeatureLayers
from specbatch.models.heads.speculators import speculative_tokens
from specbatch.models.layer_types import FULL, SLIDING, check_kinds
from specbatch.models.layers.blocks import Attention
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import decoder_shapes

_LAYERS, _BOUNDARIES = "target_layer_ids", "aux_hidden_state_layer_ids"
ARCHITECTURE = "DFlashDraftModel"
DEEPSPEC = ("Qwen3DSparkModel", "DSparkDraftModel")  # of DeepSpec and SpecForge
BLOCKS = {name: entry for name, entry in ALGORITHMS.items() if entry.tree == "block" and entry.published.has}
# Options of later drafts, with the values that turn them off. With an ignored option the draft would be another model.
_OFF: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "enable_correction_head": (None, False),
    "attention_mode": (None, "gqa"),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(ModelConfig):
    """Sizes of the draft's layers, and how it reads its target.

    block_size     tokens of a pass: the newest token (the anchor), then mask tokens
    mask_token     id of the mask token in the target's vocabulary
    features       the target's layers that the draft reads, in this order
    target_depth   layers of the target it was trained for, if the config states it
    masks          attention mask within a block, per layer
    from_anchor    each row drafts the token after its position, also that of the anchor. Else each row drafts the token
                   at its position, and the anchor's row nothing
    whole_file     the file contains copies of the target's embedding and output matrix, which are not read
    draft_vocab    number of tokens that it can draft, if not all of the target's. The file then has its own output
                   matrix for them, and `d2t`, the offset from a draft token's index to its id
    stated_drafts  the number of drafts that the config names, see `speculative_tokens`
    """

    algorithm: ClassVar[str] = "dflash"
    own_keys: ClassVar[tuple[str, ...]] = ()  # options of later drafts that it has
    may_draft_from_anchor: ClassVar[bool] = True

    block_size: int
    mask_token: int
    features: FeatureLayers
    target_depth: int | None
    masks: tuple[Mask, ...]
    from_anchor: bool = False
    whole_file: bool = False
    draft_vocab: int | None = None
    stated_drafts: int | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a config.json of z-lab, DeepSpec, SpecForge or speculators. Raises SpecbatchError for what is not
        supported.

        The keys of the block are at the top level or inside `dflash_config` or `dspark_config`, which take precedence.
        """
        if config.get("speculators_model_type") is not None:
            return replace(cls._from_speculators(config), stated_drafts=speculative_tokens(config))
        own = dict(config)
        for inside in ("dflash_config", "dspark_config"):
            own |= {key: value for key, value in table_of(config, inside).items() if value is not None}
        names, found = config.get("architectures"), algorithm_of(own)
        if found not in BLOCKS:
            known = (f"{list(entry.published.architectures[:2])} ({name})" for name, entry in BLOCKS.items())
            raise refuse("architectures", names, f"drafts of blocks have {', '.join(known)}")
        of_deepspec = names is not None and names[0] in DEEPSPEC
        cls._check_algorithm(own, found, may_have_markov=of_deepspec)
        if config.get("model_type") != "qwen3":
            raise refuse("model_type", config.get("model_type"), "the layers of a block draft are 'qwen3'")
        depth = None if own.get("num_target_layers") is None else count_of(own, "num_target_layers")
        layers = places_of(own, _LAYERS)
        if layers is None and depth is None:
            raise refuse(_LAYERS, None, "the config must give it, or num_target_layers")
        features = FeatureLayers(_LAYERS, layers or [])
        if layers is None and depth is not None:
            usual = published_layers(depth, count_of(own, "num_hidden_layers"))
            features = FeatureLayers(f"num_target_layers={depth}, the usual {_LAYERS}", usual)
        causal = None if own.get("is_causal") is None else flag_of(own, "is_causal")
        read = cls._of(config, own, features, depth, causal, from_anchor=of_deepspec)
        return replace(read, whole_file=of_deepspec)

    @classmethod
    def _check_algorithm(cls, own: dict[str, Any], found: str, *, may_have_markov: bool) -> None:
        """Refuse drafts of other algorithms. own: the keys of the block; found: the algorithm that the config is for;
        may_have_markov: whether the format states `markov_rank`, which may be 0."""
        rank = count_of(own, "markov_rank", None if may_have_markov else 0, least=0)
        if rank and not may_have_markov:
            raise refuse("markov_rank", rank, f"a draft with a Markov head has architectures=[{DEEPSPEC[0]!r}]")
        if found != cls.algorithm:
            raise refuse("algorithm", cls.algorithm, f"the draft has {BLOCKS[found].published.has}; use {found!r}")

    @classmethod
    def _from_speculators(cls, config: dict[str, Any]) -> Self:
        """The format of vllm-project/speculators: the layers are in `transformer_layer_config`, without the defaults of
        its class; feature layers are boundaries, where k is the input of layer k."""
        kind, found = config["speculators_model_type"], algorithm_of(config)
        if found not in BLOCKS:
            works = " or ".join(repr(name) for name, entry in BLOCKS.items() if name in entry.published.speculators)
            raise refuse("speculators_model_type", kind, f"drafts of blocks have {works}")
        from_anchor = BLOCKS[kind].root_drafts
        cls._check_algorithm(config, found, may_have_markov=from_anchor)
        given = table_of(config, "transformer_layer_config")
        inner = _class_defaults(given.get("model_type", "qwen3")) | given
        known, total = config.get("draft_vocab_size"), count_of(inner, "vocab_size")
        if known is not None and not 1 <= count_of(config, "draft_vocab_size") <= total:
            raise refuse("draft_vocab_size", known, f"the target's vocabulary has {total}")
        if config.get("target_hidden_size") not in (None, inner.get("hidden_size")):
            works = f"it must be the draft's hidden_size={inner.get('hidden_size')}"
            raise refuse("target_hidden_size", config["target_hidden_size"], works)
        boundaries = places_of(config, _BOUNDARIES)
        if boundaries is None:
            raise refuse(_BOUNDARIES, None, "the config must list the layers")
        causal = False if flag_of(config, "sliding_window_non_causal") else None
        features = FeatureLayers(_BOUNDARIES, boundaries, first=1)
        read = cls._of(inner, config, features, None, causal, from_anchor=from_anchor)
        return replace(read, whole_file=True, draft_vocab=None if known == total else known)

    @classmethod
    def _of(
        cls,
        inner: dict[str, Any],
        own: dict[str, Any],
        features: FeatureLayers,
        depth: int | None,
        causal: bool | None,
        *,
        from_anchor: bool,
    ) -> Self:
        """inner: the keys of the Qwen3 layers; own: those of the block; from_anchor: the default of the format."""
        for key, off in _OFF.items():
            if key not in cls.own_keys and own.get(key) not in off:
                raise refuse(key, own[key], "not supported; leave it out")
        plain = ModelConfig.from_dict(
            inner | {"architectures": None, "model_type": "qwen3", "layer_types": None, "use_sliding_window": False}
        )
        _one_rope(inner)
        if not features.listed or min(features.outputs) < 0:
            raise refuse(features.key, features.listed, f"list layers of the target, from {features.first} on")
        if len(set(features.listed)) < len(features.listed):
            raise refuse(features.key, features.listed, "each layer may occur once")
        block, from_anchor = count_of(own, "block_size"), cls._drafts_from_anchor(own, from_anchor)
        most = MOST if from_anchor else MOST + 1
        if not 2 <= block <= most:
            raise refuse("block_size", block, f"use 2 to {most} (a verify has at most {MOST + 1} rows)")
        return cls(
            **vars(plain) | {"tie_embeddings": False},
            block_size=block,
            mask_token=count_of(own, "mask_token_id", least=0),
            features=features._replace(listed=tuple(features.listed)),
            target_depth=depth,
            masks=_masks(inner, plain.num_layers, causal, block),
            from_anchor=from_anchor,
            **cls._heads(own, plain),
        )

    @classmethod
    def _drafts_from_anchor(cls, own: dict[str, Any], default: bool) -> bool:
        """Field `from_anchor`, from the keys of the block. default: the format's."""
        from_anchor = flag_of(own, "sample_from_anchor", default)
        if from_anchor and not cls.may_draft_from_anchor:
            works = f"the row of the newest token of a block drafts nothing with {cls.algorithm}"
            raise refuse("sample_from_anchor", True, works)
        return from_anchor

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        """Fields for what follows the layers, of which `plain` is the config."""
        return {}

    def with_drafts(self, count: int) -> Self:
        """This config for passes that make at most `count` drafts."""
        return self

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The layers, counted from 0, whose output the draft reads."""
        return self.features.outputs

    @property
    def most_drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def drafted_tokens(self) -> int:
        """Number of tokens that it can draft."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab

    @property
    def choices(self) -> int:
        """Number of tokens that a row's draft is chosen from."""
        return self.drafted_tokens

    def head_shapes(self) -> Shapes:
        """Of the file."""
        ends = ("model.embed_tokens.weight", "lm_head.weight")
        shapes = {name: shape for name, shape in decoder_shapes(self).items() if name not in ends}
        shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
        shapes["fc.weight"] = MatrixShape((self.hidden_size, len(self.target_layers) * self.hidden_size))
        shapes["hidden_norm.weight"] = (self.hidden_size,)
        if self.draft_vocab is not None:
            shapes["lm_head.weight"] = MatrixShape((self.draft_vocab, self.hidden_size))
            shapes["d2t"] = (self.draft_vocab,)
        return shapes

    def is_spare(self, name: str) -> bool:
        copies = (
            ("embed_tokens.weight", "lm_head.weight") if self.draft_vocab is None else ("embed_tokens.weight", "t2d")
        )
        return self.whole_file and name in copies

    @property
    def copied_parameters(self) -> int:
        """The weights of keys and values are stored twice: for blocks, and as one matrix for context."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.hidden_size

    def differences(self, target: ModelConfig) -> list[str]:
        """Differences that prevent the draft from running with this target."""
        depth = target.depth
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.target_depth or depth, depth),
        )
        found = [f"{name} is {ours} and the target has {theirs}" for name, ours, theirs in pairs if ours != theirs]
        # After the last layer some drafts read the hidden state with the final norm and others without it.
        if not self.features.within(depth - 1):
            found.append(f"{self.features}, and of the target's {depth} layers list {self.features.valid(depth - 1)}")
        if self.mask_token >= target.vocab_size:
            found.append(f"mask_token_id is {self.mask_token}, outside the target's vocabulary of {target.vocab_size}")
        return found

    def lines(self) -> list[str]:
        """A description of the draft for the log."""
        sliding = [f"{mask.window}" for mask in self.masks if mask.window]
        windows = f", {len(sliding)} of them with a window of {sliding[0]}" if sliding else ""
        known = "" if self.draft_vocab is None else f"; {self.draft_vocab} of {self.vocab_size} tokens drafted"
        causal = sum(mask.causal for mask in self.masks)
        order = "none causal" if not causal else "all causal" if causal == self.num_layers else f"{causal} causal"
        return [
            f"  features of layers {', '.join(map(str, self.target_layers))} (outputs, counted from 0); block of "
            f"{self.block_size}, mask token {self.mask_token}, {self.most_drafts} drafts{known}",
            f"  {counted(self.num_layers, 'layer')}{windows}, {order} in the block; {self.num_heads} heads of "
            f"{self.head_dim}, {self.num_kv_heads} for keys; {self.rope}",
        ]


class DFlash:
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8.

    ids: int64 [draft_vocab], the token id of each column of its logits; None if they are all of the target's.
    """

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        """fetch: reads the tensors by their names in the file, as parts of `DFlashConfig` fetch.config."""
        config = fetch.config
        assert isinstance(config, DFlashConfig)
        rows, hidden = config.num_kv_heads * config.head_dim, config.hidden_size

        self.config = config
        self.block = Decoder(
            config,
            lambda name: fetch.read(name.removeprefix("model.")),
            dtype=target.dtype,
            device=target.device,
            max_positions=max_positions,
            ends=target,
            of_draft=True,
            ranks=fetch.ranks,
            to_fp8=fetch.to_fp8,
        )
        self.ids: torch.Tensor | None = None
        head = target.head
        if config.draft_vocab is not None:
            head = fetch.output_matrix("lm_head.weight", config.draft_vocab)
            self.ids = token_ids(fetch.read("d2t")).to(target.device)
        self.block.head = fetch.head(head)
        self._fc = fetch.linear({"fc": hidden}, len(config.target_layers) * hidden)
        self._norm = fetch.norm("hidden_norm")
        stems = (f"layers.{index}.self_attn.{part}_proj" for index in range(config.num_layers) for part in "kv")
        self._kv = fetch.linear(dict.fromkeys(stems, rows), hidden, config.qkv_bias)
        every = [layer.mixer.heads for layer in self.block.layers if isinstance(layer.mixer, Attention)]
        heads, norms = every[0], [own.k_norm for own in every if own.k_norm is not None]
        self.heads = ContextKVLayout(
            config.num_kv_heads, config.head_dim, torch.stack(norms), heads.eps, heads.cos, heads.sin
        )

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """features [T, n * hidden_size] of the target -> keys and values of all layers for these positions, before
        q/k norm and rope: [T, layers * 2 * kv_heads * head_dim], for `ContextKVLayout`. No layer's input norm is
        applied."""
        return self._kv(self._fc(features), norm=self._norm)


def token_ids(d2t: torch.Tensor) -> torch.Tensor:
    """int64 [draft_vocab]: token ids from the offsets `d2t`."""
    return torch.arange(len(d2t)) + d2t.long()


def published_layers(depth: int, drafts: int) -> list[int]:
    """Feature layers of a draft whose config has none: `drafts` of the target's `depth` layers, evenly spaced from the
    second to the fourth from the end (z-lab/dflash, build_target_layer_ids)."""
    if drafts == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (drafts - 1)) for index in range(drafts)]


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as published by z-lab for targets of this shape: up to 5 layers of the target's sizes and
    blocks of 16. For Qwen3-8B it is that of Qwen3-8B-DFlash-b16."""
    mask = 151669  # Qwen3's first unused id
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": min(5, max(1, target.depth - 3)),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.usual_heads[0],
        "head_dim": target.usual_heads[1],
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position,
        "rope_theta": target.rope.theta,
        "num_target_layers": target.depth,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask if mask < target.vocab_size else target.vocab_size - 1},
    }


def _masks(config: dict[str, Any], layers: int, causal: bool | None, block: int) -> tuple[Mask, ...]:
    """causal: of all layers; None: layers with a sliding window are causal, the others not."""
    window, used = config.get("sliding_window"), flag_of(config, "use_sliding_window")
    kinds = names_of(config, "layer_types")
    if kinds is None:
        first = count_of(config, "max_window_layers", 28, least=0) if used and window is not None else layers
        kinds = [FULL] * min(first, layers) + [SLIDING] * max(layers - first, 0)
    check_kinds(kinds, layers, (FULL, SLIDING), "a DFLASH draft has")
    if SLIDING not in kinds:
        return (Mask(causal=bool(causal)),) * layers
    if not used:
        raise refuse("use_sliding_window", used, "layer_types has sliding layers, so it must be true")
    window = count_of(config, "sliding_window")
    slides = True if causal is None else causal
    if not slides and window < block:
        # Tokens of the block before the query would have to be masked, too.
        raise refuse("sliding_window", window, f"without causal attention use at least block_size={block}")
    return tuple(Mask(slides, window) if kind == SLIDING else Mask(bool(causal)) for kind in kinds)


def _one_rope(config: dict[str, Any]) -> None:
    """Refuse different rope tables per layer type."""
    for source in ("rope_scaling", "rope_parameters"):
        tables = list(table_of(config, source).values())
        if tables and all(isinstance(table, dict) for table in tables) and any(table != tables[0] for table in tables):
            raise refuse(source, config[source], "the layers of a DFLASH draft share one rope")


def _class_defaults(model_type: str) -> dict[str, Any]:
    """Defaults of transformers' config class for missing keys, except rope, which must be given."""
    if model_type not in ("qwen3", "llama"):
        raise refuse("transformer_layer_config.model_type", model_type, "use 'qwen3' or 'llama'")
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(model_type).to_dict()
    # Layer types depend on the number of layers; architectures are not the draft's.
    return {key: value for key, value in defaults.items() if not key.startswith("rope") and key != "layer_types"}
