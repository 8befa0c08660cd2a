"""Prompts, answers and scores are those of lm-eval's own backend for transformers, or differ as the docs say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="lm-eval's backend needs it: pip install accelerate")

from against_lm_eval.cases import CASES, Case
from against_lm_eval.table import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = Bench(tmp_path_factory.mktemp("against_lm_eval"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case.quick else pytest.mark.slow) for case in CASES]
)
def test_case(case: Case, bench: Bench) -> None:
    found = bench.run(case)
    assert found.compared
    assert found.different.keys() == set(case.differs), found.different
