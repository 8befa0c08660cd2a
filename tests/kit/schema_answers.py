"""Answers to JSON schemas with bytes as tokens: which texts are answers, and random ones."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np

from specbatch.grammar.compiler import Compiler, Grammar
from specbatch.grammar.host_matcher import HostGrammar, masks
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.memory.grammar_pool import CELLS

END = 256
BYTES: list[bytes | None] = [bytes([byte]) for byte in range(END)]
_LONGEST = 1500
_COMPILER = Compiler(lambda: BYTES, {END}, END + 1, CELLS)


def compiled(schema: Any) -> Grammar:
    """Of a schema, as a value or as JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _COMPILER.compile("json_schema", text)


def accepts(grammar: Grammar, text: str) -> bool:
    tokens = [*text.encode(errors="surrogatepass"), END]
    if isinstance(grammar, TokenAutomaton):
        return grammar.after(tokens) >= 0
    matcher = grammar.matcher()
    matcher.follow(tokens)
    return not matcher.error


def walked(grammar: Grammar, random: Random) -> str | None:
    """A random answer; None for one that is too long. Closing characters are likely, so that most end."""
    found = b""
    matcher = grammar.matcher() if isinstance(grammar, HostGrammar) else None
    for _ in range(_LONGEST):
        if isinstance(grammar, TokenAutomaton):
            allowed = grammar.allowed(grammar.after(found))
        else:
            assert matcher is not None
            matcher.follow(found)
            [[row]] = masks([matcher], [[]], None)
            assert not matcher.error
            allowed = tokens_of(row)
        if END in allowed and (allowed == [END] or random.random() < 0.3):
            return found.decode()
        closing = [byte for byte in allowed if byte != END and byte in b'"}]']
        among = closing if closing and random.random() < 0.4 else [byte for byte in allowed if byte != END]
        found += bytes([random.choice(among)])
    return None


def tokens_of(row: np.ndarray) -> list[int]:
    """The tokens of a mask int32 [words]."""
    return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
