"""A toy model in memory, drafts for it, and naive decoding of it."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from specbatch.models.config import ModelConfig
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dflash2 import DFlash2Config
from specbatch.models.heads.domino import DominoConfig
from specbatch.models.heads.dspark import DSparkConfig
from specbatch.models.heads.lilicorr import LiLiCorrConfig
from specbatch.models.heads.xpress import XPressConfig
from specbatch.models.weight_shapes import tensor_shapes

BOS, EOS = 1, 2
_PIECES = [b"", b"<s>", b"</s>", *(bytes([97 + i]) for i in range(26))]
_PIECES += [b" ", b"ab", b"\n", b"\xc3", b"\xa9", b"x\xf0\x9f", b"\x98\x80", "ü".encode()]  # é and an emoji in halves


class ToyTokenizer:
    """37 tokens, some of them parts of characters; `size` cuts the vocabulary down."""

    name = "toy"
    eos_ids = frozenset({EOS})
    bos_id = BOS
    has_chat_template = False
    byte_tokens: dict[int, int] = {}  # noqa: RUF012
    hidden: dict[str, int] = {"<s>": BOS, "</s>": EOS}  # noqa: RUF012
    eos_id = EOS

    def __init__(self, size: int = len(_PIECES), *, foreign: bool = False) -> None:
        self.vocab_size = size
        self._foreign = foreign  # other texts

    @property
    def shown_bytes(self) -> list[bytes | None]:
        return [b"other " + piece if self._foreign else piece for piece in _PIECES[: self.vocab_size]]

    def token_bytes(self) -> list[bytes | None]:
        return [None if token in (0, BOS, EOS) else piece for token, piece in enumerate(_PIECES[: self.vocab_size])]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [_PIECES.index(letter.encode()) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        gone = (BOS, EOS) if skip_special_tokens else ()
        return b"".join(_PIECES[token] for token in ids if token not in gone).decode(errors="replace")

    def vocabulary(self) -> list[str]:
        return [("other " if self._foreign else "") + piece.decode(errors="backslashreplace")
                for piece in _PIECES[: self.vocab_size]]  # fmt: skip


class ToyCheckpoint:
    """Random weights in memory. Names: "toy", "toy-2" (another seed), "toy-foreign" (31 tokens of other texts),
    "toy-deep" (a layer more), and "toy-nan"."""

    origin = "memory"
    mtp: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    grouped = None
    cache: dict[str, tuple[int, ...]] = {}  # noqa: RUF012

    def __init__(self, name: str = "toy", vocabulary: int = len(_PIECES)) -> None:
        self.name = name
        vocabulary = 31 if name == "toy-foreign" else vocabulary
        self.config = ModelConfig.from_dict(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": vocabulary,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4 if name == "toy-deep" else 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "eos_token_id": EOS,
            }
        )
        generator = torch.Generator().manual_seed(2 if name == "toy-2" else 1)
        self.tensors = random_tensors(self.config, generator)
        if name == "toy-nan":  # token 36 poisons whatever reads it
            self.tensors["model.embed_tokens.weight"][36, 0] = torch.nan
            self.config = ModelConfig(**{**self.config.__dict__, "tie_embeddings": False})
            self.tensors["lm_head.weight"] = torch.randn(vocabulary, 32, generator=generator) * 0.2

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def tokenizer(self) -> ToyTokenizer:
        return ToyTokenizer(self.config.vocab_size, foreign=self.name == "toy-foreign")


TOY_BLOCK: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 37, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 12, "max_position_embeddings": 512, "rms_norm_eps": 1e-4, "rope_theta": 3000.0,
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 9,
    "num_target_layers": 3, "block_size": 5, "dflash_config": {"mask_token_id": 34, "target_layer_ids": [1, 0]},
}  # fmt: skip

_MARKOV = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "enable_confidence_head": False}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
_GRU = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 8, "emb_dim": 6, "shift_label": True}
_LATTICE = {
    "lilicorr_candidate_topk": 5, "lilicorr_hidden_size": 12, "lilicorr_num_layers": 2, "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 8, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 40.0,
}  # fmt: skip
TOY_BLOCKS: dict[str, tuple[type[DFlashConfig], dict[str, Any]]] = {
    "toy-block": (DFlashConfig, {}),
    "toy-block-34": (DFlashConfig, {}),
    **{
        f"toy-block-{kind}": (DSparkConfig, _MARKOV | {"markov_head_type": kind})
        for kind in ("vanilla", "gated", "rnn")
    },
    "toy-block-refiner": (
        XPressConfig,
        {"architectures": ["Qwen3XPressModel"], "xpress_rank": 6, "xpress_mlp_hidden": 10, "xpress_num_passes": 4},
    ),
    "toy-block-gru": (
        DominoConfig,
        {"dflash_config": TOY_BLOCK["dflash_config"] | _GRU},
    ),
    "toy-block-lattice": (
        LiLiCorrConfig,
        {"architectures": ["LiLiCorrDraftModel"], "dflash_config": TOY_BLOCK["dflash_config"] | _LATTICE},
    ),
    "toy-block-selector": (
        DFlash2Config,
        {"architectures": ["DFlash2DraftModel"], "dflash_config": TOY_BLOCK["dflash_config"] | _SELECTOR},
    ),
}


class ToyBlock(ToyCheckpoint):
    """A block draft for the toy, random, of `TOY_BLOCKS`. "toy-block-34" drafts nothing but token 34, which the toy
    likes to repeat.

    raw: its config.json
    """

    def __init__(self, name: str = "toy-block") -> None:
        self.name = name
        read, changes = TOY_BLOCKS[name]
        self.raw = TOY_BLOCK | changes
        self.config = read.from_dict(self.raw)
        generator = torch.Generator().manual_seed(4)
        self.tensors = random_tensors(self.config, generator)
        if name == "toy-block-34":  # layers that add nothing leave a mask's own embedding
            for key, value in self.tensors.items():
                if key.endswith(("o_proj.weight", "down_proj.weight")):
                    value.zero_()


def random_tensors(config: ModelConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What a checkpoint of this config holds; norms are random too, so that they matter."""
    return {
        key: torch.randn(shape, generator=generator) * (1.2 / math.sqrt(shape[-1]))
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for key, shape in tensor_shapes(config).items()
    }


class Toy:
    """The toy model and its naive decoding in float64: the whole text is computed again for every token, no cache.
    Of "toy-nan" it computes with 0 in place of NaN."""

    eos = EOS
    pieces = _PIECES
    block = ToyBlock

    def __init__(self, name: str = "toy") -> None:
        self.checkpoint = ToyCheckpoint(name)
        self.tokenizer = ToyTokenizer()
        self._weights = {key: value.double().nan_to_num() for key, value in self.checkpoint.tensors.items()}
        self._head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        self._decoded: dict[tuple[tuple[int, ...], int], tuple[int, ...] | None] = {}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float64 [len(tokens), V]."""
        return self._forward(torch.tensor([tokens]))[0]

    def logits_of(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """float64 [len(text), V] of each text, in one batch."""
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return [logits[: len(text)] for logits, text in zip(self._forward(padded), texts, strict=True)]

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [texts, n]. Returns float64 [texts, n, V]."""
        config, weights = self.checkpoint.config, self._weights
        count, dim, half = tokens.shape[1], config.head_dim, config.head_dim // 2
        angles = torch.outer(
            torch.arange(count).double(), 1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        ).repeat(1, 2)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, (x.shape[-1],), weights[name], config.rms_norm_eps)

        def heads(x: torch.Tensor, name: str, turn: bool) -> torch.Tensor:
            y = (x @ weights[name].T).unflatten(-1, (-1, dim)).transpose(1, 2)
            if turn:
                y = y * angles.cos() + torch.cat([-y[..., half:], y[..., :half]], -1) * angles.sin()
            return y.repeat_interleave(config.num_heads // y.shape[1], 1)

        x = weights["model.embed_tokens.weight"][tokens]
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            y = norm(x, f"{layer}.input_layernorm.weight")
            q, k = (heads(y, f"{layer}.self_attn.{part}_proj.weight", True) for part in "qk")
            v = heads(y, f"{layer}.self_attn.v_proj.weight", False)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
            y = norm(x, f"{layer}.post_attention_layernorm.weight")
            gate, up = (y @ weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ self._head.T

    def greedy(self, prompt: tuple[int, ...], count: int = 40) -> tuple[int, ...] | None:
        """The likeliest continuation; None where two tokens are so near that rounding could decide."""
        if (prompt, count) not in self._decoded:
            self._decode([prompt], count)
        return self._decoded[prompt, count]

    def _decode(self, prompts: list[tuple[int, ...]], count: int = 40) -> None:
        """All prompts in one batch: padding after a text does not change the logits before it."""
        lengths, every = torch.tensor([len(prompt) for prompt in prompts]), torch.arange(len(prompts))
        texts = torch.zeros(len(prompts), int(lengths.max()) + count, dtype=torch.int64)
        for text, prompt in zip(texts, prompts, strict=True):
            text[: len(prompt)] = torch.tensor(prompt)
        clear = torch.ones(len(prompts), dtype=torch.bool)
        for ends in (lengths + step for step in range(count)):
            best = self._forward(texts[:, : int(ends.max())])[every, ends - 1].topk(2)
            clear &= best.values[:, 0] - best.values[:, 1] >= 1e-4
            texts[every, ends] = best.indices[:, 0]
        for text, prompt, is_clear in zip(texts.tolist(), prompts, clear.tolist(), strict=True):
            end = len(prompt)
            self._decoded[prompt, count] = tuple(text[end : end + count]) if is_clear else None

    @cache  # noqa: B019
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """28 prompts of 1 to 45 tokens, half of them with a prefix of 21 in common, clear at every greedy token."""
        generator = torch.Generator().manual_seed(3)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, 37, (count,), generator=generator).tolist())

        shared = draw(21)
        lengths = [1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 45]
        drawn = [draw(length) for length in lengths] + [shared + draw(length) for length in lengths[:14]]
        self._decode(drawn)
        clear = [prompt for prompt in drawn if self.greedy(prompt) is not None]
        assert len(clear) >= 28
        return tuple(clear[:28])
