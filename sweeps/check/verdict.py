"""The verdict of a check: is the checked engine further from the referee than the baseline?

Three measures, each of the checked engine beside the baseline:

* The error of log-probabilities: the engine's log-probability of a token that it chose minus the referee's, in absolute
  value. Every token has one, so that a fault shows long before it changes a token.
* Logits below the best: the referee's highest logit minus its logit of the token. In FP32 it is 0 nearly everywhere; in
  BF16 it is not, for any engine, where two logits are nearly equal.
* The worst token: the largest of these gaps from the first divergence of an answer on, in units in the last place of
  the engines' type at the magnitude of the referee's logits. It may be `FACTOR` times the noise of the baseline, and
  always `LEAST_UNITS`. The noise of a prompt is the largest gap or error of a log-probability in its answer; that of
  the baseline is the second largest of its prompts.

The first two are tested over prompts. Each prompt has the mean over the tokens of its answer under both engines. After
a divergence the two texts differ, but the referee judges each token after the text that it followed. If both engines
only round, the two means of a prompt are exchangeable. Engines round differently all the same, as they call other
kernels for other shapes, so the checked engine is further only if its means exceed those of the baseline by more than
`TOLERANCE`. The test is the one-sided sign-flip permutation test of the mean excess (Fisher 1935).

Why the bound follows the baseline's errors: an engine chooses a token because it finds its logit no lower than that of
the referee's best, so the gap is at most the sum of its errors of both. `FACTOR` is twice these two, as the baseline
shows its errors only of tokens that it chose. One error can be tens of times as large as those of all other prompts,
where the router of a mixture of experts nearly ties. Such a prompt, or one wrong answer of the baseline, must not hide
faults: hence the second largest. Before a divergence both engines chose the same token, whatever its gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

ALPHA = 0.001  # chance that a test finds an excess that is none
POWER = 0.8  # chance that it finds the smallest detectable excess
TOLERANCE = 0.1
FACTOR = 4
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}
# In FP32 sums round in the type of their terms, so that other kernels move a logit by up to about a thousandth. In BF16
# and FP16 sums are FP32 and only their results round: gaps of 1 to 3 units are usual.
LEAST_UNITS = {"float32": 512.0, "bfloat16": 8.0, "float16": 8.0}
_LEAST_EXCESS = {"float32": 1e-4, "bfloat16": 0.0, "float16": 0.0}  # logits, that rounding in FP32 may explain
LEAST_PROMPTS = 10  # with fewer, the test cannot reach ALPHA: 2^-9 is more
_EXACT, _DRAWS = 14, 20_000  # flips of so many signs are enumerated; of more, so many are drawn


class Places(NamedTuple):
    """What the referee finds at each token of an answer.

    below     its highest logit minus that of the token; 0 where it would choose the same one
    scale     its largest logit in absolute value
    logprobs  its log-probability of the token
    """

    below: list[float]
    scale: list[float]
    logprobs: list[float]

    def units(self, values: Sequence[float], dtype: str) -> list[float]:
        """Values of the tokens, in logits, in units in the last place of `dtype` at `scale`."""
        return [
            value / 2.0 ** (math.frexp(scale)[1] - 1 - _MANTISSA[dtype]) if value else 0.0
            for value, scale in zip(values, self.scale, strict=True)
        ]


@dataclass(frozen=True)
class Excess:
    """A measure of the checked engine against the baseline's, over `prompts` prompts, in logits per token.

    baseline, checked  the means
    p_value            the chance of such a mean excess where none is above the tolerance
    smallest           the difference of the means that the test finds with probability `POWER`; None of fewer than
                       `LEAST_PROMPTS` prompts, as it finds none
    """

    baseline: float
    checked: float
    p_value: float
    smallest: float | None
    prompts: int

    @property
    def is_found(self) -> bool:
        return self.p_value < ALPHA


def excess(baseline: Sequence[float], checked: Sequence[float], dtype: str) -> Excess | None:
    """The test of the means of each prompt under both engines; None of fewer than two prompts."""
    if len(baseline) < 2:
        return None
    means, found = np.array(baseline), np.array(checked)
    allowed = np.maximum(TOLERANCE * means, _LEAST_EXCESS[dtype])
    differences = found - means - allowed
    smallest = None
    if len(differences) >= LEAST_PROMPTS:
        normal = NormalDist()
        quantiles = normal.inv_cdf(1 - ALPHA) + normal.inv_cdf(POWER)
        smallest = float(allowed.mean() + quantiles * differences.std(ddof=1) / math.sqrt(len(differences)))
    return Excess(float(means.mean()), float(found.mean()), sign_flip_test(differences), smallest, len(differences))


def sign_flip_test(differences: np.ndarray) -> float:
    """One-sided p value of a mean above 0: the share of sign flips whose sum is at least the one that was found."""
    differences = differences[differences != 0]
    count = len(differences)
    if not count:
        return 1.0
    if count <= _EXACT:
        signs, unseen = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1), 0
    else:  # those that are drawn, and the one that was found
        signs, unseen = np.random.default_rng(0).choice((-1, 1), (_DRAWS, count)), 1
    nearly = differences.sum() - 1e-12 * np.abs(differences).sum()
    return float((int((signs @ differences >= nearly).sum()) + unseen) / (len(signs) + unseen))


def noise_of(prompts: Sequence[float]) -> float:
    """The noise of the baseline from that of each prompt: the second largest, or that of the only prompt."""
    return sorted(prompts)[-2:][0] if prompts else 0.0


def bound_of(noise: float, dtype: str) -> float:
    """The largest gap that a token may have, in units in the last place, from the baseline's noise in these units."""
    return max(LEAST_UNITS[dtype], FACTOR * noise)
