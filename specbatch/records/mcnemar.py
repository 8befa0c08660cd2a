"""McNemar's exact test: did accuracy fall between two runs on the same questions?

The test (Psychometrika 12, 1947) uses only the questions whose result changed: if accuracy did not fall, each of them
is as likely to be lost as gained. Its exact form is a binomial test. With 500 questions, two separate standard errors
cannot distinguish a drop of 4 points from noise; paired answers can show a drop of one point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbatch.errors import refuse
from specbatch.records.answers import EvalAnswers, unpaired

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STEP = 1e-9  # from the difference itself, at which the statistic is 0
_MOST = 1_000_000  # questions to count up to


@dataclass(frozen=True)
class Changes:
    """Of `n` questions: those that were right and are wrong now (lost), and the reverse (gained)."""

    n: int
    right_before: int
    lost: tuple[int, ...] = ()
    gained: tuple[int, ...] = ()

    @property
    def right_after(self) -> int:
        return self.right_before - len(self.lost) + len(self.gained)

    @property
    def delta(self) -> float:
        """Accuracy after less accuracy before."""
        return (len(self.gained) - len(self.lost)) / self.n

    @property
    def changed(self) -> int:
        return len(self.lost) + len(self.gained)

    def p_fallen(self) -> float:
        """One-sided p value: the probability of at least as many losses among the changed questions if nothing fell."""
        return self._p("greater")

    def p_changed(self) -> float:
        """The two-sided p value."""
        return self._p("two-sided")

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval of `delta`: Tango's score interval of two paired shares (Statistics in Medicine 17, 1998), extended
        to 0 where the exact two-sided test is not significant. Without a changed question its ends are z^2 / (n + z^2)
        away from 0."""
        from scipy.optimize import brentq
        from scipy.stats import norm

        limit = float(norm.isf((1 - confidence) / 2)) ** 2
        low, high = (
            float(brentq(self._beyond, start, end, (limit,), xtol=1e-12)) if self._beyond(end, limit) > 0 else end
            for start, end in ((self.delta - _STEP, -1.0), (self.delta + _STEP, 1.0))
        )
        return (low, high) if self.p_changed() < 1 - confidence else (min(low, 0.0), max(high, 0.0))

    def _beyond(self, delta: float, limit: float) -> float:
        """Above 0 where the square of the score statistic of a true difference `delta` is above `limit`."""
        lost, gained = len(self.lost), len(self.gained)
        linear = (2 * self.n - gained + lost) * delta - self.changed
        root = math.sqrt(max(0.0, linear**2 + 8 * self.n * lost * delta * (1 - delta)))
        likely = (root - linear) / (4 * self.n)  # the share lost, most likely with this difference
        return (gained - lost - self.n * delta) ** 2 - limit * self.n * (2 * likely + delta * (1 - delta))

    def _p(self, alternative: str) -> float:
        from scipy.stats import binomtest

        if not self.changed:
            return 1.0
        return float(binomtest(len(self.lost), self.changed, alternative=alternative).pvalue)


def pick_score(report: EvalAnswers, filter: str | None, metric: str | None) -> tuple[str, str]:
    """The answer filter and metric; None selects the only one there is."""
    known = [(score.filter, score.metric) for score in report.overall]
    if not report.scores:
        raise refuse("task", report.task, "was not scored (predict_only); run it without")
    if not known:
        raise refuse("task", report.task, "has no score of its own, because lm-eval does not aggregate it; name a task")
    found = [pair for pair in known if filter in (None, pair[0]) and metric in (None, pair[1])]
    if len(found) == 1:
        return found[0]
    named = "; ".join(f'filter = "{name}", metric = "{kind}"' for name, kind in known)
    setting, value = ("metric", metric) if metric is not None else ("filter", filter)
    raise refuse(setting, value, f"{report.task} has {named}; name one of them in [accuracy]")


def changes(before: EvalAnswers, after: EvalAnswers, filter: str, metric: str) -> Changes:
    """Pair the answers by question. Refused: different questions, and scores other than right or wrong."""
    old, new = (_verdicts(report, filter, metric) for report in (before, after))
    if apart := sorted(doc for doc in {*old, *new} if old.get(doc, ("",))[0] != new.get(doc, ("",))[0]):
        raise unpaired(apart)
    lost = tuple(doc for doc in old if old[doc][1] and not new[doc][1])
    gained = tuple(doc for doc in old if new[doc][1] and not old[doc][1])
    return Changes(len(old), sum(right for _, right in old.values()), lost, gained)


def is_binary(report: EvalAnswers, filter: str, metric: str) -> bool:
    """Whether each question with this score is right or wrong. In a group, tasks may have no such score."""
    values = [row["scores"][filter][metric] for row in report.questions if metric in row["scores"].get(filter, {})]
    return bool(values) and all(value in (0, 1) for value in values)


def detectable_drop(n: int, churn: float, *, alpha: float, power: float) -> float | None:
    """The smallest true drop of accuracy that the one-sided test at `alpha` detects with probability `power`.

    churn: share of questions that are gained by chance, and the same share lost, in addition to the drop. Exact: the
    counts of gained and lost questions are multinomial. None if not even the loss of all others would be detected.
    """
    steps = int(n * (1 - 2 * churn))
    low, high = 0, steps + 1  # drops in questions: too small, and large enough
    while high - low > 1:
        middle = (low + high) // 2
        if found_with(n, churn, middle / n, alpha=alpha) >= power:
            high = middle
        else:
            low = middle
    return high / n if high <= steps else None


def questions_for(drop: float, churn: float, *, alpha: float, power: float) -> int | None:
    """About the fewest questions at which the test at `alpha` detects a true `drop` of accuracy with probability
    `power`; None if a million do not. churn: as for `detectable_drop`."""
    low, high = 0, 1
    while found_with(high, churn, drop, alpha=alpha) < power:
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found_with(middle, churn, drop, alpha=alpha) >= power else (middle, high)
    return high


def found_with(n: int, churn: float, drop: float, *, alpha: float) -> float:
    """The probability that the test at `alpha` detects a true `drop`."""
    import numpy as np
    from scipy.stats import binom

    first, last = int(binom.ppf(1e-12, n, churn)), int(binom.isf(1e-12, n, churn))
    gained = np.arange(max(first, 0), last + 1)
    share = min(1.0, (churn + drop) / (1 - churn))  # of the questions that are not gained
    return float((binom.pmf(gained, n, churn) * binom.sf(_least_lost(gained, alpha) - 1, n - gained, share)).sum())


def _least_lost(gained: NDArray[np.int64], alpha: float) -> NDArray[np.int64]:
    """For each number of questions gained: the fewest losses that are significant."""
    from scipy.stats import binom, nbinom

    # The chance of at least so many losses among all that changed is that of so many before one more gain.
    lost: NDArray[np.int64] = nbinom.isf(alpha, gained + 1, 0.5).astype(int)
    for _ in range(2):  # the first with a chance below alpha, not at it
        lost += binom.sf(lost - 1, lost + gained, 0.5) >= alpha
    return lost


def _verdicts(report: EvalAnswers, filter: str, metric: str) -> dict[int, tuple[str, bool]]:
    """By question: the hash of its prompt, and whether the answer was right. lm-eval scores repeats as one."""
    if not is_binary(report, filter, metric):
        raise refuse("metric", metric, "is not 0 or 1 for every question; a paired test needs right or wrong")
    return {
        row["doc_id"]: (row["prompt_hash"], bool(row["scores"][filter][metric]))
        for row in report.questions
        if metric in row["scores"].get(filter, {})
    }
