"""Trees of DSpark drafts in whole engines over the toy model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from crossed import first_quick
from watched_blocks import check_trees

from specbatch import Speculation
from specbatch.drafters.dspark import DSparkTree


@pytest.mark.parametrize(("kind", "schedule"), first_quick(1, product(["rnn", "vanilla", "gated"], ["v2", "v1"])))
def test_trees_match_the_reference_after_accepted_paths(
    toy: Any, toy_engine: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, kind: str, schedule: str
) -> None:
    speculation = Speculation("dspark", schedule, draft=f"toy-block-{kind}")
    check_trees(toy, toy_engine, monkeypatch, DSparkTree, reference, speculation)
