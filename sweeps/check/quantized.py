"""The verdict on a server that quantizes weights or activations: is it further from the referee than that explains?

Such a server is further from the model in FP32 than an engine that rounds to 16 bits, so it cannot be tested against
one. Its own log-probabilities show how much it rounds: it must be less than another model would show, and explains gaps
of its tokens as between two servers (`specbatch.sweeps.check.compared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from specbatch.sweeps.check.compared import LEAST_GAP
from specbatch.sweeps.check.report import CheckReport
from specbatch.sweeps.check.verdict import FACTOR, noise_of

# Nats per token between a server's log-probabilities and the referee's, mean, that are no fault. With SmolLM2-135M:
# 0.05 of llama.cpp's activations of 8 bits, 0.11 of FP8 weights, 0.49 of a plain rounding of weights to 4 bits and 0.51
# of llama.cpp's Q4_0, which has a gap of 4.2; 0.79 of a base of rope of 1,000 in place of 100,000, 0.25 of 10,000 and
# 0.17 of 1,000,000.
OF_ACTIVATIONS = 0.15  # the referee has the server's weights
OF_WEIGHTS = 0.65  # the server's weights are those of the referee, quantized
MOST_GAP = 5.0  # nats that quantization explains at most


@dataclass(frozen=True)
class QuantizedReport(CheckReport):
    """Of answers of a server that quantizes. most_error: nats per token that this explains."""

    most_error: float = OF_WEIGHTS

    @cached_property
    def error(self) -> float | None:
        """The mean distance of its log-probabilities from the referee's, in nats per token; None: it shows none."""
        errors = list(chain.from_iterable(item.checked.errors for item in self.judged))
        return sum(errors) / len(errors) if errors else None

    @cached_property
    def gap(self) -> float:
        """The largest gap of a token from a divergence on, in nats."""
        places = [item.checked.places.below[item.equal :] for item in self.judged if item.checked.places]
        return max(chain.from_iterable(places), default=0.0)

    @cached_property
    def most_gap(self) -> float:
        """The gap that quantization explains, in nats."""
        noises = [max(item.checked.errors) for item in self.judged if item.checked.errors]
        return min(MOST_GAP, max(LEAST_GAP, FACTOR * noise_of(noises))) if noises else MOST_GAP

    @property
    def faults(self) -> list[str]:
        found = self.failures()
        if self.error is not None and self.error > self.most_error:
            found.append(
                f"its log-probabilities are {self.error:.2g} nats per token from the referee's, and quantization "
                f"explains {self.most_error:g}"
            )
        if self.gap > self.most_gap:
            found.append(
                f"a token is {self.gap:.2g} nats below the referee's best, and quantization explains "
                f"{self.most_gap:.2g}"
            )
        return found

    def summary(self) -> dict[str, Any]:
        found = {"error_nats": self.error, "most_error_nats": self.most_error}
        return super().summary() | found | {"gap_nats": self.gap, "most_gap_nats": self.most_gap}

    def tests(self) -> str:
        if not self.judged:
            return ""
        errors = "the server shows none" if self.error is None else f"{self.error:.2g} nats per token"
        return (
            f"* Error of log-probabilities: {errors}; quantization explains {self.most_error:g}.\n"
            f"* Worst token from a divergence on: {self.gap:.2g} nats below the best; the bound is {self.most_gap:.2g} "
            f"({FACTOR} times the second largest error of the prompts, from {LEAST_GAP:g} to {MOST_GAP:g})."
        )
