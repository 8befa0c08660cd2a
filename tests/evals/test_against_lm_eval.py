"""Prompts, answers and scores are those of lm-eval's own backend for transformers, or differ as the docs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="lm-eval's backend needs it: pip install accelerate")

from against_lm_eval.cases import ASPECTS, CASES, Case
from against_lm_eval.models import BUNDLED
from against_lm_eval.table import Bench

DOCS = Path(__file__).parents[2] / "docs"


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


def is_asked_alike(case: Case) -> bool:
    """Whether lm-eval's own arguments say all that the options of specbatch do, and the results are the same."""
    alike = "gen_kwargs" not in case.ours or "gen_kwargs" in case.theirs
    return alike and case.aspects == ASPECTS and not case.differs and case.model != BUNDLED


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if is_asked_alike(case)], ids=str)
def test_case_with_specbatch_as_a_model_of_lm_eval(case: Case, bench: Bench) -> None:
    assert bench.run_as_model(case) == {}


def test_page_of_cases_has_each_with_its_result() -> None:
    rows = [line.strip("|").split("|") for line in (DOCS / "lm-eval-cases.md").read_text().splitlines() if "|" in line]
    found = {(name.strip(), model.strip()): result.strip() for name, model, _, result in rows[2:]}
    assert [*found] == [(case.name, case.model) for case in CASES]
    for case in CASES:
        shown = f"different: {', '.join(case.differs)}. {case.why}" if case.differs else "same"
        assert found[case.name, case.model].startswith(shown), case


def test_differences_are_documented_with_the_option_that_reproduces_them() -> None:
    section = (DOCS / "evaluation.md").read_text().partition("## Compared with lm-eval")[2].partition("\n## ")[0]
    differing = [case for case in CASES if case.differs]
    assert len([line for line in section.splitlines() if line.startswith("| ")]) == len(differing) + 1  # the heading
    for case in differing:
        assert case.option.removeprefix("no ").removesuffix(" in ascending order") in section, case
