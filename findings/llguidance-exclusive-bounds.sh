#!/usr/bin/env bash
# llguidance accepts a number that equals an exclusive whole bound of a JSON schema if the other bound is less than 1 away.
#
# Versions: llguidance 1.9.1.
# Expected: {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5} refuses 0.
# Seen: it accepts 0, and refuses it with "maximum": 1.5. So it is for -1 with "minimum": -1.5, "exclusiveMaximum": -1.
# Matters: an answer that the grammar allows is no document of the schema. specbatch writes other bounds into what it
#   gives to llguidance (docs/grammars.md, "JSON schemas").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema: dict, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


CASES = [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", True),
    ({"exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, "10", True),
    ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1", True),
    ({"exclusiveMinimum": 0, "maximum": 1.5}, "0", False),
]
for bounds, text, seen in CASES:
    found = accepts({"type": "number"} | bounds, text)
    print(f"{json.dumps(bounds)}: {'accepts' if found else 'refuses'} {text}")
    assert found == seen, "llguidance behaves in another way now"
PYTHON
