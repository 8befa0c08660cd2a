"""N-gram lookup matches a plain Python search."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ngram_search import continuations

from specbatch.kernels.drafting.ngram import lookup_ref, merge_into_tree


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int, list[int]]:
    token = st.integers(0, draw(st.integers(0, 4)))
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=24), min_size=1, max_size=4))
    shortest = draw(st.integers(1, 4))
    garbage = draw(st.lists(token | st.integers(-3, 50_000), max_size=6))
    return rows, draw(st.integers(shortest, 16)), shortest, draw(st.integers(1, 9)), garbage


@examples(100)
@given(case=cases(), texts=st.integers(1, 5))
def test_matches_plain_python_search(case: tuple[list[list[int]], int, int, int, list[int]], texts: int) -> None:
    rows, longest, shortest, count, garbage = case
    width = max(map(len, rows)) + len(garbage)  # the columns past a row's newest token hold `garbage`
    padded = torch.tensor([(row + (garbage or [0]) * width)[:width] for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    drafts, found = lookup_ref(padded, last, longest, shortest, count, texts)
    assert drafts.shape == (len(rows), texts, count)
    assert (drafts.dtype, found.dtype) == (torch.int64, torch.bool)
    for index, row in enumerate(rows):
        expected = continuations(row, longest, shortest, count)[:texts]
        assert found[index].tolist() == [place < len(expected) for place in range(texts)]
        assert drafts[index].tolist() == expected + [[row[-1]] * count] * (texts - len(expected))


@examples(50)
@given(data=st.data())
def test_tree_merges_common_prefixes(data: st.DataObject) -> None:
    """Every node is a distinct prefix of some text; the first ones in the order of the texts are kept."""
    kinds, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    text = st.lists(st.integers(0, 2), min_size=depth, max_size=depth)
    rows = data.draw(st.lists(st.lists(text, min_size=kinds, max_size=kinds), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, kinds)) for _ in rows]
    count = data.draw(st.integers(1, kinds * depth))
    found = torch.tensor([[place < number for place in range(kinds)] for number in counts])
    tokens, words, drafted = merge_into_tree(torch.tensor(rows), found, count)
    assert tokens.shape == (len(rows), count)
    for row, texts in enumerate(rows):
        wanted: list[tuple[int, ...]] = []
        for own in texts[: counts[row]]:
            wanted += [t for t in (tuple(own[: n + 1]) for n in range(depth)) if t not in wanted]
        assert int(drafted[row]) == min(len(wanted), count)
        for node in range(1, count + 1):
            seen = [at for at in range(64) if int(words[row, node]) >> at & 1]
            assert (seen[0], seen[-1]) == (0, node)
            if node <= int(drafted[row]):
                assert tuple(tokens[row, at - 1].item() for at in seen[1:]) == wanted[node - 1]


@pytest.mark.parametrize(
    ("row", "longest", "shortest", "expected"),
    [
        ([5, 1, 2, 7, 3, 2, 8, 1, 2], 4, 1, [7, 3, 2]),  # two tokens beat one that is nearer
        ([1, 2, 7, 1, 2, 8, 1, 2], 4, 1, [8, 1, 2]),  # the latest of ties
        ([1, 2, 7, 1, 2, 8, 1, 2], 4, 3, None),
        ([9, 1, 2, 7, 0, 1, 2, 8, 9, 1, 2], 2, 1, [8, 9, 1]),  # three would match, but the maximum length is two
        ([9, 1, 2, 7, 0, 1, 2, 8, 9, 1, 2], 3, 1, [7, 0, 1]),
        ([4, 4], 4, 1, [4, 4, 4]),
        ([4, 4], 4, 2, None),  # the suffix itself is no earlier occurrence
        ([4, 4, 4], 4, 2, [4, 4, 4]),
        ([1, 2, 1, 2], 2, 2, [1, 2, 1]),  # period 2, read on past the newest token
        ([3, 1, 2, 3], 1, 1, [1, 2, 3]),
        ([3], 4, 1, None),
        ([1, 2, 3], 4, 1, None),
    ],
)
def test_longest_then_latest_match_wins(
    row: list[int], longest: int, shortest: int, expected: list[int] | None
) -> None:
    assert next(iter(continuations(row, longest, shortest, 3)), None) == expected
    drafts, found = lookup_ref(torch.tensor([row]), torch.tensor([len(row) - 1]), longest, shortest, 3)
    assert found.tolist() == [[expected is not None]]
    assert drafts.tolist() == [[expected or [row[-1]] * 3]]
