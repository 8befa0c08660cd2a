"""Rules of `[accuracy]`: the score itself, and whether it has fallen (McNemar's exact test)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbatch.errors import SpecbatchError, refuse
from specbatch.evals.gate.checks import Check, Level, PendingCheck
from specbatch.evals.gate.policy import Accuracy
from specbatch.records.answers import EvalAnswers
from specbatch.records.mcnemar import Changes, changes, detectable_drop, pick_score, questions_for


@dataclass(frozen=True)
class AccuracyTest:
    """The paired test of one point.

    adjusted_p_value  for the `tests` of the gate (Holm)
    detectable_drop   whatever the other tests find; None if no drop can be detected with that power
    """

    point: str
    filter: str
    metric: str
    questions: int
    before: float
    after: float
    lost: list[int]
    gained: list[int]
    p_value: float
    adjusted_p_value: float
    tests: int
    alpha: float
    power: float
    detectable_drop: float | None

    @property
    def text(self) -> str:
        """The result of the test, and the smallest drop that it can detect."""
        several = f", {self.adjusted_p_value:.4f} for {self.tests} tests (Holm)" if self.tests > 1 else ""
        test = (
            f"{self.questions} questions, {len(self.lost)} lost and {len(self.gained)} gained "
            f"({self.before:.4f} -> {self.after:.4f}); exact McNemar test, one-sided: p = {self.p_value:.4f}{several}, "
            f"alpha {self.alpha:g}."
        )
        if self.detectable_drop is None:
            return f"{test} With so few questions no drop can be detected with a power of {self.power:.0%}."
        return (
            f"{test} Smallest drop detected with a power of {self.power:.0%} if as many answers change by chance: "
            f"{100 * self.detectable_drop:.2f} points ({round(self.detectable_drop * self.questions)} questions)."
        )


def accuracy(
    rules: Accuracy, point: str, new: EvalAnswers, old: EvalAnswers | None, tests: list[AccuracyTest]
) -> Iterator[Check | PendingCheck]:
    """The checks of one point. tests: where its test is added as soon as it is judged."""
    filter, metric = pick_score(new, rules.filter, rules.metric)
    (score,) = (score for score in new.overall if (score.filter, score.metric) == (filter, metric))
    if score.better == "lower":
        raise refuse("metric", metric, "lower is better; [accuracy] needs a metric for which higher is better")
    name = f"accuracy {filter} {metric}"
    if rules.at_least is not None:
        passed = score.value >= rules.at_least
        yield Check(name, point, passed, f"{score.value:.4f}", f">= {rules.at_least:g}")
    if new.record.other_engine and "unparsed_at_most" in rules.model_fields_set:
        works = "lm-eval's files have no share of unparsed answers; leave it out"
        raise refuse("unparsed_at_most", rules.unparsed_at_most, works)
    if score.unparsed is not None:
        passed = score.unparsed <= rules.unparsed_at_most
        allowed = f"<= {rules.unparsed_at_most:.2%}"
        yield Check(f"unparsed {filter}", point, passed, f"{score.unparsed:.2%}", allowed)
    if rules.may_fall:
        return
    assert old is not None  # the policy needs a baseline
    found = changes(old, new, filter, metric)
    if not found.n:
        raise SpecbatchError("there are no answers to compare")

    def judge(level: Level) -> Iterator[Check]:
        test = _test(rules, point, (filter, metric), found, level)
        tests.append(test)
        allowed = f"no fall shown (p >= {level.alpha:g})"
        title, values = f"{name} has not fallen", (f"{test.after:.4f}", allowed, f"{test.before:.4f}")
        yield Check(title, point, not level.rejects, *values, test.text)
        if rules.detects is not None:
            yield _detects(test, rules.detects, found, level)

    yield PendingCheck(found.p_fallen(), judge)


def _detects(test: AccuracyTest, wanted: float, found: Changes, level: Level) -> Check:
    """Whether a drop as small as `wanted` could have been seen."""
    drop, detail = test.detectable_drop, ""
    passed = drop is not None and drop <= wanted
    if not passed:
        needed = questions_for(wanted, _churn(found), alpha=level.of_one, power=test.power)
        many = "no number of questions" if needed is None else f"about {needed:,} questions"
        detail = f"{many} would detect a drop of {wanted:g} if the same share of answers changes by chance"
    shown = "none" if drop is None else f"{drop:.4f}"
    return Check("smallest detectable drop", test.point, passed, shown, f"<= {wanted:g}", detail=detail)


def _churn(found: Changes) -> float:
    """The share of questions that are gained by chance, and the same share lost."""
    return found.changed / (2 * found.n)


def _test(rules: Accuracy, point: str, score: tuple[str, str], found: Changes, level: Level) -> AccuracyTest:
    return AccuracyTest(
        point,
        *score,
        questions=found.n,
        before=found.right_before / found.n,
        after=found.right_after / found.n,
        lost=list(found.lost),
        gained=list(found.gained),
        p_value=found.p_fallen(),
        adjusted_p_value=level.adjusted,
        tests=level.tests,
        alpha=level.alpha,
        power=rules.power,
        detectable_drop=detectable_drop(found.n, _churn(found), alpha=level.of_one, power=rules.power),
    )
