"""Regular expressions that llguidance matches on the host, as it does JSON schemas that are no finite automaton."""

from __future__ import annotations

import pytest

from specbatch.grammar.compiler import Compiler, Grammar


def match_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with an even number of characters, so that batches have both."""

    def compiled(compiler: Compiler, regex: str) -> Grammar:
        if len(regex) % 2:
            return on_device(compiler, regex)
        return compiler._host_vocabulary.compile(f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/')

    on_device = Compiler._regex
    monkeypatch.setattr(Compiler, "_regex", compiled)
