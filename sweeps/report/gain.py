"""Break-even and what speculation gains by its steps, accept length / break-even, with intervals over repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.run_record import RunRecord
from specbatch.records.verdicts import LOSES, ONE_REPEAT, PAYS, Speedup, speedup_over_runs
from specbatch.sweeps.report.notes import Note

BREAK_EVEN = (
    "Break-even: the accept length at which steps with speculation are as fast as those of the baseline (ratio of step "
    "times with the same number of requests, prompts left out); speculation pays above it. Speedup by steps: accept "
    f"length / break-even, with the {CONFIDENCE:.0%} interval of that ratio over the repeats."
)
# Below break-even by this share, a draft length that is chosen during the run is no loss: it is what choosing costs.
CHOOSING = 0.03


@dataclass(frozen=True)
class Gain:
    """What speculation gains by its steps at one point.

    accept_length, needed   means over repeats; needed is the break-even
    speedup                 accept_length / needed (the geometric mean over repeats), with its interval and verdict
    measures_step           acceptance was simulated with mean 1, so that no draft is accepted: only the step counts
    """

    accept_length: float
    needed: float
    speedup: Speedup
    measures_step: bool = False

    @property
    def share(self) -> float:
        return self.speedup.ratio - 1

    @property
    def is_shown(self) -> bool:
        """Whether the repeats show a gain or a loss."""
        return self.speedup.verdict in (PAYS, LOSES)

    def loses(self, tolerance: float = 0.0) -> bool:
        """Whether a loss of more than `tolerance` was measured, and the repeats (if several) show it."""
        return not self.measures_step and self.share < -tolerance and self.speedup.verdict in (LOSES, ONE_REPEAT)


def gain_of(
    repeats: Iterable[tuple[float | None, float | None]],
    simulated: float | None = None,
    *,
    interleaved: bool = True,
    anytime: bool = False,
) -> Gain | None:
    """The gain from (accept length, break-even) of each repeat; None where a repeat has both in none.

    simulated: the mean of simulated accept lengths; interleaved, anytime: as for `speedup_over_runs`.
    """
    pairs = [
        (accepted, needed)
        for accepted, needed in repeats
        if accepted is not None and needed is not None and accepted > 0 and needed > 0  # NaN is neither
    ]
    if not pairs:
        return None
    accepted, needed = ([pair[side] for pair in pairs] for side in (0, 1))
    speedup = speedup_over_runs(needed, accepted, "higher", paired=True, interleaved=interleaved, anytime=anytime)
    return Gain(fmean(accepted), fmean(needed), speedup, simulated == 1)


def losses(points: Sequence[tuple[str, Gain | None, RunRecord]]) -> Note | None:
    """A warning about the points, by name, at which speculation loses; None without any."""
    below = [
        (where, gain, record)
        for where, gain, record in points
        if gain is not None and gain.loses(CHOOSING if record.chooses_draft_length else 0.0)
    ]
    if not below:
        return None
    places = "; ".join(
        f"{name} (accept length {gain.accept_length:.2f}, {gain.needed:.2f} needed)" for name, gain, _ in below
    )
    real = [record.config for *_, record in below if record.simulated_accept_length is None]
    causes = dict.fromkeys(
        causes_of_low_acceptance(config["speculation"]["algorithm"], config["load_format"]) for config in real
    )
    expected = f"; if you expected a higher acceptance, likely causes: {'; '.join(causes)}" if causes else ""
    advice = f"draft fewer tokens or run fewer requests at once to lower the break-even{expected}"
    return Note(f"below break-even: {places}", "LOW ACCEPTANCE", advice)
