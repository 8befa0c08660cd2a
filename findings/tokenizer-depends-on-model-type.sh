#!/usr/bin/env bash
# A model_type "qwen2" in config.json changes the tokens of the tokenizer.json beside it, whatever tokenizer_class is.
#
# Versions: transformers 5.24.0, tokenizers 0.23.3
# Expected: tokenizer_class "TokenizersBackend" (what transformers 5 itself writes for a tokenizer that is fully
#   described by its tokenizer.json) means that tokenizer.json is used as it is, with and without a config.json.
# Seen: with model_type qwen2 AutoTokenizer makes a Qwen2Tokenizer, which takes only vocabulary and merges from the
#   file. Its own pre-tokenizer splits "0123" into digits: 5 tokens for "a0123" in place of 2. With model_type qwen3
#   it does not. qwen3_5 does so, too. Nothing is logged.
# Matters: a server, an evaluation and a draft of one model disagree on token ids if some read the folder of the model
#   and others a folder with the tokenizer only. specbatch uses tokenizer.json as it is and reports the class and what
#   it replaces (docs/generate.md, "Tokenizers and chat templates").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = [("0", "1"), ("01", "2"), ("012", "3")]
words = [*alphabet, *("".join(pair) for pair in merges)]
backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()


def opened(model_type):
    folder = Path(model_type or "none")
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = AutoTokenizer.from_pretrained(folder)
    return type(found).__name__, len(found.encode("a0123"))


for model_type, expected in (
    (None, ("TokenizersBackend", 2)),
    ("llama", ("TokenizersBackend", 2)),
    ("qwen3", ("TokenizersBackend", 2)),
    ("qwen2", ("Qwen2Tokenizer", 5)),
    ("qwen3_5", ("Qwen3_5Tokenizer", 5)),
):
    found = opened(model_type)
    print(f"model_type {model_type}: {found[0]}, {found[1]} tokens")
    assert found == expected, expected
PYTHON
