"""Compiled grammars: what is kept, and which engine a vocabulary and a schema decide on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schema_answers import BYTES, END
from watched_calls import Watch

from specbatch.grammar import compiler as module
from specbatch.grammar.compiler import Compiler
from specbatch.grammar.host_matcher import HostGrammar
from specbatch.grammar.limits import RegexError
from specbatch.grammar.token_automaton import TokenAutomaton

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}, "b": {"enum": [1, 2]}}})
HOST = json.dumps({"type": "array", "x-b": 2, "x-a": 1})


def new(**changes: Any) -> Compiler:
    how = {"token_bytes": lambda: BYTES, "ends": {END}, "vocabulary": END + 1, "most_cells": 1 << 20} | changes
    return Compiler(**how)


def test_a_grammar_that_is_refused_is_compiled_once(watch: Watch) -> None:
    """Of a job with an expression that takes seconds to compile every row is checked."""
    compiled = watch(module, "compile_regex", before=lambda regex: regex)
    compiler = new()
    for _ in range(3):
        for regex in ("(a|b)*a(a|b){17}", "(a|b)*a(a|b){16}"):
            with pytest.raises(RegexError, match="more than 16000 states"):
                compiler.compile("regex", regex)
    assert compiled == ["(a|b)*a(a|b){17}", "(a|b)*a(a|b){16}"]


def test_the_last_grammars_are_kept() -> None:
    compiler = new()
    first, host = compiler.compile("regex", "a"), compiler.compile("json_schema", HOST)
    assert compiler.compile("regex", "a") is first
    for count in range(63):
        compiler.compile("regex", f"b{{{count + 1}}}")
    assert compiler.compile("regex", "a") is first
    assert compiler.compile("json_schema", HOST) is not host


@pytest.mark.parametrize(
    ("changes", "steps", "path"),
    [({}, 600_000, TokenAutomaton), ({"most_cells": 900}, 600_000, HostGrammar), ({}, 900, HostGrammar)],
)
def test_an_automaton_that_is_too_large_or_too_much_work_is_matched_on_the_host(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], steps: int, path: type[Any]
) -> None:
    monkeypatch.setattr(module, "COMPILING", steps)
    assert isinstance(new(**changes).compile("json_schema", SCHEMA), path)


def test_notes_come_once() -> None:
    lines: list[str] = []
    compiler = new(log=lines.append)
    for schema in (SCHEMA, HOST, HOST + " "):
        compiler.compile("json_schema", schema)
    assert lines == [
        "json_schema: #: x-a is ignored",
        "json_schema: #: x-b is ignored",
        "json_schema: matched on the host by llguidance, so steps with its requests wait for their tokens",
    ]
