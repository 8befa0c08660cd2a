"""The corpus index drafts what a plain Python search through the last answers finds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from specbatch.kernels.drafting import corpus
from specbatch.kernels.drafting.corpus import (
    SEPARATOR,
    CorpusIndex,
    corpus_drafts_ref,
    corpus_extend_ref,
    corpus_insert_ref,
)

Texts = list[tuple[list[int], int]]  # tokens, and how many of them are of the prompt


def table_of(texts: Texts) -> torch.Tensor:
    """What `corpus_insert` takes."""
    tokens = [token for text, _ in texts for token in (*text, SEPARATOR)]
    adds = [prompt <= place + 1 < len(text) for text, prompt in texts for place in range(len(text) + 1)]
    return torch.tensor([tokens, adds], dtype=torch.int32)


class Search:
    """Answers one after the other."""

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self.adds: list[bool] = []
        self.lengths = [shortest << level for level in (2, 1, 0)]

    def add(self, texts: Texts) -> None:
        tokens, adds = table_of(texts).tolist()
        self.tokens += tokens
        self.adds += map(bool, adds)

    def continuation(self, text: list[int], count: int) -> list[int]:
        for length in self.lengths:
            for end in reversed(range(length - 1, len(self.tokens))):
                found = self.tokens[end - length + 1 : end + 1]
                if self.adds[end] and len(text) >= length and found == text[-length:]:
                    after = [*self.tokens[end + 1 : end + 1 + count], SEPARATOR]
                    return after[: after.index(SEPARATOR)]
        return []


class Case(NamedTuple):
    size: int
    shortest: int
    rounds: list[Texts]
    texts: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Long texts with few different tokens, in rings that they fill, some of them several times, and suffixes."""
    shortest = draw(st.integers(1, 3))
    token = st.integers(0, draw(st.integers(1, 5)))
    size = draw(st.sampled_from([(shortest << 2) + 1, 40, 90, 400]))
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


def empty(size: int, shortest: int, running: torch.Tensor | None = None, table: int = 1 << 12) -> CorpusIndex:
    """An index with so large a table that no two hashes are equal."""
    index = CorpusIndex.empty(size, shortest, torch.zeros(1, 1) if running is None else running)
    return index._replace(newest=torch.full((3, table), -1, dtype=torch.int32))


@examples(60)
@given(case=cases(), count=st.integers(1, 6))
def test_drafts_are_those_of_a_plain_search(case: Case, count: int) -> None:
    index, search, written = empty(case.size, case.shortest), Search(case.shortest), 0
    for texts in case.rounds:
        corpus_insert_ref(index, table_of(texts), written % case.size)
        search.add(texts)
        written += sum(len(tokens) + 1 for tokens, _ in texts)
        result = ask(index, case.texts, count)
        sound(result, case.texts, [search.tokens[-case.size :]], case.shortest)
        if written <= case.size:  # then places that were overwritten may cut chains, or lead to the end of a prompt
            check(result, case.texts, [search.continuation(text, count) for text in case.texts])


Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ask(index: CorpusIndex, texts: list[list[int]], count: int) -> Drafts:
    """Drafts after texts in scattered rows; 99 and 77 stand for those of another drafter."""
    rows = torch.arange(len(texts)).flip(0) * 2 + 1
    tokens, known = torch.full((2 * len(texts) + 1, 50), 3), torch.zeros(2 * len(texts) + 1, dtype=torch.int64)
    for row, text in zip(rows.tolist(), texts, strict=True):
        tokens[row, : len(text)] = torch.tensor(text)
        known[row] = len(text) - 1
    own = torch.full((len(texts), count), 99), torch.full((len(texts),), 77)
    return corpus_drafts_ref(index, tokens, known, rows, *own)


def check(result: Drafts, texts: list[list[int]], expected: list[list[int]]) -> None:
    drafts, drafted, found = result
    count = drafts.shape[1]
    assert found.tolist() == [bool(after) for after in expected]
    assert drafted.tolist() == [len(after) or 77 for after in expected]
    padded = [[*after, *text[-1:] * count][:count] for text, after in zip(texts, expected, strict=True)]
    assert drafts.tolist() == [text if after else [99] * count for text, after in zip(padded, expected, strict=True)]


@examples(30)
@given(data=st.data())
def test_running_requests_draft_from_each_other(data: st.DataObject) -> None:
    """Rows that grow by some tokens at a time. Where rows are used again, chains of places may be cut."""
    reuse = data.draw(st.booleans())
    shortest, width, count = data.draw(st.integers(1, 2)), 50, data.draw(st.integers(1, 4))
    token = st.integers(0, data.draw(st.integers(1, 4)))
    tokens, known = torch.zeros(4, width, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    index, texts, added = empty(20, shortest, tokens), dict[int, list[int]](), list[tuple[int, int]]()
    for _ in range(data.draw(st.integers(1, 8))):
        for row in (1, 2, 3):
            if row not in texts or (reuse and data.draw(st.booleans())):
                texts[row] = data.draw(st.lists(token, min_size=2, max_size=8))
        rows = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, unique=True))
        starts = [len(texts[row]) - 1 for row in rows]
        accepted = [data.draw(st.integers(0, count - 1)) for _ in rows]
        for row, right in zip(rows, accepted, strict=True):
            texts[row] = [*texts[row], *data.draw(st.lists(token, min_size=right + 1, max_size=right + 1))]
        for row, text in texts.items():
            tokens[row, : len(text)] = torch.tensor(text)
            known[row] = len(text) - 1
        padded = torch.tensor([0, *rows, 0])
        corpus_extend_ref(index, tokens, padded, torch.tensor([1, *starts, 1]), torch.tensor([0, *accepted, 0]), count)
        for row, start, right in zip(rows, starts, accepted, strict=True):
            added += [(row, start - 1 + n) for n in range(right + 1)]
        own = torch.full((len(rows), count), 99), torch.full((len(rows),), 77)
        result = corpus_drafts_ref(index, tokens, known, torch.tensor(rows), *own)
        asked = [texts[row] for row in rows]
        sound(result, asked, list(texts.values()), shortest)
        if not reuse:
            check(result, asked, newest(asked, texts, added, shortest, count))


def newest(
    asked: list[list[int]], texts: dict[int, list[int]], added: list[tuple[int, int]], shortest: int, count: int
) -> list[list[int]]:
    """What follows the newest added occurrence of the longest n-gram, per text."""
    found = []
    for text in asked:
        after: list[int] = []
        for length in (4 * shortest, 2 * shortest, shortest):
            for row, end in reversed(added):
                known = texts[row]
                if not after and length - 1 <= end < len(known) - 1 and len(text) >= length:
                    same = known[end - length + 1 : end + 1] == text[-length:]
                    after = known[end + 1 : end + 1 + count] if same else []
        found.append(after)
    return found


def sound(result: Drafts, asked: list[list[int]], texts: list[list[int]], shortest: int) -> None:
    """Whatever is drafted follows the same tokens in one of the texts."""
    for text, drafts, drafted, found in zip(asked, *(item.tolist() for item in result), strict=True):
        if found:
            whole = [*text[-shortest:], *drafts[:drafted]]
            places = [(one, at) for one in texts for at in range(len(one))]
            assert any(one[at : at + len(whole)] == whole for one, at in places)


@pytest.mark.parametrize("table", [1, 2, 16])
def test_equal_hashes_cost_drafts_and_nothing_else(table: int) -> None:
    """With hardly any hashes all that is found is still a continuation."""
    text = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(table)).tolist()
    index = empty(400, 2, table=table)
    corpus_insert_ref(index, table_of([(text, 0)]), 0)
    asked = [text[: end + 1][-40:] for end in range(20, 290, 3)]
    result = ask(index, asked, 4)
    sound(result, asked, [text], 2)
    assert 0 < result[2].sum() < (len(asked) if table == 1 else 1 + len(asked))


def test_no_draft_runs_over_the_end_of_an_answer() -> None:
    index = empty(64, 2)
    corpus_insert_ref(index, table_of([([1, 2, 3, 4], 0), ([3, 4, 5, 6, 7], 3)]), 0)
    asked = [[1, 2], [2, 3], [3, 4], [4, 5], [6, 7]]  # 3, 4 ends an answer, and its other place is within a prompt
    check(ask(index, asked, 4), asked, [[3, 4], [4], [], [6, 7], []])


def test_memory_is_that_of_its_tables() -> None:
    for size in (1024, 1025, 5000):
        index = CorpusIndex.empty(size, 4, torch.zeros(3, 70))
        tables = (index.ring, index.newest, index.earlier)
        assert CorpusIndex.bytes_of(size, 210) == sum(table.numel() * table.element_size() for table in tables)
    assert index.lengths == (16, 8, 4)
    assert len(index.powers) == 16 == index.shortest << (corpus.LEVELS - 1)
