#!/usr/bin/env bash
# An empty "added_tokens_decoder" makes transformers ignore special_tokens_map.json, and so changes the eos token.
#
# Versions: transformers 5.24.0, tokenizers 0.23.3
# Expected: special_tokens_map.json fills in what tokenizer_config.json does not name, or never counts; an empty table
#   adds nothing and changes nothing.
# Seen: special_tokens_map.json wins over tokenizer_config.json: the eos token is that of the map. With
#   "added_tokens_decoder": {} in tokenizer_config.json the map and added_tokens.json are not read at all: the eos
#   token is that of tokenizer_config.json, and a token of added_tokens.json is split into characters.
# Matters: answers of the same weights end at another token after a tool has rewritten tokenizer_config.json, and
#   lengths, throughput and scores change with it. specbatch reads the files in the same order and says which one
#   counts (docs/generate.md, "Tokenizers and chat templates").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz<>|")}


def opened(name, **more):
    folder = Path(name)
    folder.mkdir()
    backend = Tokenizer(models.BPE(letters, []))
    backend.add_special_tokens(["<end>", "<turn>"])
    backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<turn>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": len(letters) + 2}))
    found = AutoTokenizer.from_pretrained(folder)
    return found.eos_token, len(found.encode("<tool>"))


without, empty = opened("without"), opened("empty", added_tokens_decoder={})
print("without the key: eos %s, <tool> has %d token" % without)
print("with an empty one: eos %s, <tool> has %d tokens" % empty)
assert without == ("<turn>", 1)
assert empty == ("<end>", 6)
PYTHON
