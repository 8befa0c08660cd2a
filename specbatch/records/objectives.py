"""Service level objectives (SLOs): bounds of TTFT, TPOT and E2E latency, and the goodput under them.

Goodput is the number of requests per second that met every objective (Zhong et al., "DistServe", OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from specbatch.core.completion import INCOMPLETE
from specbatch.errors import refuse


@dataclass(frozen=True)
class Objectives:
    """The most seconds of each time of a request; None: no objective."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, setting: str, text: str) -> Self:
        """The objectives in a text such as "ttft=0.5,tpot=0.03". Raises SpecbatchError for another one."""
        known, found = [item.name for item in fields(cls)], dict[str, float]()
        for part in text.split(","):
            name, _, value = (side.strip() for side in part.partition("="))
            if name not in known or name in found:
                works = f"{name!r} is given twice" if name in found else f"use some of {', '.join(known)}"
                raise refuse(setting, text, f"{works}, each once with its seconds: ttft=0.5,tpot=0.03")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = math.nan
            if not 0 < found[name] < math.inf:
                raise refuse(setting, text, f"{name} takes seconds above 0, such as {name}=0.5")
        return cls(**found)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{name}={seconds:g}" for name, seconds in self._given().items())

    def as_dict(self) -> dict[str, float]:
        """Seconds by the name of the field in the row of a request."""
        return {f"{name}_s": seconds for name, seconds in self._given().items()}

    def metrics(self, requests: Iterable[Mapping[str, Any]], duration_s: float | None) -> dict[str, float | None]:
        """`goodput` and `slo_share` from the rows of all requests of a window of `duration_s` seconds."""
        met = [self._met_by(row) for row in requests]
        return {
            "goodput": sum(met) / duration_s if duration_s else None,
            "slo_share": sum(met) / len(met) if met else None,
        }

    def _given(self) -> dict[str, float]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: seconds for name, seconds in values.items() if seconds is not None}

    def _met_by(self, row: Mapping[str, Any]) -> bool:
        """Whether a request met every objective. A failed one did not, nor one whose time is unknown; an answer of one
        token has no TPOT and meets every objective of it."""
        if row["finish_reason"] in INCOMPLETE:
            return False
        times = {name: row[f"{name}_s"] for name in self._given()}
        if row["output_tokens"] <= 1:
            times.pop("tpot", None)
        return all(time is not None and time <= getattr(self, name) for name, time in times.items())


def objectives_text(slo: Mapping[str, float]) -> str:
    """The objectives of a record in words: "TTFT up to 0.5 s, TPOT up to 0.03 s"."""
    from specbatch.records.request_metrics import DISTRIBUTIONS  # with NumPy, which the help of `sweep` does not need

    names = {f"{name}_s": distribution.quantity for name, distribution in DISTRIBUTIONS.items()}
    return ", ".join(f"{names[name]} up to {seconds:g} s" for name, seconds in slo.items())
