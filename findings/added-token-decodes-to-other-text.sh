#!/usr/bin/env bash
# An added token such as "naïve" of a byte-level tokenizer encodes as itself and decodes to another text.
#
# Versions: tokenizers 0.23.3, transformers 5.24.0
# Expected: the text that an added token is matched by is the text that it decodes to.
# Seen: the ByteLevel decoder reads the characters of added tokens as bytes, too, if all of them are in its alphabet:
#   "naïve" becomes "na" + the byte EF + "ve", shown with a replacement character, and "Ġx" becomes " x". A token with a
#   character outside of the alphabet, such as a space, is shown as it is. The same in transformers.
# Matters: bytes of log-probabilities, stop strings, corpora of drafts and grammars over tokens are wrong if they take an
#   added token's text for what the answer shows. specbatch takes the decoder's (docs/grammars.md, With other parameters).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 transformers==5.24.0
"$folder/venv/bin/python" - <<'PROGRAM'
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
found = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
found.add_tokens([AddedToken(text, special=False) for text in ("naïve", "Ġx", "naïve tool")])
for text, shown in (("naïve", "na\ufffdve"), ("Ġx", " x"), ("naïve tool", "naïve tool")):
    ids = found.encode(text, add_special_tokens=False).ids
    assert ids == [found.token_to_id(text)]
    assert found.decode(ids) == shown
    fast = PreTrainedTokenizerFast(tokenizer_object=found)
    assert fast.decode(fast.encode(text, add_special_tokens=False)) == shown
print("as seen: na\ufffdve for naïve")
PROGRAM
