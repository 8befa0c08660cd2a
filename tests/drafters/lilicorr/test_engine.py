"""Trees of LiLiCorr drafts in whole engines over the toy model."""

from __future__ import annotations

from typing import Any

import pytest
from crossed import slow_but
from watched_blocks import check_trees

from specbatch import SpecbatchError, Speculation
from specbatch.drafters.lilicorr import LiLiCorrTree


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
@pytest.mark.slow
def test_trees_match_the_reference_after_accepted_paths(
    toy: Any, toy_engine: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    speculation = Speculation("lilicorr", schedule, draft="toy-block-lattice")
    check_trees(toy, toy_engine, monkeypatch, LiLiCorrTree, reference, speculation)


def test_a_node_has_no_more_children_than_candidates(toy_engine: Any) -> None:
    with pytest.raises(SpecbatchError, match=r"draft_topk=6: the draft chooses from 5 tokens .*; use at most 5"):
        toy_engine(speculation=Speculation("lilicorr", draft="toy-block-lattice", draft_steps=2, draft_topk=6))
