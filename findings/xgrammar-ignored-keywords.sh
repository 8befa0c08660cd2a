#!/usr/bin/env bash
# xgrammar compiles a JSON schema with `uniqueItems` or `contains` to the grammar of the schema without it.
#
# Versions: xgrammar 0.2.9, llguidance 1.9.1, torch 2.13.0 (CPU).
# Expected: an error or a warning for a keyword that the library does not enforce.
# Seen: no error; the grammar is equal, character by character, to that of the schema without the keyword. llguidance
#   refuses the same schemas with "Unimplemented keys".
# Matters: an engine with xgrammar returns JSON that the schema can refuse, and says nothing. specbatch refuses a schema
#   with a keyword that it does not enforce (docs/grammars.md, "JSON schemas").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.9 llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json

import llguidance
import xgrammar

integers = {"type": "array", "items": {"type": "integer"}}
KEYWORDS = {"uniqueItems": True, "contains": {"const": 5}}
END = 256
vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[END]))
without = str(compiler.compile_json_schema(json.dumps(integers)).grammar)
for keyword, value in KEYWORDS.items():
    whole = json.dumps(integers | {keyword: value})
    ignored = str(compiler.compile_json_schema(whole).grammar) == without
    grammar = llguidance.LLMatcher.grammar_from_json_schema(whole)
    refusal = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar).get_error()
    print(f"{whole}: xgrammar ignores {keyword}: {ignored}; llguidance: {refusal}")
    assert ignored, "xgrammar does something with the keyword now"
    assert "Unimplemented" in refusal, "llguidance compiles the schema now"
PYTHON
