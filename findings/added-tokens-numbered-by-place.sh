#!/usr/bin/env bash
# tokenizers numbers added tokens by their place in the list, whatever id the file states, and two can share one id.
#
# Versions: tokenizers 0.23.3
# Expected: an added token has the `id` that tokenizer.json states, or loading the file is an error.
# Seen: ids 6 and 5 in this order become 5 and 6; id 9 after a vocabulary of 5 becomes 5. In a vocabulary with the ids
#   0 to 4 and 6 the next added token gets id 6 as well, because the count of tokens is taken for the next free id. No
#   error, no warning in Python.
# Matters: special tokens of a chat template turn into other rows of the embedding: answers get worse and end tokens
#   do not end them, and a draft whose file lists the same tokens in another order has other ids than its target.
#   specbatch refuses such a file with the token, both ids and what works (docs/generate.md, "Tokenizers and chat
#   templates").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json

from tokenizers import Tokenizer, models

flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
letters = {letter: index for index, letter in enumerate("abcde")}


def ids(vocabulary, *added):
    described = json.loads(Tokenizer(models.BPE(vocabulary, [])).to_str())
    described["added_tokens"] = [{"id": index, "content": content, **flags} for content, index in added]
    found = Tokenizer.from_str(json.dumps(described))
    return {content: found.token_to_id(content) for content in (*vocabulary, *(content for content, _ in added))}


swapped = ids(letters, ("<y>", 6), ("<x>", 5))
print("stated <y> 6, <x> 5:", {token: swapped[token] for token in ("<y>", "<x>")})
assert (swapped["<y>"], swapped["<x>"]) == (5, 6)
moved = ids(letters, ("<x>", 9))
print("stated <x> 9:", {"<x>": moved["<x>"]})
assert moved["<x>"] == 5
shared = ids({**letters, "q": 6}, ("<x>", 7))
print("stated q 6, <x> 7:", {token: shared[token] for token in ("q", "<x>")})
assert shared["q"] == shared["<x>"] == 6
PYTHON
