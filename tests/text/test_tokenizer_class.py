"""The report that a class of transformers would replace parts of tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer

from specbatch.text.tokenizer import Tokenizer
from specbatch.weights.gguf_tokenizer import QWEN2_SPLIT

TEXTS = ("a  12345 it's\n\n x", "e\u0301 \ufb01", " a", "a\nb")


def backend(kind: str) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    tokens = ["<eos>", *alphabet, *("".join(pair) for pair in merges)]
    found = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = {
        "gpt2": whole,
        "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "qwen2": pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]),
    }  # fmt: skip
    found.pre_tokenizer = parts[kind]
    if kind == "qwen2":
        found.normalizer = normalizers.Sequence([normalizers.NFC()])
    found.decoder = ByteLevel()
    found.add_special_tokens(["<eos>"])
    return found


def write(folder: Path, kind: str, **files: Any) -> Path:
    backend(kind).save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def report(folder: Path) -> list[str]:
    lines: list[str] = []
    assert Tokenizer.from_folder(folder, name="mine", log=lines.append).encode("12345") is not None
    return lines


@pytest.mark.parametrize("kind", ["gpt2", "digits", "qwen2"])
@pytest.mark.parametrize(
    "name",
    ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "RobertaTokenizer",
     "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer"],
)  # fmt: skip
def test_a_class_that_replaces_parts_is_reported(name: str, kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, tokenizer_config={"tokenizer_class": name})
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    lines = report(folder)
    assert len(lines) <= 1
    if lines:
        assert (
            f" makes a {type(theirs).__name__} of these files (tokenizer_class: {name}, model_type: None)" in lines[0]
        )
        assert lines[0].startswith("tokenizer mine: transformers ")
    else:
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    if any(ours.encode(text) != theirs.encode(text, add_special_tokens=False) for text in TEXTS):
        assert lines


def test_the_part_is_named(tmp_path: Path) -> None:
    (line,) = report(write(tmp_path, "digits", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}))
    assert "replaces the pre_tokenizer of tokenizer.json" in line
    (line,) = report(write(tmp_path, "digits", tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"}))
    assert "replaces the normalizer and pre_tokenizer of tokenizer.json" in line


def test_the_class_may_stand_in_the_config_of_the_model(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "tokenizer_class": "Qwen2Tokenizer"}
    assert len(report(write(tmp_path, "digits", config=config))) == 1


@pytest.mark.parametrize("kind", ["gpt2", "digits", "qwen2"])
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "llama", "glm4_moe", "no_such_type"])
def test_without_a_class_the_type_of_the_model_counts(model_type: str, kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, config={"model_type": model_type}, tokenizer_config={"eos_token": "<eos>"})
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    own = "qwen2" if model_type == "qwen3" else model_type
    lines = report(folder)
    assert len(lines) == (own in ("qwen2", "gpt2") and own != kind)
    assert all(f"{type(theirs).__name__} of these files" in line for line in lines)
    assert lines or all(ours.encode(text) == theirs.encode(text) for text in TEXTS)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_5", "qwen3"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast"])
def test_some_types_of_models_overrule_the_class(name: str, model_type: str, kind: str, tmp_path: Path) -> None:
    described = {"tokenizer_class": name}
    folder = write(tmp_path, kind, config={"model_type": model_type}, tokenizer_config=described)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    lines, made = report(folder), type(theirs).__name__  # which models overrule the class depends on transformers
    if any(ours.encode(text) != theirs.encode(text, add_special_tokens=False) for text in TEXTS):
        assert f"{made} of these files (tokenizer_class: {name}, model_type: {model_type})" in lines[0]
    assert len(lines) == (made != "TokenizersBackend" and (made, kind) != ("Qwen2Tokenizer", "qwen2"))


def test_a_class_whose_code_is_in_the_folder_does_not_run(tmp_path: Path) -> None:
    described = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')\n")
    assert report(write(tmp_path, "digits", tokenizer_config=described)) == []
