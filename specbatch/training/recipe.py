"""Settings of a training run: every choice that the weights depend on, checked before anything is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from specbatch.algorithms import ALGORITHMS
from specbatch.config.draft_shape import MOST
from specbatch.config.settings import Rule, check_fields, is_whole, number, setting, whole
from specbatch.config.values import layers
from specbatch.errors import MOST_SEED, refuse

_OWN = {name: algorithm.training.settings for name, algorithm in ALGORITHMS.items() if algorithm.training}
HEADS = tuple(_OWN)
SETTINGS = tuple(dict.fromkeys(name for own in _OWN.values() for name in own))  # that only some heads take


def _takers(name: str) -> str:
    """The algorithms that take a setting."""
    others = [algorithm for algorithm, own in _OWN.items() if name not in own]
    takers = [algorithm for algorithm, own in _OWN.items() if name in own]
    return f"All but {others[0]}" if len(others) == 1 else ", ".join(takers)


def _default(name: str) -> str:
    """The defaults of a setting: that of most algorithms, and those that differ."""
    values = {algorithm: own[name] for algorithm, own in _OWN.items() if name in own}
    usual = Counter(values.values()).most_common(1)[0][0]
    others = [f"{algorithm}: {value}" for algorithm, value in values.items() if value != usual]
    return f"Default: {'; '.join([str(usual), ', '.join(others)]) if others else usual}"


USUAL_VOCABULARY = 32000  # draft vocabulary of published EAGLE-3 heads

_ROOT_DRAFTS = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.root_drafts)
_LAYERS = Rule(
    lambda x: isinstance(x, tuple) and len(x) > 0 and all(is_whole(k) and k >= 1 for k in x) and sorted(set(x)) == [*x],
    "give a tuple of layers, ascending, such as (2, 18, 33)",
)


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run. Those of other algorithms are None.

    algorithm: one of `HEADS`. The learning rate rises in a short warm-up and decays to a tenth along a cosine.
    """

    algorithm: str = "eagle3"
    steps: int = setting(1000, "Number of optimizer steps.", whole(1))
    batch_tokens: int = setting(4096, "Tokens per step, including padding.", whole(8))
    max_len: int = setting(1024, "Longest prompt + answer; longer answers are truncated.", whole(8))
    lr: float = setting(
        5e-4,
        "Peak learning rate; large models need less, such as 1e-4.",
        number(lambda rate: 0 < rate < 1, "use a number above 0 and below 1"),
    )
    held_out: int = setting(32, "Number of answers held out for evaluation.", whole(1))
    train_on_prompts: bool = setting(
        False, "Also learn to draft within the prompts, as for long texts of which answers are a small part."
    )
    seed: int = setting(0, "", whole(0, MOST_SEED))
    unroll: int | None = setting(
        None,
        f"{_takers('unroll')}: drafts after each token in training. {_default('unroll')}.",
        whole(1, 16),
    )
    vocab: int | None = setting(
        None,
        f"{_takers('vocab')}: size of the draft vocabulary, made of the most frequent tokens. "
        f"Default: {USUAL_VOCABULARY} or all.",
        whole(1),
    )
    draft_layers: int | None = setting(
        None, f"{_takers('draft_layers')}: number of layers. {_default('draft_layers')}.", whole(1, 64)
    )
    aux_layers: tuple[int, ...] | None = setting(
        None,
        f"{_takers('aux_layers')}: layers of the target whose inputs the head reads, such as 2,18,33. Default: 2, the "
        "middle one and the last but two.",
        _LAYERS,
        parse=layers,
    )
    block_size: int | None = setting(
        None,
        f"{_takers('block_size')}: rows of a block, including the newest token, where {_ROOT_DRAFTS} drafts, too. "
        f"{_default('block_size')}.",
        whole(2, 64),
    )
    anchors: int | None = setting(
        None,
        f"{_takers('anchors')}: blocks per answer and step. "
        f"{_default('anchors')}; with a large target more cost little.",
        whole(1, 4096),
    )
    markov_rank: int | None = setting(
        None, f"{_takers('markov_rank')}: rank of the Markov head. {_default('markov_rank')}.", whole(1, 4096)
    )
    token_weight: float | None = setting(
        None,
        f"{_takers('token_weight')}: weight of the cross entropy with the target's tokens at the end of the training; "
        f"it falls from 1. The rest is the distance from the target's distribution. {_default('token_weight')}; 1: "
        "cross entropy alone.",
        number(lambda weight: 0 <= weight <= 1, "use a number from 0 to 1"),
    )
    selector_rank: int | None = setting(
        None, f"{_takers('selector_rank')}: rank of the selector. {_default('selector_rank')}.", whole(1, 4096)
    )
    gru_size: int | None = setting(
        None, f"{_takers('gru_size')}: channels of the GRU's state. {_default('gru_size')}.", whole(1, 16384)
    )
    correction_rank: int | None = setting(
        None,
        f"{_takers('correction_rank')}: rank of the correction of logits. {_default('correction_rank')}.",
        whole(1, 4096),
    )
    lattice_width: int | None = setting(
        None,
        f"{_takers('lattice_width')}: width of the head that scores the lattice, a multiple of 8. "
        f"{_default('lattice_width')}.",
        Rule(lambda x: is_whole(x) and x > 0 and x % 8 == 0, "use a multiple of 8"),
    )
    refiner_rank: int | None = setting(
        None, f"{_takers('refiner_rank')}: rank of the refiner. {_default('refiner_rank')}.", whole(1, 4096)
    )

    def __post_init__(self) -> None:
        if self.algorithm not in HEADS:
            raise refuse("algorithm", self.algorithm, f"heads that can be trained are {', '.join(HEADS)}")
        own = _OWN[self.algorithm]
        for name in SETTINGS:
            value = getattr(self, name)
            if value is None and name in own:
                object.__setattr__(self, name, own[name])
            elif value is not None and name not in own:
                takers = ", ".join(algorithm for algorithm, names in _OWN.items() if name in names)
                raise refuse(name, value, f"algorithm {self.algorithm!r} has no such setting; it belongs to {takers}")
        check_fields(self)
        if ALGORITHMS[self.algorithm].root_drafts and self.block_size is not None and self.block_size > MOST:
            raise refuse("block_size", self.block_size, f"use at most {MOST}, as the first row drafts, too")
        if self.batch_tokens < self.max_len:
            works = f"use at least max_len={self.max_len}, or lower that: an example is never split"
            raise refuse("batch_tokens", self.batch_tokens, works)

    def vocabulary(self, target: int) -> int:
        """Draft vocabulary size of a head for a target with that many tokens."""
        if self.vocab is not None and self.vocab > target:
            raise refuse("vocab", self.vocab, f"the target has {target} tokens; use at most that")
        return self.vocab or min(USUAL_VOCABULARY, target)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
