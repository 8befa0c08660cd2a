"""Pages of the documentation that are made from the registry of metrics and the dataclasses of records."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_record, metrics_of

from specbatch.sweeps.report.records_page import REQUEST, pages

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("path", "text"), [pytest.param(*item, id=item[0].name) for item in pages(DOCS)])
def test_pages_are_up_to_date(path: Path, text: str) -> None:
    """Made by `python -m specbatch.sweeps.report.records_page docs`."""
    assert path.read_text() == text


def test_every_field_of_a_request_is_described() -> None:
    assert make_record([metrics_of()]).requests[0].keys() <= REQUEST.keys()
