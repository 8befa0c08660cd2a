"""Automata over tokens, against matching the text of each sequence of tokens."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import regex

from specbatch.grammar.limits import RegexError
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.token_automaton import FREE, compile_tokens

TEXTS = ["a", "b", "ab", "aab", "ba", "c", "é", "x", "bc"]
TOKENS: list[bytes | None] = [None, b"", *(text.encode() for text in TEXTS), "é".encode()[:1], "é".encode()[1:], b"xx"]
END, VOCABULARY = 13, len(TOKENS) + 2  # the last token is an end token, whatever its text


@pytest.mark.parametrize("expression", ["(ab|c)*", "a{3,5}b?", "[^c]+é", "(a|b)*a(a|b){2}", "x?(bc)*"])
def test_tokens_are_allowed_where_the_text_can_become_a_match(expression: str) -> None:
    random = Random(1)
    automaton = compile_tokens(compile_regex(expression), TOKENS, {END}, VOCABULARY)
    forced_somewhere = False
    for _ in range(60):
        tokens, text = [], b""
        while len(tokens) < 9:
            state = automaton.after(tokens)
            allowed = automaton.allowed(state)
            wanted = [
                token
                for token, piece in enumerate(TOKENS)
                if (token == END and is_match(expression, text))
                or (piece and token != END and can_match(expression, text + piece))
            ]
            assert allowed == wanted
            texts = {token: TOKENS[token] or b"" for token in allowed if token != END}
            leading = [token for token in texts if all(texts[token].startswith(text) for text in texts.values())]
            assert automaton.forced[state] in ((leading if END not in allowed else []) or [-1])
            forced_somewhere |= bool(automaton.forced[state] >= 0)
            inner = [token for token in allowed if token != END]
            if not inner:
                break
            tokens.append(random.choice(inner))
            text += TOKENS[tokens[-1]] or b""
    assert forced_somewhere == (expression not in ("(ab|c)*", "(a|b)*a(a|b){2}"))


def is_match(expression: str, text: bytes) -> bool:
    try:
        return bool(regex.fullmatch(expression, text.decode()))
    except UnicodeDecodeError:
        return False


def can_match(expression: str, text: bytes) -> bool:
    """Whether the text begins a match; one that ends within a character does if the character is é."""
    for end in ("", "é".encode()[1:].decode("latin-1")):
        try:
            return bool(regex.fullmatch(expression, (text + end.encode("latin-1")).decode(), partial=True))
        except UnicodeDecodeError:
            continue
    return False


def test_after_an_end_token_anything_may_follow_and_after_a_wrong_one_nothing_is_known() -> None:
    automaton = compile_tokens(compile_regex("ab"), TOKENS, {END}, VOCABULARY)
    ended = automaton.after([TOKENS.index(b"ab"), END])
    assert automaton.allowed(ended) == list(range(VOCABULARY))
    assert automaton.after([TOKENS.index(b"b")]) == FREE
    assert automaton.cells.dtype == np.int16
    assert automaton.size == len(automaton.cells) == VOCABULARY + len(automaton.next) * automaton.row


def test_states_that_lead_to_no_end_are_left_out() -> None:
    """No token ends in d."""
    automaton = compile_tokens(compile_regex("ab*d|abc"), TOKENS, {END}, VOCABULARY)
    assert automaton.allowed(0) == [TOKENS.index(b"a"), TOKENS.index(b"ab")]
    assert automaton.allowed(automaton.after([TOKENS.index(b"ab")])) == [TOKENS.index(b"c")]
    with pytest.raises(RegexError, match="no sequence of the tokens of this vocabulary"):
        compile_tokens(compile_regex("ab*d"), TOKENS, {END}, VOCABULARY)


def test_tables_that_take_much_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every beginning of a token is a function of all states."""
    automaton = compile_regex("(?:ab|ba|c){4}")
    monkeypatch.setattr("specbatch.grammar.token_automaton.MOST_CELLS", 12 * (len(automaton.table) + 2))
    compile_tokens(automaton, TOKENS, {END}, VOCABULARY)
    with pytest.raises(RegexError, match="it takes too much work with this vocabulary: repeat less"):
        compile_tokens(automaton, [*TOKENS, b"abcabc"], {END}, VOCABULARY)
