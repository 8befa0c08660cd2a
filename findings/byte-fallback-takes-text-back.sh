#!/usr/bin/env bash
# The decoded text of some tokens is not a beginning of the text of more tokens: one invalid byte takes back valid ones.
#
# Versions: tokenizers 0.23.3
# Expected: "é" from the byte tokens C3 A9 stays when a third byte token, C3, follows: "é" and one replacement character,
#   as bytes.decode(errors="replace") and the ByteLevel decoder give it.
# Seen: the decoder ByteFallback decodes a run of byte tokens as a whole or not at all: three replacement characters. A
#   letter of ASCII in the run is lost, too: 41 C3 is two replacement characters, not "A" and one.
# Matters: a stream that has shown "é" cannot take it back, and a drafted token that is rejected, a limit or a stop can end
#   an answer there. Text of `generate` and of a stream of the same tokens can differ. specbatch streams a run of byte tokens
#   once another token ends it, so that both are what the tokenizer decodes of all tokens (docs/generate.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PROGRAM'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

names = [f"<0x{byte:02X}>" for byte in range(256)]
fallback = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, [], byte_fallback=True))
fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
assert fallback.decode([0xC3, 0xA9]) == "é"
assert fallback.decode([0xC3, 0xA9, 0xC3]) == "\ufffd" * 3
assert fallback.decode([0x41, 0xC3]) == "\ufffd" * 2
assert bytes([0xC3, 0xA9, 0xC3]).decode(errors="replace") == "é\ufffd"

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
level = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
level.decoder = decoders.ByteLevel()
ids = [letters.index(letter) for letter in "Ã©Ã"]
assert level.decode(ids) == "é\ufffd"
print("as seen: 3 replacement characters with ByteFallback, é and 1 with ByteLevel")
PROGRAM
