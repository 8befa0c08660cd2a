"""`specbatch gate`: applies every rule of a policy to every point of a run and gives a verdict.

Besides the rules of the policy, a run fails if requests are unfinished, points failed or are missing (from the baseline
or from the plan of the sweep), or requested CUDA graphs were never replayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.evals.gate.equal import compare_answers
from specbatch.evals.gate.policy import Accuracy, Bound, Policy, load_policy
from specbatch.jobs.output_files import read_output
from specbatch.records.answers import EvalAnswers, load_answers
from specbatch.records.mcnemar import Changes, changes, detectable_drop, pick_score
from specbatch.records.metrics import METRICS, Metric
from specbatch.records.runs import Pairs, Replicates, load_run, match
from specbatch.records.verdicts import NOT_JUDGED, ONE_REPEAT, UNDECIDED, speedup_of

SCHEMA = 1


@dataclass(frozen=True)
class Check:
    """One rule at one point: the value found, what is allowed and the baseline's value, as text."""

    name: str
    point: str
    passed: bool
    found: str
    allowed: str
    baseline: str = "-"
    detail: str = ""


@dataclass(frozen=True)
class AccuracyTest:
    """The paired test of one point. detectable_drop: None if no drop can be detected with that power."""

    point: str
    filter: str
    metric: str
    questions: int
    before: float
    after: float
    lost: list[int]
    gained: list[int]
    p_value: float
    alpha: float
    power: float
    detectable_drop: float | None

    @property
    def text(self) -> str:
        """The result of the test, and the smallest drop that it can detect."""
        test = (
            f"{self.questions} questions, {len(self.lost)} lost and {len(self.gained)} gained "
            f"({self.before:.4f} -> {self.after:.4f}); exact McNemar test, one-sided: p = {self.p_value:.4f}, "
            f"alpha {self.alpha:g}."
        )
        if self.detectable_drop is None:
            return f"{test} With so few questions no drop can be detected with a power of {self.power:.0%}."
        return (
            f"{test} Smallest drop detected with a power of {self.power:.0%} if as many answers change by chance: "
            f"{100 * self.detectable_drop:.2f} points ({round(self.detectable_drop * self.questions)} questions)."
        )


@dataclass(frozen=True)
class GateResult:
    policy: Path
    run: Path
    baseline: Path | None
    checks: list[Check]
    tests: list[AccuracyTest] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        return not self.failed

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "policy": str(self.policy),
            "run": str(self.run),
            "baseline": None if self.baseline is None else str(self.baseline),
            "checks": [asdict(check) for check in self.checks],
            "accuracy": [asdict(test) for test in self.tests],
        }


def run_gate(policy_file: Path, run: Path, baseline: Path | None = None) -> GateResult:
    """Apply the rules to `run`, and to its difference from `baseline` if they need one.

    Refused: input that allows no verdict (an unreadable file, another model or workload, answers that are missing or
    simulated, times of another device).
    """
    policy = load_policy(policy_file)
    after = load_run("run", run, read_output)
    pairs: Pairs | None = None
    if policy.needs_baseline:
        if baseline is None:
            raise _needs_baseline(policy_file, policy)
        before = load_run("baseline", baseline, read_output)
        pairs = match(before, after)
        if pairs.only_after:
            places = "; ".join(map(str, pairs.only_after))
            raise refuse("baseline", str(baseline), f"lacks {places}; measure it there too")
        _refuse_other_device(policy, pairs)
    elif baseline is not None:
        raise refuse("baseline", str(baseline), "no rule of the policy compares with a baseline; leave it out")
    checks: list[Check] = []
    tests: list[AccuracyTest] = []
    points = after.points if pairs is None else {place: point for place, (_, point) in pairs.both.items()}
    for place, point in points.items():
        old = None if pairs is None else pairs.both[place][0]
        if point.failures:
            checks.append(Check("measured", str(place), False, "failed", "a number", detail=point.failures[0]))
            continue
        checks.append(_finished(str(place), point))
        checks += _graphs(str(place), point)
        if policy.answers is not None:
            assert old is not None  # the policy needs a baseline
            checks.append(_equal(str(place), point, old))
        if policy.accuracy is not None:
            found, test = _accuracy(policy.accuracy, str(place), point, old)
            checks += found
            tests += [test] if test else []
        for name, bound in policy.bounds.items():
            checks += _bounds(name, bound, str(place), point, old)
    checks += [
        Check("measured", str(place), False, f"{count} missing", "every repeat", detail="interrupted or failed")
        for place, count in after.missing.items()
    ]
    for place in [] if pairs is None else pairs.only_before:
        checks.append(Check("measured", str(place), False, "missing", "a number", "there"))
    return GateResult(policy_file, run, baseline, checks, tests)


def _needs_baseline(path: Path, policy: Policy) -> SpecbatchError:
    """The error for a policy that compares with a baseline, where none is given."""
    relative = [name for name, bound in policy.bounds.items() if bound.worsens_at_most is not None]
    rules = [f"worsens_at_most of {', '.join(relative)}"] if relative else []
    if policy.accuracy is not None and not policy.accuracy.may_fall:
        rules.insert(0, "may_fall = false in [accuracy], the default,")
    if policy.answers is not None:
        rules.insert(0, "equal in [answers]")
    verb, them = ("compare", "these rules") if len(rules) > 1 else ("compares", "the rule")
    works = f"name its run with --baseline, or leave {them} out"
    if policy.accuracy is not None and not policy.accuracy.may_fall:
        works += " (may_fall = true in [accuracy])"
    return refuse("policy", str(path), f"{' and '.join(rules)} {verb} with a baseline; {works}")


def _refuse_other_device(policy: Policy, pairs: Pairs) -> None:
    timed = [
        name for name, bound in policy.bounds.items() if bound.worsens_at_most is not None and METRICS[name].is_time
    ]
    for before, after in pairs.both.values():
        devices = [point.records[0].processor for point in (before, after)]
        if timed and devices[0] != devices[1]:
            works = (
                f"{timed[0]} compares on one device only; measure the baseline on {devices[1]}, or give at_least or "
            )
            raise refuse("baseline", devices[0], f"{works}at_most in place of worsens_at_most")


def _finished(point: str, found: Replicates) -> Check:
    """Every prompt has an answer."""
    done = sum(int(record.metrics.get("requests") or 0) for record in found.records)
    wanted = sum(max(_prompts(record.workload), len(record.requests)) for record in found.records) or done
    return Check("requests finished", point, done >= wanted, str(done), f"all {wanted}")


def _prompts(workload: dict[str, Any]) -> int:
    wanted = workload.get("prompts", 0)
    return wanted if isinstance(wanted, int) else 0


def _graphs(point: str, found: Replicates) -> Iterator[Check]:
    """Requested graphs are replayed, in every repeat."""
    for kind, mode in found.records[0].config["graphs"].items():
        if mode == "off":
            continue
        names = dict.fromkeys(name for record in found.records for name in record.graphs(kind)) or {kind: None}
        for name in names:
            replays = [record.graphs(kind).get(name, {"replays": 0})["replays"] for record in found.records]
            yield Check(f"{name.replace('_', ' ')} graphs replayed", point, min(replays) > 0, str(min(replays)), "> 0")


def _bounds(name: str, bound: Bound, point: str, after: Replicates, before: Replicates | None) -> Iterator[Check]:
    metric = METRICS[name]
    value, old = after.mean(name), None if before is None else before.mean(name)
    absolute = bound.at_least if metric.better == "higher" else bound.at_most
    base = "-" if before is None else _number(old)
    detail = after.resumed or "" if value is None else ""
    if absolute is not None:
        passed = _keeps(value, absolute, metric)
        yield Check(name, point, passed, _number(value), f"{_sign(metric)} {_number(absolute)}", base, detail)
    if bound.worsens_at_most is None:
        return
    title, found = f"{name} against the baseline", _number(value)
    if before is None or old is None:
        yield Check(title, point, False, found, f"the baseline lacks {name}", base, detail)
        return
    share = 1 - bound.worsens_at_most if metric.better == "higher" else 1 + bound.worsens_at_most
    allowed = f"{_sign(metric)} {_number(share * old)} ({bound.worsens_at_most:.1%} worse)"
    passed = _keeps(value, share * old, metric)
    speedup = speedup_of(metric, before, after)
    if speedup is not None and speedup.verdict != NOT_JUDGED:
        undecided = speedup.verdict_against(share, metric.better) == UNDECIDED
        passed = passed or undecided
        verdict = "" if speedup.verdict == ONE_REPEAT else f" of the baseline's, {speedup.verdict}"
        found += f" ({speedup.interval_text}{verdict}"
        found += f"; undecided about {share:g})" if undecided and share != 1 else ")"
    yield Check(title, point, passed, found, allowed, base, detail)


def _keeps(value: float | None, limit: float, metric: Metric) -> bool:
    """Whether a value is no worse than the limit."""
    if value is None:
        return False
    return (value > limit) == (metric.better == "higher") or math.isclose(value, limit, rel_tol=1e-9)


def _sign(metric: Metric) -> str:
    return ">=" if metric.better == "higher" else "<="


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"


def _accuracy(
    rules: Accuracy, point: str, after: Replicates, before: Replicates | None
) -> tuple[list[Check], AccuracyTest | None]:
    new = _answers("run", after)
    filter, metric = pick_score(new, rules.filter, rules.metric)
    (score,) = (score for score in new.overall if (score.filter, score.metric) == (filter, metric))
    if score.better == "lower":
        raise refuse("metric", metric, "lower is better; [accuracy] needs a metric for which higher is better")
    name = f"accuracy {filter} {metric}"
    checks = []
    if rules.at_least is not None:
        passed = score.value >= rules.at_least
        checks.append(Check(name, point, passed, f"{score.value:.4f}", f">= {rules.at_least:g}"))
    if score.unparsed is not None:
        passed = score.unparsed <= rules.unparsed_at_most
        allowed = f"<= {rules.unparsed_at_most:.2%}"
        checks.append(Check(f"unparsed {filter}", point, passed, f"{score.unparsed:.2%}", allowed))
    if rules.may_fall:
        return checks, None
    assert before is not None  # the policy needs a baseline
    test = _test(rules, point, filter, metric, changes(_answers("baseline", before), new, filter, metric))
    allowed = f"no fall shown (p >= {rules.alpha:g})"
    passed = test.p_value >= rules.alpha
    checks.append(
        Check(f"{name} has not fallen", point, passed, f"{test.after:.4f}", allowed, f"{test.before:.4f}", test.text)
    )
    if rules.detects is not None:
        drop = test.detectable_drop
        passed = drop is not None and drop <= rules.detects
        found = "none" if drop is None else f"{drop:.4f}"
        detail = "" if passed else "use more questions"
        checks.append(Check("smallest detectable drop", point, passed, found, f"<= {rules.detects:g}", detail=detail))
    return checks, test


def _equal(point: str, after: Replicates, before: Replicates) -> Check:
    """Every answer is the baseline's."""
    found = compare_answers(_answers("baseline", before), _answers("run", after))
    same = found.questions - len(found.differing)
    name, allowed = "answers equal the baseline's", f"all {found.questions}"
    return Check(name, point, not found.differing, str(same), allowed, detail=found.divergence)


def _answers(setting: str, point: Replicates) -> EvalAnswers:
    path, *others = point.paths
    if others:
        raise refuse(
            setting,
            str(path.parent),
            f"holds {1 + len(others)} runs, and the rules for answers apply to a single run; name one of them",
        )
    report = load_answers(setting, path)
    if report is None:
        raise refuse(setting, str(path), "holds no answers of specbatch eval, which rules for answers need")
    if report.record.simulated_accept_length is not None:
        raise refuse(setting, str(path), "its acceptance was simulated, so its answers are not the model's")
    return report


def _test(rules: Accuracy, point: str, filter: str, metric: str, found: Changes) -> AccuracyTest:
    if not found.n:
        raise SpecbatchError("there are no answers to compare")
    churn = found.changed / (2 * found.n)
    return AccuracyTest(
        point=point,
        filter=filter,
        metric=metric,
        questions=found.n,
        before=found.right_before / found.n,
        after=found.right_after / found.n,
        lost=list(found.lost),
        gained=list(found.gained),
        p_value=found.p_fallen(),
        alpha=rules.alpha,
        power=rules.power,
        detectable_drop=detectable_drop(found.n, churn, alpha=rules.alpha, power=rules.power),
    )
