"""Masks of grammars on the host: after answers, chains and trees of drafts, exactly the tokens that may follow."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import regex
from schema_answers import tokens_of
from trees import random_parents

from specbatch.grammar.host_matcher import HostGrammar, HostMatcher, HostVocabulary, masks, masks_after
from specbatch.grammar.limits import RegexError

EXPRESSION = "(?:ab|b[ac]|c[cd]{1,2})*"
TOKENS: list[bytes | None] = [b"a", b"b", b"c", b"d", b"ab", b"cdb", None, b"", b"cc"]
ENDS, VOCABULARY = {6, 9}, 40  # more ids than tokens: more than a word of a mask


def grammar(expression: str = EXPRESSION) -> HostGrammar:
    return HostVocabulary(TOKENS, ENDS, VOCABULARY).compile(
        f'%llguidance {{"no_forcing": true}}\nstart: /{expression}/'
    )


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] or b"" for token in tokens).decode()


def allowed(tokens: list[int]) -> list[int]:
    """Tokens that may follow; none after one that is no text, or does not follow itself."""
    if any(token in ENDS or not TOKENS[token] for token in tokens):
        return []
    text = text_of(tokens)
    if regex.fullmatch(EXPRESSION, text, partial=True) is None:
        return []
    found = [
        token
        for token, own in enumerate(TOKENS)
        if own and regex.fullmatch(EXPRESSION, text + own.decode(), partial=True) is not None
    ]
    return sorted([*found, *(ENDS if regex.fullmatch(EXPRESSION, text) else ())])


def started(answer: list[int]) -> HostMatcher:
    found = grammar().matcher()
    found.follow(answer[:1])
    found.follow(answer)
    return found


ANSWERS = [[], [4], [1, 0], [2], [2, 2], [8, 3], [5]]


def test_chains() -> None:
    """Of several requests at once, with chains of different lengths, twice: drafts leave no trace."""
    matchers = [started(answer) for answer in ANSWERS]
    random = Random(0)
    for _ in range(60):
        drafts = [random.choices(range(len(TOKENS) + 1), k=random.randrange(4)) for _ in ANSWERS]
        found = masks(matchers, drafts, None)
        assert found.shape == (len(ANSWERS), max(map(len, drafts)) + 1, 2)
        for answer, chain, rows in zip(ANSWERS, drafts, found, strict=True):
            for place in range(len(chain) + 1):
                if (wanted := allowed(answer + chain[:place])) and not set(chain[:place]) & ENDS:
                    assert tokens_of(rows[place]) == wanted
                elif not set(chain[:place]) & ENDS:
                    assert (rows[place] == -1).all()
    assert not any(matcher.error for matcher in matchers)


def test_trees() -> None:
    matchers = [started(answer) for answer in ANSWERS]
    random = Random(1)
    for _ in range(60):
        drafts = [random.choices(range(6), k=random.randrange(7)) for _ in ANSWERS]
        parents = [random_parents(random, len(tree) + 1, True) for tree in drafts]
        for answer, tree, above, rows in zip(ANSWERS, drafts, parents, masks(matchers, drafts, parents), strict=True):
            for row in range(len(tree) + 1):
                path, node = list[int](), row
                while node:
                    path, node = [tree[node - 1], *path], above[node - 1]
                if (wanted := allowed(answer + path)) and not set(path) & ENDS:
                    assert tokens_of(rows[row]) == wanted
                elif not set(path) & ENDS:
                    assert (rows[row] == -1).all()
    assert not any(matcher.error for matcher in matchers)


def test_nodes_while_drafting() -> None:
    """As those of a verify, given the drafts before each."""
    matchers = [started(answer) for answer in ANSWERS]
    random = Random(2)
    for _ in range(40):
        width, depth = random.randrange(1, 4), random.randrange(4)
        paths = [[random.choices(range(len(TOKENS) + 1), k=depth) for _ in range(width)] for _ in ANSWERS]
        for answer, nodes, rows in zip(ANSWERS, paths, masks_after(matchers, paths), strict=True):
            for path, row in zip(nodes, rows, strict=True):
                if not set(path) & ENDS:
                    assert tokens_of(row) == wanted if (wanted := allowed(answer + path)) else (row == -1).all()
    assert not any(matcher.error for matcher in matchers)


def test_drafts_end_before_the_first_that_may_not_follow_and_go_on_with_forced_ones() -> None:
    """What is forced is the longest token, if all others that may follow are beginnings of it."""
    matchers = [started(answer) for answer in ANSWERS]
    random, forced = Random(3), 0
    for _ in range(60):
        for answer, matcher in zip(ANSWERS, matchers, strict=True):
            drafts, drafted = random.choices(range(6), k=4), random.randrange(5)
            wanted = list[int]()
            for draft in drafts[:drafted]:
                if draft not in allowed(answer + wanted):
                    break
                wanted.append(draft)
            while len(wanted) < len(drafts) and (can_follow := allowed(answer + wanted)):
                longest = max(can_follow, key=lambda token: len(TOKENS[token] or b"") if token < 9 else 0)
                texts = [TOKENS[token] if token < 9 else None for token in can_follow]
                if not all(text and (TOKENS[longest] or b"").startswith(text) for text in texts):
                    break
                wanted.append(longest)
                forced += 1
            assert matcher.replace(drafts, drafted) == wanted
    assert forced > 20
    assert not any(matcher.error for matcher in matchers)


def test_requests_have_a_state_of_their_own() -> None:
    shared = grammar()
    one, other = shared.matcher(), shared.matcher()
    one.follow([2])
    (first,), (second,) = masks([one, other], [[], []], None)
    assert tokens_of(first) == allowed([2])
    assert tokens_of(second) == allowed([])


def test_errors_end_a_request_alone() -> None:
    one, other = started([2]), started([4])
    one.follow([2, 0])
    assert "doesn't satisfy the grammar" in one.error
    for _ in range(2):
        found = masks([one, other], [[0], [4]], None)
        assert (found[0] == -1).all()
        assert tokens_of(found[1, 1]) == allowed([4, 4])


@pytest.mark.parametrize("expression", ["x", "ax"])
def test_grammars_that_no_token_matches(expression: str) -> None:
    """At once, or when the tokens run out."""
    if expression == "x":
        with pytest.raises(RegexError, match="no token of this vocabulary may follow"):
            grammar(expression)
        return
    matcher = grammar(expression).matcher()
    matcher.follow([0])
    masks([matcher], [[]], None)
    assert matcher.error == "no token of this vocabulary may follow"


DEAD_END = "b|cx|ab*"  # nothing follows c: no token has an x


def test_a_draft_that_nothing_may_follow_is_no_error() -> None:
    """In chains, trees, while drafting, and after what is looked up; the other masks are those of the answer."""
    matcher = grammar(DEAD_END).matcher()
    root, after_a = [0, 1, 2, 4], [1, 6, 9]
    for _ in range(2):
        [chain] = masks([matcher], [[2, 0]], None)
        assert (chain[1:] == -1).all()
        [tree] = masks([matcher], [[2, 0]], [[0, 0]])
        assert (tree[1] == -1).all()
        [nodes] = masks_after([matcher], [[[2], [0]]])
        assert (nodes[0] == -1).all()
        assert tokens_of(nodes[1]) == tokens_of(tree[2]) == after_a
        assert tokens_of(chain[0]) == tokens_of(tree[0]) == root
        assert matcher.replace([2, 0, 0], 1) == [2]
        assert not matcher.error
    matcher.follow([0])
    [[row]] = masks([matcher], [[]], None)
    assert tokens_of(row) == after_a


def test_an_answer_ends_where_nothing_may_follow() -> None:
    """Its drafts led there, and the token after them was chosen without a mask."""
    matcher = grammar(DEAD_END).matcher()
    masks([matcher], [[2]], None)
    assert matcher.until_dead_end([0]) == [0]
    assert matcher.until_dead_end([0, 1]) == [0, 1]
    assert not matcher.error
    assert matcher.replace([0, 1], 2) == [0, 1]
    assert matcher.until_dead_end([2, 9]) == [2]
    assert matcher.error == "no token of this vocabulary may follow"


def test_all_texts_of_few_tokens() -> None:
    for answer in itertools.product((0, 1, 2, 3, 4), repeat=3):
        if allowed(list(answer)):
            [[row]] = masks([started(list(answer))], [[]], None)
            assert tokens_of(row) == allowed(list(answer))
