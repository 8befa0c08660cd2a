"""The policy of a release gate: a TOML file of rules.

    alpha = 0.05                    # of all tests of the gate together

    [accuracy]                      # answers of `specbatch eval`
    filter = "flexible-extract"     # and metric: needed where the task has several
    at_least = 0.60                 # accuracy itself
    may_fall = false                # no fall against --baseline (exact McNemar test at alpha, one-sided)
    power = 0.8
    detects = 0.03                  # the test must be able to find a drop as small as this
    unparsed_at_most = 0.0          # share of answers in which the filter found nothing

    [answers]
    equal = true                    # every answer is the baseline's, token for token

    [bounds]                        # numbers of a record, in its units (seconds, tokens per second)
    accept_length = { at_least = 2.0, worsens_at_most = 0.02 }
    p99_ttft_s = { at_most = 0.5, worsens_at_most = 0.10 }
    output_throughput = { worsens_at_most = 0.05 }

worsens_at_most is a share of the baseline's number, in the direction that is worse for the metric
(`specbatch.records.metrics`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specbatch.config.field_errors import did_you_mean, first_problem
from specbatch.errors import refuse
from specbatch.files.text_files import read_toml
from specbatch.records.metrics import METRICS

ALPHA = 0.05  # of a policy that gives none
BOUNDED = [key for key, metric in METRICS.items() if metric.better is not None]
_Share = Annotated[float, Field(ge=0, le=1)]
_Probability = Annotated[float, Field(gt=0, lt=1)]


class _Rules(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Accuracy(_Rules):
    """Rules for answers. `may_fall = false` compares with a baseline."""

    filter: str | None = None
    metric: str | None = None
    at_least: _Share | None = None
    may_fall: bool = False
    alpha: _Probability | None = None
    power: _Probability = 0.8
    detects: Annotated[float, Field(gt=0, le=1)] | None = None
    unparsed_at_most: _Share = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Accuracy:
        if self.may_fall and self.model_fields_set & {"alpha", "power", "detects"}:
            works = "; alpha of [bounds] goes above the tables" if self.alpha is not None else ""
            raise ValueError(f"alpha, power and detects configure the test, which may_fall = true skips{works}")
        return self


class Answers(_Rules):
    """Rules for answers as they are, whatever their scores."""

    equal: bool

    @model_validator(mode="after")
    def _asks_something(self) -> Answers:
        if not self.equal:
            raise ValueError("equal = false asks nothing; leave the table out")
        return self


class Bound(_Rules):
    """Limits of one metric; at least one is required."""

    at_least: float | None = None
    at_most: float | None = None
    worsens_at_most: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Bound:
        if not self.model_fields_set:
            raise ValueError("has no limit; give at_least or at_most, worsens_at_most, or both")
        return self


class Policy(_Rules):
    """Rules, and the significance level of all their tests together, which `[accuracy]` may have instead."""

    alpha: _Probability | None = None
    accuracy: Accuracy | None = None
    answers: Answers | None = None
    bounds: dict[str, Bound] = Field(default_factory=dict)

    @field_validator("bounds")
    @classmethod
    def _known(cls, bounds: dict[str, Bound]) -> dict[str, Bound]:
        for name, bound in bounds.items():
            if name not in BOUNDED:
                raise ValueError(f"no such metric: {name}; {did_you_mean(name, BOUNDED)}")
            higher = METRICS[name].better == "higher"
            if higher and (bound.worsens_at_most or 0) >= 1:
                works = "use a share below 1, such as 0.05 for 5%"
                raise ValueError(f"{name}: worsens_at_most={bound.worsens_at_most:g} allows any value; {works}")
            if (bound.at_most if higher else bound.at_least) is not None:
                wrong, right = ("at_most", "at_least") if higher else ("at_least", "at_most")
                raise ValueError(f"{name}: {METRICS[name].better} is better; use {right} instead of {wrong}")
        return bounds

    @model_validator(mode="after")
    def _says_something(self) -> Policy:
        if self.accuracy is None and self.answers is None and not self.bounds:
            raise ValueError("has no rule; write a table [accuracy], [answers] or [bounds]")
        if self.alpha is None:
            return self
        if self.accuracy is not None and self.accuracy.alpha is not None:
            raise ValueError("alpha is given twice, also in [accuracy]; remove one")
        if not self.tests_accuracy and not self._relative:
            raise ValueError("alpha has no effect: no rule is a test; leave it out")
        return self

    @property
    def significance(self) -> float:
        """The significance level of all tests of the gate together."""
        given = (self.alpha, None if self.accuracy is None else self.accuracy.alpha)
        return next((value for value in given if value is not None), ALPHA)

    @property
    def tests_accuracy(self) -> bool:
        return self.accuracy is not None and not self.accuracy.may_fall

    @property
    def _relative(self) -> bool:
        return any(bound.worsens_at_most is not None for bound in self.bounds.values())

    @property
    def compares_answers(self) -> bool:
        return self.answers is not None or self.tests_accuracy

    @property
    def needs_baseline(self) -> bool:
        return self.compares_answers or self._relative


_TABLES: dict[str, type[_Rules]] = {"accuracy": Accuracy, "answers": Answers, "bounds": Bound}


def load_policy(path: Path) -> Policy:
    """Read the rules. Refused in one line: a missing file, invalid TOML, an unknown rule."""
    try:
        return Policy.model_validate(read_toml("policy", path, "name a TOML file of rules"))
    except ValidationError as error:
        problem = first_problem(error, names=_known_names)
        raise refuse("policy", str(path), problem) from error


def _known_names(place: Sequence[int | str]) -> Iterable[str]:
    """The names that there are where a name is unknown."""
    return (Policy if len(place) == 1 else _TABLES[str(place[0])]).model_fields
