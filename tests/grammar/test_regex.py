"""Regular expressions as automata over bytes, against Python's own matching."""

from __future__ import annotations

import re
from random import Random

import pytest

from specbatch.grammar.limits import RegexError
from specbatch.grammar.regex import ByteAutomaton, compile_regex

EXPRESSIONS = (
    "", "ab|c", ".*", "a*b?(c|dd)+", "[^a]*a{2,3}", "(a|b)*a(a|b){2}", "[é-ÿ€\U0001f600]+?x", "[^é]*", r"^a\$$",
    r"^a|b$", r"\D{2}", r"[\da]+", "(?:a(?:b(?:c)?)?)?", "(?P<name>a|b){0,2}c",
)  # fmt: skip


def matches(automaton: ByteAutomaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = int(automaton.table[state, byte])
        if state < 0:
            return False
    return bool(automaton.accepting[state])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_automata_match_what_python_matches(expression: str) -> None:
    random, automaton, seen = Random(0), compile_regex(expression), set()
    for _ in range(2000):
        text = "".join(random.choice("abcdéÿ€\U0001f600x\n1$") for _ in range(random.randrange(5)))
        wanted = bool(re.fullmatch(expression, text))
        assert matches(automaton, text) == wanted, text
        seen.add(wanted)
    assert seen == {False, True}


def test_classes_of_characters_are_ascii() -> None:
    assert matches(compile_regex(r"\w\d\s"), "a1 ")
    for text in ("é1 ", "a٣ ", "a1\xa0"):
        assert re.fullmatch(r"\w\d\s", text)
        assert not matches(compile_regex(r"\w\d\s"), text)


def test_excluded_spaces_are_those_of_unicode() -> None:
    for expression in (r"\S", r"[^\s]", r"[\Sa]"):
        automaton = compile_regex(expression)
        assert matches(automaton, "é")
        for text in (" ", "\xa0", "\u2028", "\ufeff"):
            assert not matches(automaton, text)
    automaton = compile_regex(r"[^\S]")
    assert matches(automaton, " ")
    assert not matches(automaton, "\xa0")


@pytest.mark.parametrize("expression", ["(?:){1000000000}", "(?:){0,1000000000}", "((?:){65535}){65535}"])
def test_repetitions_of_the_empty_text_take_no_time(expression: str) -> None:
    automaton = compile_regex(expression)
    assert automaton.table.tolist() == [[-1] * 256]
    assert automaton.accepting.tolist() == [True]


def test_half_of_a_surrogate_pair_never_matches() -> None:
    automaton = compile_regex(r"[\ud000-\ue000]")
    assert matches(automaton, "\ud7ff")
    assert matches(automaton, "\ue000")
    state = automaton.table[automaton.table[0, 0xED], 0xA0]
    assert state == -1


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "cannot be parsed"),
        ("(?=a)b", "lookahead and lookbehind are not regular"),
        (r"(a)\1", "back-references are not regular"),
        ("a^b", "at its beginning and end only"),
        (r"\ba", "at its beginning and end only"),
        ("(?i)a", r"flags such as \(\?i\)"),
        ("(?i:a)", r"flags such as \(\?i:...\)"),
        ("(?>a)b", "atomic groups"),
        ("(a|b)*a(a|b){16}", "more than 16000 states"),
        ("((a{1000}){1000}){1000}", "more than 16000 states"),
        ("((a{1000}){1000}){0,1000}", "too large"),
        ("(a?){3000}", "takes too much work"),
        ("(" * 2000 + ")" * 2000, "cannot be parsed"),
    ],
)
def test_what_cannot_be_compiled_is_refused(expression: str, why: str) -> None:
    with pytest.raises(RegexError, match=why):
        compile_regex(expression)
