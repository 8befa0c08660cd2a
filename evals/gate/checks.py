"""What a gate finds: checks, and those that depend on chance, which are judged together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specbatch.records.estimates import holm


@dataclass(frozen=True)
class Check:
    """One rule at one point: the value found, what is allowed and the baseline's value, as text.

    passed: None where the runs do not decide it
    """

    name: str
    point: str
    passed: bool | None
    found: str
    allowed: str
    baseline: str = "-"
    detail: str = ""

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "**FAILED**", None: "**undecided**"}[self.passed]


@dataclass(frozen=True)
class Level:
    """What all tests of a gate together allow one of them.

    alpha     the significance level of the gate
    tests     how many it has
    adjusted  the p value of this one, adjusted for the others (Holm)
    """

    alpha: float
    tests: int
    adjusted: float

    @property
    def rejects(self) -> bool:
        return self.adjusted < self.alpha

    @property
    def of_one(self) -> float:
        """A level at which one test rejects whatever the others find."""
        return self.alpha / self.tests


@dataclass(frozen=True)
class PendingCheck:
    """Checks that depend on the p value of a test, and through it on those of all other tests."""

    p_value: float
    judge: Callable[[Level], Iterable[Check]]


def judged(found: list[Check | PendingCheck], alpha: float) -> list[Check]:
    """All checks, in order. If nothing changed, at most the share `alpha` of gates has a test that rejects."""
    tests = [item for item in found if isinstance(item, PendingCheck)]
    adjusted = iter(holm([test.p_value for test in tests]))
    checks: list[Check] = []
    for item in found:
        checks += item.judge(Level(alpha, len(tests), next(adjusted))) if isinstance(item, PendingCheck) else [item]
    return checks
