"""Compiles grammars for the vocabulary of a model: automata on the device, or llguidance on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property

from specbatch.grammar.host_matcher import HostGrammar, HostVocabulary
from specbatch.grammar.limits import COMPILING_S, KeptTexts, RegexError, limited
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.regex_parser import checked_regex
from specbatch.grammar.schema_engine import checked_schema, host_grammar_of
from specbatch.grammar.token_automaton import TokenAutomaton, compile_tokens

Grammar = TokenAutomaton | HostGrammar
COMPILING = 600_000  # steps of the automaton of a schema, see `limits.spend`
_MOST = 64  # compiled ones that are kept
_MOST_NOTES = 100


class Compiler:
    """Keeps the last grammars, and why others were refused, which takes as long to find."""

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes | None]],
        ends: Collection[int],
        vocabulary: int,
        most_cells: int,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """token_bytes: see `Tokenizer`; ends: end tokens; vocabulary: number of ids; most_cells: of an automaton; log:
        called with what a user should know of a schema, each line once."""
        self._find_token_bytes = token_bytes
        self._ends = ends
        self._vocabulary = vocabulary
        self._most_cells = most_cells
        self._kept: dict[tuple[str, str], Grammar] = {}
        self._refused = KeptTexts()
        self._log = log
        self._noted = set[str]()

    def compile(self, name: str, value: str) -> Grammar:
        """A grammar by the parameter that states it, `regex` or `json_schema`. Raises RegexError."""
        text = f"{name} {value}"
        if (reason := self._refused.get(text)) is not None:
            raise RegexError(reason)
        try:
            found = self._kept.pop((name, value), None) or getattr(self, f"_{name}")(value)
        except RegexError as error:
            self._refused.put(text, str(error))
            raise
        self._kept[name, value] = found  # the last used come last
        while len(self._kept) > _MOST:
            del self._kept[next(iter(self._kept))]
        return found

    def _regex(self, regex: str) -> TokenAutomaton:
        with limited(COMPILING_S):
            found = compile_tokens(compile_regex(regex), self._token_bytes, self._ends, self._vocabulary)
        if found.size > self._most_cells:
            raise RegexError(f"its table takes {found.size >> 19} MiB; simplify it to at most {self._most_cells >> 19}")
        return found

    def _json_schema(self, schema: str) -> Grammar:
        regex, grammar, notes = checked_schema(schema)
        for note in notes:
            self._note(f"json_schema: {note}")
        if regex is not None:
            checked_regex(regex)  # its parts are kept, so that the work below is the same each time
            with suppress(RegexError), limited(math.inf, COMPILING):
                return self._regex(regex)
        self._note("json_schema: matched on the host by llguidance, so steps with its requests wait for their tokens")
        return self._host_vocabulary.compile(grammar or host_grammar_of(schema))

    def _note(self, line: str) -> None:
        if line not in self._noted and len(self._noted) < _MOST_NOTES:
            self._noted.add(line)
            self._log(line)

    @cached_property
    def _token_bytes(self) -> Sequence[bytes | None]:
        return self._find_token_bytes()

    @cached_property
    def _host_vocabulary(self) -> HostVocabulary:
        return HostVocabulary(self._token_bytes, self._ends, self._vocabulary)
