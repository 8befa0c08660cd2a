#!/usr/bin/env bash
# transformers 5 does not read add_bos_token of tokenizer_config.json if the folder has a tokenizer.json.
#
# Versions: transformers 5.23.0, tokenizers 0.23.3
# Expected: with `"add_bos_token": true` a text begins with the bos token, and with `false` it does not, as the key says
#   and as LlamaTokenizerFast of transformers 4 does.
# Seen: the key is dropped before the tokenizer is made. Only the post-processor of tokenizer.json counts: true adds no
#   bos token where that has none, and false removes none. The same folder with vocab.json in place of tokenizer.json
#   follows the key. No warning.
# Matters: prompts of plain text (completions, base models, few-shot tasks) lose their first token, or get one, with the
#   version of a library; scores and acceptance of drafts move with it. specbatch follows the key, and reports a
#   difference (docs/generate.md, "Tokenizers and chat templates"); `specbatch eval` follows tokenizer.json, as lm-eval
#   with transformers does, with a note.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "a", "b"])}


def ids(*, add_bos, in_file=None):
    """in_file: whether the post-processor of tokenizer.json adds the bos token; None: there is only vocab.json."""
    folder = Path(f"{add_bos}-{in_file}")
    folder.mkdir()
    name = "GPT2Tokenizer" if in_file is None else "PreTrainedTokenizerFast"
    described = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"unk_token": "</s>"}))
    if in_file is None:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        backend = Tokenizer(models.BPE(vocabulary, []))
        if in_file:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        backend.save(str(folder / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]


found = {(add, file): ids(add_bos=add, in_file=file) for add in (True, False) for file in (True, False, None)}
for (add, file), tokens in found.items():
    where = "no tokenizer.json" if file is None else f"tokenizer.json {'adds' if file else 'does not add'} it"
    print(f"add_bos_token {add}, {where}: {tokens}")
assert found[True, None] == [0, 2, 3] and found[False, None] == [2, 3]
assert found[True, False] == found[False, False] == [2, 3]
assert found[True, True] == found[False, True] == [0, 2, 3]
PYTHON
