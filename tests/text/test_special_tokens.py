"""Special tokens from the files beside tokenizer.json, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from specbatch.errors import SpecbatchError
from specbatch.text.tokenizer import Tokenizer

SIZE = 258
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
LEFT = PLAIN | {"lstrip": True}
TEXT = "a <x>b<y> <eos><z>"


def backend() -> Backend:
    vocabulary = {
        token: index for index, token in enumerate(["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    found = Backend(models.BPE(vocab=vocabulary, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = ByteLevel()
    found.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return found


def write(folder: Path, **files: Any) -> Path:
    """A tokenizer's folder; files: the contents of JSON files by stem."""
    backend().save(str(folder / "tokenizer.json"))
    for stem, content in {"tokenizer_config": {}, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def added(content: str, **flags: Any) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content, **PLAIN, **flags}


CASES: dict[str, dict[str, Any]] = {
    "named": {"tokenizer_config": {"eos_token": "<x>", "sep_token": "<y>", "mask_token": "<z>"}},
    "named, with flags": {"tokenizer_config": {"eos_token": added("<x>", lstrip=True), "cls_token": added("<y>")}},
    "named, in the vocabulary only": {"tokenizer_config": {"bos_token": "<bos>", "unk_token": "b"}},
    "extra, by name": {"tokenizer_config": {"extra_special_tokens": {"turn_token": "<x>", "image": "<y>"}}},
    "extra, in a list": {"tokenizer_config": {"extra_special_tokens": ["<y>", added("<x>", lstrip=True)]}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<y>", "<x>"]}},
    "additional and extra": {
        "tokenizer_config": {"additional_special_tokens": ["<y>"], "extra_special_tokens": ["<x>"]}
    },
    "a name of the model's own": {"tokenizer_config": {"image_token": "<x>", "add_bos_token": True}},
    "decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {"259": {"content": "<x>", **PLAIN}, "258": {"content": "<y>", **LEFT}}
        }
    },
    "decoder with other flags": {"tokenizer_config": {"added_tokens_decoder": {"0": {"content": "<eos>", **LEFT}}}},
    "decoder, not special but named": {
        "tokenizer_config": {
            "eos_token": "<x>", "added_tokens_decoder": {"258": {"content": "<x>", **PLAIN, "special": False}}
        }
    },
    "decoder in place of other files": {
        "tokenizer_config": {"added_tokens_decoder": {"258": {"content": "<x>", **PLAIN}}},
        "special_tokens_map": {"eos_token": "<y>"},
        "added_tokens": {"<z>": 258},
    },
    "empty decoder in place of other files": {
        "tokenizer_config": {"added_tokens_decoder": {}},
        "special_tokens_map": {"eos_token": "<y>"},
    },
    "map": {"special_tokens_map": {"eos_token": "<x>", "bos_token": {"content": "<bos>", **PLAIN}}},
    "map in place of the config": {
        "tokenizer_config": {"eos_token": "<x>", "pad_token": "<z>"},
        "special_tokens_map": {"eos_token": {"content": "<y>", **LEFT}},
    },
    "map without a token of the config": {
        "tokenizer_config": {"eos_token": "<eos>"}, "special_tokens_map": {"eos_token": None}
    },
    "additional in the map": {"special_tokens_map": {"additional_special_tokens": ["<x>", "<y>"]}},
    "extra in the map": {"special_tokens_map": {"extra_special_tokens": ["<x>", "<y>"]}},
    "extra by name in the map": {"special_tokens_map": {"extra_special_tokens": {"turn_token": "<x>"}}},
    "name of the model's own in the map": {"special_tokens_map": {"turn_token": "<x>"}},
    "added": {"added_tokens": {"<y>": 259, "<x>": 258, "<eos>": 0}},
    "added, with a name of the model's own": {
        "added_tokens": {"<X>": 258}, "tokenizer_config": {"image_token": "<X>"}
    },
    "added and named": {"added_tokens": {"<y>": 259, "<x>": 258}, "special_tokens_map": {"eos_token": "<y>"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **CASES[name])
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in (TEXT, "x<x>", " <y> ", "<X>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.eos_ids == ({theirs.eos_token_id} if theirs.eos_token else set())
    template = "".join(f"[{{{{ {key} }}}}]" for key in (*theirs.special_tokens_map, "sep_token", "none_token"))
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "x"}]
    again = Tokenizer.from_folder(folder)
    theirs.chat_template = template
    assert again.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_tables_without_a_type_are_tokens(tmp_path: Path) -> None:
    """transformers raises a TypeError for these."""
    folder = write(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<x>"}},
        special_tokens_map={"additional_special_tokens": [{"content": "<y>", "lstrip": True}]},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == {SIZE}
    assert tokenizer.encode("<x> <y>") == [SIZE, SIZE + 1]
    assert tokenizer.decode([SIZE, SIZE + 1]) == ""


def test_padding_names_the_pad_token(tmp_path: Path) -> None:
    folder = write(tmp_path)
    padding = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<x>",
    }  # fmt: skip
    edit(folder, padding=padding)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer.from_folder(folder).encode("a<x>") == theirs.encode("a<x>") == [66, SIZE]
    assert theirs.pad_token == "<x>"

    for config, table in (({"pad_token": None}, None), ({}, {"pad_token": None}), ({"pad_token": None}, {})):
        again = write(tmp_path, tokenizer_config=config, **({} if table is None else {"special_tokens_map": table}))
        edit(again, padding=padding)
        theirs = PreTrainedTokenizerFast.from_pretrained(again)
        assert theirs.pad_token is None
        assert Tokenizer.from_folder(again).encode("a<x>") == theirs.encode("a<x>")


NAMED: list[tuple[dict[str, Any], bool]] = [
    ({"tokenizer_config": {"eos_token": "<x>"}}, True),
    ({"special_tokens_map": {"sep_token": "<x>"}}, True),
    ({"tokenizer_config": {"turn_token": "<x>"}}, True),
    ({"tokenizer_config": {"extra_special_tokens": {"turn_token": "<x>"}}}, True),
    ({"tokenizer_config": {"mask_token": added("<x>", lstrip=True)}}, True),
    ({"tokenizer_config": {"additional_special_tokens": ["<x>"]}}, False),
    ({"tokenizer_config": {"extra_special_tokens": ["<x>"]}}, False),
    ({"tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {}}}, False),
    ({"tokenizer_config": {}}, False),
]


@pytest.mark.parametrize(("files", "special"), NAMED)
def test_tokens_of_tokenizer_json_that_have_a_name_are_special(
    files: dict[str, Any], special: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path, **files)
    flags = PLAIN | {"special": False, "normalized": True, "rstrip": True}
    own = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, added_tokens=[*own, {"id": SIZE, "content": "<x>", **flags}])
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode("a <x> b") == theirs.encode("a <x> b")
    for skip in (True, False):
        assert ours.decode([66, SIZE], skip_special_tokens=skip) == theirs.decode([66, SIZE], skip_special_tokens=skip)
    assert (ours.decode([SIZE]) == "") == special


@pytest.mark.parametrize(
    ("tokens", "files", "reason"),
    [
        ([("<x>", 300)], {}, "tokenizer.json says that '<x>' has id 300, and the tokenizers library gives it 258"),
        ([("<y>", 259), ("<x>", 258)], {}, "tokenizer.json says that '<y>' has id 259, .* gives it 258"),
        ([], {"added_tokens": {"<x>": 300}}, "added_tokens.json says that '<x>' has id 300"),
        ([], {"added_tokens": {"<x>": 5}}, "added_tokens.json says that '<x>' has id 5, .* gives it 258"),
        (
            [],
            {"tokenizer_config": {"added_tokens_decoder": {"300": {"content": "<x>"}}}},
            "added_tokens_decoder says that '<x>' has id 300",
        ),
        (
            [],
            {"tokenizer_config": {"eos_token": "<y>"}, "added_tokens": {"<x>": 259}},
            "added_tokens.json says that '<x>' has id 259",
        ),
        ([], {"added_tokens": {"<x>": "one"}}, "added_tokens.json='one': token ids are whole numbers"),
        ([], {"added_tokens": {"<x>": -1}}, "added_tokens.json=-1"),
        ([], {"tokenizer_config": {"added_tokens_decoder": {"258": 5}}}, "added_tokens_decoder=5: a token is a text"),
        ([], {"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder="),
        ([], {"tokenizer_config": {"eos_token": 5}}, "eos_token=5: a token is a text"),
        ([], {"tokenizer_config": {"eos_token": {"content": "<x>", "lstrip": "no"}}}, "lstrip='no': use true or false"),
        ([], {"tokenizer_config": {"extra_special_tokens": 5}}, "extra_special_tokens=5: it must be a list"),
        ([], {"tokenizer_config": {"extra_special_tokens": [5]}}, "extra_special_tokens=5: a token is a text"),
        ([], {"special_tokens_map": {"additional_special_tokens": "<x>"}}, "additional_special_tokens='<x>'"),
    ],
)  # fmt: skip
def test_tokens_without_the_stated_id_and_of_wrong_types_are_refused(
    tokens: list[tuple[str, int]], files: Any, reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, **files)
    if tokens:
        edit(folder, added_tokens=[{"id": index, "content": content, **PLAIN} for content, index in tokens])
    with pytest.raises(SpecbatchError, match=reason):
        Tokenizer.from_folder(folder)


def test_two_tokens_of_one_id_are_refused(tmp_path: Path) -> None:
    """tokenizers numbers added tokens from the size of the vocabulary, which is too small if it has gaps."""
    folder = write(tmp_path, tokenizer_config={"eos_token": "<x>"})
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["gap"] = SIZE + 1
    edit(folder, model=model)
    with pytest.raises(SpecbatchError, match="'<x>' and 'gap' both have id 259, because ids before it are missing"):
        Tokenizer.from_folder(folder)


def test_files_that_disagree_are_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = write(tmp_path, added_tokens={"<eos>": 7, "<x>": SIZE})
    tokenizer = Tokenizer.from_folder(folder, name="mine", log=lines.append)
    assert tokenizer.encode("<eos><x>") == [0, SIZE]
    assert lines == ["tokenizer mine: '<eos>' has id 0, as in tokenizer.json, and not 7, as in added_tokens.json"]


def test_tokens_that_the_model_has_no_embedding_for_are_left_out(tmp_path: Path) -> None:
    """Old fine-tunes name a padding token that was never added to the model."""
    lines: list[str] = []
    folder = write(tmp_path, special_tokens_map={"pad_token": "<x>", "sep_token": "<y>"}, added_tokens={"<z>": SIZE})
    tokenizer = Tokenizer.from_folder(folder, name="mine", log=lines.append, most=SIZE + 1)
    assert tokenizer.vocab_size == SIZE + 1
    assert tokenizer.encode("<z>") == [SIZE]
    assert len(tokenizer.encode("<x>")) == 3
    assert lines == [
        f"tokenizer mine: {token!r} is not a token: it would have id 259, and the model has 259 ids"
        for token in ("<y>", "<x>")
    ]
