"""Trees of Domino drafts in whole engines over the toy model."""

from __future__ import annotations

from typing import Any

import pytest
from crossed import slow_but
from watched_blocks import check_trees

from specbatch import Speculation
from specbatch.drafters.dspark import DSparkTree


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
def test_trees_match_the_reference_after_accepted_paths(
    toy: Any, toy_engine: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    speculation = Speculation("domino", schedule, draft="toy-block-gru")
    check_trees(toy, toy_engine, monkeypatch, DSparkTree, reference, speculation)
