"""Converts the tokenizer in a GGUF file's metadata to tokenizer.json and its companion files.

A GGUF file only names the rule by which text is split before merging (`tokenizer.ggml.pre`). A guessed rule would be
correct for most texts and wrong for some, so unknown names are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic, write_json
from specbatch.files.config_values import flag_of
from specbatch.weights.gguf_file import GgufFile, layouts

_ADD_BOS = "tokenizer.ggml.add_bos_token"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

# Roles of tokens in a file, and their names in tokenizer_config.json. "seperator" is how the format spells it.
_NAMES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
# Where llama.cpp ends an answer (the end-of-generation tokens of src/llama-vocab.cpp): at tokens with these roles, and
# at special tokens with these names, few of which a file declares.
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_MARKS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip

# GPT-2's rule with other groups of digits, and one leading punctuation mark or space joined to letters.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = _SPLIT.replace("DIGITS", r"\p{N}")
LLAMA3_SPLIT = _SPLIT.replace("DIGITS", r"\p{N}{1,3}")
# GPT-4o's (o200k) also splits words before capitals, and keeps contractions with their word.
_LEAD, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_SPLIT = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_END}|{_LEAD}{_UPPER}+{_LOWER}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LIKE_LLAMA3 = ("llama-bpe", "lfm2")  # in all respects, as in llama.cpp
_RULES = {"qwen2": QWEN2_SPLIT, "gpt-4o": O200K_SPLIT} | dict.fromkeys((*_LIKE_LLAMA3, "glm4", "dbrx"), LLAMA3_SPLIT)


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file into `folder`.

    Raises SpecbatchError for an unknown tokenizer or pre-tokenizer.
    """
    file = GgufFile(path, is_whole=False)
    tokens, types = _list(file, "tokens", str), _list(file, "token_type", int)
    if len(tokens) != len(types):
        raise file.refusal(f"its metadata has {len(tokens)} tokens and the types of {len(types)}")
    backend = _backend(file, tokens, types)

    pre = file.required("tokenizer.ggml.pre", str)
    described = {
        "add_bos_token": flag_of({_ADD_BOS: file.metadata(_ADD_BOS)}, _ADD_BOS, pre in _LIKE_LLAMA3),
        "chat_template": file.metadata("tokenizer.chat_template"),
    }
    described |= {name: tokens[ids[0]] for role, name in _NAMES.items() if (ids := file.token_ids(role, len(tokens)))}
    ends = json.dumps({"eos_token_id": _end_tokens(file, tokens, types)})
    write_atomic(folder / "generation_config.json", ends + "\n")
    write_json(folder / "tokenizer_config.json", described)
    write_atomic(folder / "tokenizer.json", backend.to_str())  # last: it marks the files as complete


def _end_tokens(file: GgufFile, tokens: list[str], types: list[int]) -> list[int]:
    """The ids that end an answer."""
    special = {token: index for index, token in enumerate(tokens) if types[index] in (CONTROL, USER_DEFINED)}
    marks = {mark: special[mark] for mark in END_MARKS if mark in special}
    calls = not marks.keys().isdisjoint({"<|call|>", "<|calls|>"})
    if calls and not marks.keys().isdisjoint({"<|return|>", "<|flush|>"}):
        marks.pop("<|end|>", None)  # gpt-oss and Solar Open: the end of one message of several
    if "<|tool_response>" in marks:
        marks.pop("</s>", None)  # Gemma 4: no end mark
    ids = [index for role in _END_ROLES for index in file.token_ids(role, len(tokens))]
    return list(dict.fromkeys((*ids, *marks.values())))


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    """The list under a key of the tokenizer, of one type."""
    name = f"tokenizer.ggml.{key}"
    found: list[Any] = file.required(name, list)
    if not all(type(item) is kind for item in found):
        raise file.refusal(f"its metadata has {name} with items that are not of type {kind.__name__}")
    return found


def _backend(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind = file.required("tokenizer.ggml.model")
    if kind == "llama" and file.arch in layouts() and layouts()[file.arch].sentencepiece:
        return _sentencepiece(file, tokens, types)
    if kind != "gpt2":
        raise refuse("tokenizer.ggml.model", kind, "only 'gpt2' is supported; pass tokenizer=FOLDER of the original")
    pre = file.required("tokenizer.ggml.pre", str)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "merges", str)]
    try:  # Llama 3 looks up whole words before it merges.
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LIKE_LLAMA3))
    except Exception as error:  # the library raises plain Exception, among others
        raise file.refusal(f"its tokenizer cannot be read ({error})") from None
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=type_ == CONTROL, normalized=False)
            backend.add_tokens([added])
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """The tokenizer of Gemma: SentencePiece's BPE, which merges the two neighbours whose whole has the highest score,
    with bytes for what has no token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise file.refusal(f"its metadata has {len(tokens)} tokens and the scores of {len(scores)}")
    if file.metadata("tokenizer.ggml.add_space_prefix"):
        raise refuse("tokenizer.ggml.add_space_prefix", True, "Gemma's tokenizer adds no space; use false")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):
        if types[index] == NORMAL:
            token = tokens[index]
            pairs = [(token[:place], token[place:]) for place in range(1, len(token))]
            known = [(one, two) for one, two in pairs if one in vocabulary and two in vocabulary]
            merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = file.token_ids("unknown", len(tokens))
    if not unknown:
        raise file.refusal("its metadata has no tokenizer.ggml.unknown_token_id")
    try:
        model = models.BPE(vocabulary, merges, unk_token=tokens[unknown[0]], fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises plain Exception, among others
        raise file.refusal(f"its tokenizer cannot be read ({error})") from None
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (CONTROL, USER_DEFINED):  # user-defined tokens may contain the mark of a space
            is_control = type_ == CONTROL
            backend.add_tokens([AddedToken(token, special=is_control, normalized=not is_control)])
    return backend


def pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in _RULES:
        rule = Split(Regex(_RULES[name]), "isolated")
        return Sequence([rule, ByteLevel(add_prefix_space=False, use_regex=False)])
    works = f"known are smollm, {', '.join(_RULES)}; pass tokenizer=FOLDER of the original model"
    raise refuse("tokenizer.ggml.pre", name, works)
