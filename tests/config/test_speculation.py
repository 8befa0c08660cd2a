"""Settings of speculation: defaults, shapes of drafts and their text."""

from __future__ import annotations

import re

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from specbatch.config.draft_shape import counts_root, shape_of
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError


def test_baseline_drafts_nothing() -> None:
    assert Speculation().num_drafts == 0
    assert Speculation(draft_tokens=9).num_drafts == 0
    assert Speculation("ngram").num_drafts == 4
    assert Speculation("standalone", draft="self:skip=1", draft_tokens=7).num_drafts == 7


@pytest.mark.parametrize(
    ("algorithm", "given", "expected"),
    [
        ("ngram", {}, (4, 1, 4)),
        ("standalone", {}, (3, 1, 3)),
        ("ngram", {"draft_tokens": 3, "draft_steps": 3}, (3, 1, 3)),
        ("ngram", {"draft_tokens": 3}, (3, 1, 3)),
        ("standalone", {"draft_steps": 6}, (6, 1, 6)),
        ("standalone", {"draft_topk": 1}, (3, 1, 3)),
        ("standalone", {"draft_topk": 3}, (3, 3, 7)),
        ("standalone", {"draft_topk": 3, "draft_steps": 5}, (5, 3, 7)),
        ("standalone", {"draft_topk": 3, "draft_tokens": 2}, (2, 3, 2)),
        ("standalone", {"draft_topk": 2, "draft_steps": 1}, (1, 2, 2)),
        ("standalone", {"draft_topk": 2, "draft_steps": 9}, (9, 2, 9)),
        ("standalone", {"draft_topk": 10, "draft_steps": 7, "draft_tokens": 59}, (7, 10, 59)),
        ("ngram", {"draft_topk": 3, "draft_steps": 2}, (2, 3, 6)),
        ("ngram", {"draft_topk": 12, "draft_steps": 16, "draft_tokens": 63}, (16, 12, 63)),
    ],
)
def test_missing_settings_of_a_draft_shape_are_derived(
    algorithm: str, given: dict[str, int], expected: tuple[int, int, int]
) -> None:
    speculation = Speculation(algorithm, draft="self:skip=1" if algorithm == "standalone" else None, **given)  # type: ignore[arg-type]
    assert speculation.shape == expected
    assert speculation.num_drafts == expected[2]
    assert shape_of(algorithm, *expected) == expected


@examples(20)
@given(
    algorithm=st.sampled_from(["ngram", "standalone"]),
    given=st.tuples(*[st.none() | st.integers(1, 11) | st.sampled_from([31, 63])] * 3),
)
def test_shape_is_accepted_or_the_nearest_is_named(algorithm: str, given: tuple[int | None, ...]) -> None:
    try:
        shape = shape_of(algorithm, *given)
    except SpecbatchError as error:
        named = tuple(int(number) for number in re.findall(r"draft_\w+=(\d+)", str(error).rpartition("; use ")[2]))
        assert shape_of(algorithm, *named) == named
        return
    asked = (*given[:2], given[0]) if counts_root(*given) else given
    assert all(value in (None, found) for value, found in zip(asked, shape, strict=True))
    assert shape.steps <= shape.tokens <= 63
    assert shape.topk > 1 or shape.steps == shape.tokens
    assert algorithm == "ngram" or shape.draft_slots <= 64


def test_a_chain_may_be_written_as_in_sglang() -> None:
    """Its number of tokens counts the root."""
    assert Speculation("ngram", draft_steps=3, draft_topk=1, draft_tokens=4).shape == (3, 1, 3)
    assert counts_root(3, 1, 4)
    assert not counts_root(3, 2, 4)
    assert not counts_root(None, None, 4)


def test_text_of_a_tree() -> None:
    assert "7 drafted as a tree (5 steps, top 3)" in str(Speculation("ngram", draft_steps=5, draft_topk=3))
    assert "tree" not in str(Speculation("ngram"))


def test_limits_are_accepted() -> None:
    Speculation("ngram", draft_tokens=63, ngram_min=16, ngram_max=16)
    Speculation("ngram", draft_tokens=1, ngram_min=1, ngram_max=1)
