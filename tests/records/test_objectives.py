"""Latency objectives: what meets them, and the goodput of the requests that do."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.records.objectives import Objectives, objectives_text

BOTH = Objectives.parse("slo", "ttft=0.5, tpot=0.03")


def row(ttft: float | None = 0.5, tpot: float | None = 0.03, tokens: int = 9, reason: str = "length") -> dict[str, Any]:
    return {"finish_reason": reason, "ttft_s": ttft, "tpot_s": tpot, "e2e_s": 1.0, "output_tokens": tokens}


@pytest.mark.parametrize(
    ("one", "is_met"),
    [
        (row(), True),
        (row(ttft=0.6), False),
        (row(tpot=0.031), False),
        (row(reason="error"), False),
        (row(reason="abort"), False),
        (row(tpot=None, tokens=1), True),
        (row(tpot=None), False),  # not measured
        (row(ttft=None, tpot=None, tokens=0), False),
    ],
)
def test_request_meets_every_objective_or_not(one: dict[str, Any], is_met: bool) -> None:
    assert BOTH.metrics([one], 4.0) == {"goodput": is_met / 4.0, "slo_share": float(is_met)}


def test_goodput_counts_the_requests_that_met_the_objectives() -> None:
    rows = [row(), row(ttft=9.0), row(reason="error"), row()]
    assert BOTH.metrics(rows, 4.0) == {"goodput": 0.5, "slo_share": 0.5}
    assert BOTH.metrics([], 0.0) == {"goodput": None, "slo_share": None}
    assert Objectives(e2e=0.9).metrics(rows, 4.0)["slo_share"] == 0.0


def test_texts() -> None:
    assert str(BOTH) == "ttft=0.5,tpot=0.03"
    assert BOTH.as_dict() == {"ttft_s": 0.5, "tpot_s": 0.03}
    assert (
        objectives_text({"e2e_s": 2.0, **BOTH.as_dict()})
        == "E2E latency up to 2 s, TTFT up to 0.5 s, TPOT up to 0.03 s"
    )


@pytest.mark.parametrize(
    ("text", "works"),
    [
        ("", "use some of ttft, tpot, e2e, each once with its seconds: ttft=0.5,tpot=0.03"),
        ("itl=1", "use some of ttft, tpot, e2e"),
        ("ttft=1,ttft=2", "'ttft' is given twice"),
        ("ttft=0.5,", "use some of ttft"),
        *(
            (f"ttft={value}", "ttft takes seconds above 0, such as ttft=0.5")
            for value in ("", "0", "-1", "nan", "inf", "x")
        ),
    ],
)
def test_other_texts_are_refused(text: str, works: str) -> None:
    with pytest.raises(SpecbatchError) as refused:
        Objectives.parse("slo", text)
    assert str(refused.value).startswith(f"slo={text!r}: ")
    assert works in str(refused.value)
