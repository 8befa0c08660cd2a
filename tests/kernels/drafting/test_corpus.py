"""The corpus index drafts what a plain Python search through the last answers finds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.kernels.drafting import corpus
from specbatch.kernels.drafting.corpus import SEPARATOR, CorpusIndex, corpus_drafts_ref, corpus_insert_ref

Texts = list[tuple[list[int], int]]  # tokens, and how many of them are of the prompt


def table_of(texts: Texts) -> torch.Tensor:
    """What `corpus_insert` takes."""
    tokens = [token for text, _ in texts for token in (*text, SEPARATOR)]
    adds = [prompt <= place + 1 < len(text) for text, prompt in texts for place in range(len(text) + 1)]
    return torch.tensor([tokens, adds], dtype=torch.int32)


class Search:
    """The ring as a list, oldest token first, of which the last `size` are known."""

    def __init__(self, size: int, shortest: int) -> None:
        self.tokens: list[int] = []
        self.adds: list[bool] = []
        self.size, self.lengths = size, [shortest << level for level in (2, 1, 0)]

    def add(self, texts: Texts) -> None:
        tokens, adds = table_of(texts).tolist()
        self.tokens += tokens
        self.adds += map(bool, adds)

    def continuation(self, text: list[int], count: int) -> list[int]:
        oldest = max(0, len(self.tokens) - self.size)
        for length in self.lengths:
            for end in reversed(range(oldest + length - 1, len(self.tokens))):
                found = self.tokens[end - length + 1 : end + 1]
                if self.adds[end] and len(text) >= length and found == text[-length:]:
                    after = [*self.tokens[end + 1 : end + 1 + count], SEPARATOR]
                    if after[0] != SEPARATOR:
                        return after[: after.index(SEPARATOR)]
        return []


class Case(NamedTuple):
    size: int
    shortest: int
    rounds: list[Texts]
    texts: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Long texts with few different tokens, in rings that they fill several times, and suffixes of them."""
    shortest = draw(st.integers(1, 3))
    token = st.integers(0, draw(st.integers(1, 5)))
    size = draw(st.integers((shortest << 2) + 1, 90))
    text = st.lists(token, min_size=1, max_size=min(40, size - 1))
    texts = text.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1)))
    rounds, added = [], draw(st.lists(texts, min_size=1, max_size=12))
    while added:
        count = draw(st.integers(1, len(added)))
        while sum(len(tokens) + 1 for tokens, _ in added[:count]) > size:
            count -= 1
        rounds.append(added[:count])
        added = added[count:]
    known = [tokens for texts in rounds for tokens, _ in texts]
    asked = draw(st.lists(text | st.sampled_from(known), min_size=1, max_size=5))
    return Case(size, shortest, rounds, [tokens[: draw(st.integers(1, len(tokens)))] for tokens in asked])


@settings(deadline=None, derandomize=True, max_examples=150)
@given(case=cases(), count=st.integers(1, 6))
def test_drafts_are_those_of_a_plain_search(case: Case, count: int) -> None:
    index, search, written = CorpusIndex.empty(case.size, case.shortest, torch.device("cpu")), Search(*case[:2]), 0
    index = index._replace(newest=torch.full((3, 1 << 12), -1, dtype=torch.int32))  # so that no two hashes are equal
    for texts in case.rounds:
        corpus_insert_ref(index, table_of(texts), written % case.size)
        search.add(texts)
        written += sum(len(tokens) + 1 for tokens, _ in texts)
        drafts, drafted, found = ask(index, case.texts, count)
        for row, text in enumerate(case.texts):
            expected = search.continuation(text, count)
            assert found[row] == bool(expected)
            assert drafted[row] == (len(expected) or 77)
            padded = [*expected, *[text[-1]] * count][:count] if expected else [99] * count
            assert drafts[row].tolist() == padded


def ask(index: CorpusIndex, texts: list[list[int]], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts after texts in scattered rows; 99 and 77 stand for those of another drafter."""
    rows = torch.arange(len(texts)).flip(0) * 2 + 1
    tokens = torch.full((2 * len(texts) + 1, 50), 3)
    for row, text in zip(rows.tolist(), texts, strict=True):
        tokens[row, : len(text)] = torch.tensor(text)
    own = torch.full((len(texts), count), 99), torch.full((len(texts),), 77)
    return corpus_drafts_ref(index, tokens, rows, torch.tensor([len(text) - 1 for text in texts]), *own)


@pytest.mark.parametrize("table", [1, 2, 16])
def test_equal_hashes_cost_drafts_and_nothing_else(table: int) -> None:
    """With hardly any hashes all that is found is still a continuation."""
    generator = torch.Generator().manual_seed(table)
    index, text = CorpusIndex.empty(400, 2, torch.device("cpu")), torch.randint(0, 9, (300,), generator=generator)
    index = index._replace(newest=torch.full((3, table), -1, dtype=torch.int32))
    corpus_insert_ref(index, table_of([(text.tolist(), 0)]), 0)
    asked = [text[: end + 1].tolist()[-40:] for end in range(20, 290, 3)]
    drafts, drafted, found = ask(index, asked, 4)
    assert 0 < found.sum() < (len(asked) if table == 1 else 1 + len(asked))
    for row, suffix in enumerate(asked):
        places = [end for end in range(2, 300) if text[end - 2 : end].tolist() == suffix[-2:]]
        after = [text[end : end + 4].tolist()[: drafted[row]] for end in places]
        assert not found[row] or drafts[row].tolist()[: drafted[row]] in after


def test_no_draft_runs_over_the_end_of_an_answer() -> None:
    index = CorpusIndex.empty(64, 2, torch.device("cpu"))
    corpus_insert_ref(index, table_of([([1, 2, 3, 4], 0), ([3, 4, 5, 6, 7], 3)]), 0)
    drafts, drafted, found = ask(index, [[1, 2], [2, 3], [3, 4], [4, 5], [6, 7]], 4)
    assert drafts.tolist() == [[3, 4, 2, 2], [4, 3, 3, 3], [99] * 4, [6, 7, 5, 5], [99] * 4]
    assert drafted.tolist() == [2, 1, 77, 2, 77]  # 3, 4 ends an answer, and its other place is within a prompt
    assert found.tolist() == [1, 1, 0, 1, 0]


def test_memory_is_that_of_its_tables() -> None:
    for size in (1024, 1025, 5000):
        index = CorpusIndex.empty(size, 4, torch.device("cpu"))
        tables = (index.tokens, index.newest, index.earlier)
        assert CorpusIndex.bytes_of(size) == sum(table.numel() * table.element_size() for table in tables)
    assert index.lengths == (16, 8, 4)
    assert len(index.powers) == 16 == index.shortest << (corpus.LEVELS - 1)
