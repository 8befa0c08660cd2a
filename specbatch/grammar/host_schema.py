"""Prepares JSON schemas for llguidance.

Raises RegexError with one line where it cannot compile one.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.grammar.json_values import SchemaError
from specbatch.grammar.limits import remembered

# One space at most, as the automata allow: a model that may write any number of them can go on forever.
_OPTIONS: Any = {"whitespace_pattern": "[ ]?", "coerce_one_of": False, "lenient": False}
# Else one tokenization alone would be allowed where the text is forced: the model decides which tokens it consists of.
_LARK = '%%llguidance {"no_forcing": true}\nstart: %%json %s'


@remembered(SchemaError)
def host_grammar(text: str) -> str:
    """The grammar of llguidance for a schema, given as JSON. Raises SchemaError."""
    try:
        schema = parse_json(text, unique=True)
    except UnreadableError as error:
        raise SchemaError(f"{error}; write a JSON schema") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise SchemaError(f"it is {json.dumps(schema):.20}; write an object")
    grammar = LLMatcher.grammar_from_lark(_LARK % json.dumps(schema | {"x-guidance": _OPTIONS}))
    is_wrong, reasons = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise SchemaError(" ".join(reasons[0].split()))
    return grammar
