"""Reads the files of a tokenizer: tokenizer.json, special tokens of other files, end tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from specbatch.errors import refuse
from specbatch.files.config_values import flag_of, table_of, token_ids
from specbatch.files.text_files import read_json, read_text
from specbatch.text.special_tokens import add_special_tokens
from specbatch.text.tokenizer_class import replaced_parts

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # a folder with a tokenizer has one of them
_MOST_IDS = 1 << 24


class TokenizerFiles(NamedTuple):
    """What the files of a folder describe.

    backend         a `tokenizers.Tokenizer` with all special tokens
    special_tokens  texts of special tokens by name, such as "eos_token"
    eos_ids         end tokens of config.json and generation_config.json
    add_bos         whether prompts begin with the bos token; None: the backend decides
    names_class     whether tokenizer_config.json names a class of transformers
    chat_template   the template for conversations
    tool_template   that for conversations with tools, if it is another one
    report          what users should know about the files, one line each
    """

    backend: Any
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    names_class: bool
    chat_template: str | None
    tool_template: str | None
    report: list[str]


def read_folder(folder: Path, most: int | None = None, *, compare: bool = True) -> TokenizerFiles:
    """Read the folder of a model or tokenizer. most: see `add_special_tokens`; compare: with what transformers would
    make of the files, which takes a second or two. Raises SpecbatchError if that fails."""
    backend = _read_backend(folder)
    described, config = _read_table(folder / "tokenizer_config.json"), _read_table(folder / "config.json")
    if (folder / "tokenizer.json").is_file():
        found = json.loads((folder / "tokenizer.json").read_bytes())  # the library has read it, too
        beside, added = (_read_table(folder / f"{name}.json") for name in ("special_tokens_map", "added_tokens"))
        special, report = add_special_tokens(backend, str(folder), found, described, beside, added, most)
        report += replaced_parts(backend, found, described, config) if compare else []
        backend.encode_special_tokens = flag_of(described, "split_special_tokens")
    else:
        backend, special, report = backend.backend_tokenizer, dict(backend.special_tokens_map), []
    ends = token_ids(config, "eos_token_id") + token_ids(table_of(config, "text_config"), "eos_token_id")
    return TokenizerFiles(
        backend,
        special,
        ends + token_ids(_read_table(folder / "generation_config.json"), "eos_token_id"),
        None if described.get("add_bos_token") is None else flag_of(described, "add_bos_token"),
        "tokenizer_class" in described,
        _read_chat_template(folder, described),
        _read_chat_template(folder, described, "tool_use"),
        report,
    )


def _read_backend(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` of tokenizer.json, or a tokenizer of transformers for older files."""
    path = folder / "tokenizer.json"
    works = "name a folder with tokenizer.json as tokenizer"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise refuse("tokenizer", str(folder), f"the folder has no tokenizer; {works}")
    try:
        if path.is_file():
            from tokenizers import Tokenizer as Backend

            found = Backend.from_file(str(path))
        else:
            from transformers import AutoTokenizer

            # Without these, transformers offers to run code that tokenizer_config.json names, and looks for files on
            # the hub.
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            found.backend_tokenizer  # noqa: B018 - slow tokenizers have none
        most = max(found.get_vocab().values(), default=0)
    except Exception as error:  # for a malformed file both libraries raise plain Exception, among others
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise refuse("tokenizer", str(folder), f"it cannot be read ({lines[0]}); {works}") from None
    if most >= _MOST_IDS:
        raise refuse("tokenizer", str(folder), f"it has a token with id {most}; ids are below {_MOST_IDS}")
    return found


def _read_table(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty without the file."""
    if not path.is_file():
        return {}
    found = read_json("tokenizer", path, "download it again")
    if not isinstance(found, dict):
        raise refuse("tokenizer", str(path), "it must hold a JSON object; download it again")
    return found


def _read_chat_template(folder: Path, described: dict[str, Any], name: str = "default") -> str | None:
    """The template of this name. One without a name is the default."""
    is_default = name == "default"
    for own in (f"additional_chat_templates/{name}.jinja", *(("chat_template.jinja",) if is_default else ())):
        if (folder / own).is_file():
            return read_text("chat_template", folder / own, "download it again")
    found = described.get("chat_template")
    if isinstance(found, list):  # several named templates; "default" is for conversations
        found = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
    if isinstance(found, dict):
        found = found.get(name)
    elif not is_default:
        return None
    if found is not None and not isinstance(found, str):
        works = "it must be a text, or several with names; download tokenizer_config.json again"
        raise refuse("chat_template", found, works)
    return found
