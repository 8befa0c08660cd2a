"""`specbatch gate`: applies every rule of a policy to every point of a run and gives a verdict.

Besides the rules of the policy, a run fails if requests are unfinished, points failed or are missing (from the baseline
or from the plan of the sweep), or requested CUDA graphs were never replayed. The tests of all points and metrics
together have the significance level of the policy (Holm).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.evals.gate.accuracy import AccuracyTest, accuracy
from specbatch.evals.gate.bounds import bounds
from specbatch.evals.gate.checks import Check, PendingCheck, judged
from specbatch.evals.gate.equal import compare_answers
from specbatch.evals.gate.policy import Policy, load_policy
from specbatch.jobs.output_files import read_output
from specbatch.records.answers import EvalAnswers
from specbatch.records.archive import unpacked
from specbatch.records.intervals import counts_alike
from specbatch.records.metrics import METRICS
from specbatch.records.runs import Pairs, Replicates, answers_of, load_run, match

SCHEMA = 1


@dataclass(frozen=True)
class GateResult:
    policy: Path
    run: Path
    baseline: Path | None
    checks: list[Check]
    tests: list[AccuracyTest] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def undecided(self) -> list[Check]:
        """Checks on which the runs are too few or too noisy for a verdict."""
        return [check for check in self.checks if check.passed is None]

    @property
    def passed(self) -> bool:
        return not self.failed and not self.undecided

    @property
    def exit_status(self) -> int:
        """0: passed; 1: a check failed; 2: none failed, and some are undecided."""
        return 1 if self.failed else 2 if self.undecided else 0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "undecided": len(self.undecided),
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
    mixed = False
    if policy.needs_baseline:
        if baseline is None:
            raise _needs_baseline(policy_file, policy)
        before = load_run("baseline", baseline, read_output)
        pairs = match(before, after)
        # A folder of another engine may hold more tasks than the evaluation that it is compared with.
        mixed = (before.other_engine is None) != (after.other_engine is None)
        if pairs.only_after and not (mixed and after.other_engine):
            places = "; ".join(map(str, pairs.only_after))
            raise refuse("baseline", str(baseline), f"lacks {places}; measure it there too")
        _refuse_other_device(policy, pairs)
        _refuse_other_drafts(policy, pairs)
    elif baseline is not None:
        raise refuse("baseline", str(baseline), "no rule of the policy compares with a baseline; leave it out")
    found: list[Check | PendingCheck] = []
    tests: list[AccuracyTest] = []
    points = after.points if pairs is None else {place: point for place, (_, point) in pairs.both.items()}
    with ExitStack() as stack:
        new, old = (
            None if path is None else _Side(setting, path, stack.enter_context(unpacked(setting, path)))
            for setting, path in (("run", run), ("baseline", baseline))
        )
        assert new is not None
        for place, point in points.items():
            base = None if pairs is None or old is None else (old, pairs.both[place][0])
            found += _of_point(policy, str(place), (new, point), base, tests)
    found += [
        Check("measured", str(place), False, f"{count} missing", "every repeat", detail="interrupted or failed")
        for place, count in after.missing.items()
    ]
    for place in [] if pairs is None or (mixed and not after.other_engine) else pairs.only_before:
        found.append(Check("measured", str(place), False, "missing", "a number", "there"))
    return GateResult(policy_file, run, baseline, judged(found, policy.significance), tests)


@dataclass(frozen=True)
class _Side:
    """The run, or its baseline. setting: what the user calls it; files: where its files are, of an archive unpacked."""

    setting: str
    run: Path
    files: Path

    def answers(self, point: Replicates) -> EvalAnswers:
        path, *others = point.paths
        if others:
            works = f"holds {1 + len(others)} runs, and the rules for answers apply to a single run; name one of them"
            raise refuse(self.setting, str(path.parent), works)
        report = answers_of(self.setting, self.run, point, self.files)
        if report is None:
            raise refuse(self.setting, str(path), "holds no answers of specbatch eval, which rules for answers need")
        if report.record.simulated_accept_length is not None:
            raise refuse(self.setting, str(path), "its acceptance was simulated, so its answers are not the model's")
        return report


def _of_point(
    policy: Policy,
    place: str,
    run: tuple[_Side, Replicates],
    baseline: tuple[_Side, Replicates] | None,
    tests: list[AccuracyTest],
) -> Iterator[Check | PendingCheck]:
    """All checks of one point. tests: see `accuracy`."""
    new, point = run
    if point.failures:
        yield Check("measured", place, False, "failed", "a number", detail=point.failures[0])
        return
    yield _finished(place, point)
    yield from _graphs(place, point)
    if policy.answers is not None or policy.accuracy is not None:
        answers = new.answers(point)
        old = baseline[0].answers(baseline[1]) if policy.compares_answers and baseline is not None else None
        if policy.answers is not None:
            assert old is not None  # the policy needs a baseline
            yield _equal(place, answers, old)
        if policy.accuracy is not None:
            yield from accuracy(policy.accuracy, place, answers, old, tests)
    for name, bound in policy.bounds.items():
        yield from bounds(name, bound, place, point, None if baseline is None else baseline[1])


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


def _refuse_other_drafts(policy: Policy, pairs: Pairs) -> None:
    for name, bound in policy.bounds.items():
        for before, after in pairs.both.values():
            records = before.records[0], after.records[0]
            if bound.worsens_at_most is not None and not counts_alike(METRICS[name], *records):
                works = "the drafts of run and baseline differ, so its denominators do, too; use accept_length"
                raise refuse("policy", f"worsens_at_most of {name}", works)


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


def _equal(point: str, new: EvalAnswers, old: EvalAnswers) -> Check:
    """Every answer is the baseline's."""
    found = compare_answers(old, new)
    same = found.questions - len(found.differing)
    name, allowed = "answers equal the baseline's", f"all {found.questions}"
    return Check(name, point, not found.differing, str(same), allowed, detail=found.divergence)
