"""Special and added tokens of a tokenizer: those of tokenizer.json, and those that other files of its folder add.

transformers 5.24 reads the files in this way. `added_tokens_decoder` of tokenizer_config.json stands in place of
special_tokens_map.json and added_tokens.json, both of which are ignored where that key is, even if it is empty. Without
it special_tokens_map.json replaces what tokenizer_config.json says, and tokens of tokenizer.json that have a name are
special. Tokens that tokenizer.json lacks get the next free ids: first those with a stated id, in the order of these,
then those with a name, then the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.errors import refuse
from specbatch.files.config_values import flag_of, table_of

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DECODER, EXTRA, ADDITIONAL = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Table = dict[str, Any]


def add_special_tokens(
    backend: Any,
    name: str,
    tokenizer: Table,
    config: Table,
    special: Table,
    added: Table,
    most: int | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Add the tokens of a folder's files to its backend.

    backend    the `tokenizers.Tokenizer` of tokenizer.json
    name       of the folder, for error messages
    tokenizer, config, special, added
               tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json; empty without it
    most       number of ids that the model has, if it is known; other files add no tokens beyond it

    Returns the texts of the special tokens that have a name, such as "eos_token", and lines to report. Raises
    SpecbatchError for values of a wrong type, and if a token does not get the id that a file states.
    """
    tables = {item["content"]: item for item in tokenizer.get("added_tokens") or []}
    own = {content: item["id"] for content, item in tables.items()}
    _check_ids(backend, name, own, "tokenizer.json")
    if DECODER in config:
        where, tokens, special = DECODER, table_of(config, DECODER), {}
        stated = {_content(DECODER, token): _index(where, index) for index, token in tokens.items()}
        flags = {_content(DECODER, token): token for token in tokens.values()}
    else:
        where, flags = "added_tokens.json", {}
        stated = {content: _index(where, index) for content, index in added.items()}
    named, unnamed = _special_tokens(config, special)
    if not {**config, **special}.keys() & {"pad_token"} and tokenizer.get("padding") is not None:
        named["pad_token"] = tokenizer["padding"]["pad_token"]
    contents = {key: _content(key, token) for key, token in named.items() if token is not None}
    others = {_content(EXTRA, token): token for token in unnamed}
    usual = {contents[key] for key in NAMES if key in contents} | others.keys()
    wanted: dict[str, Any] = {}
    for content in sorted(stated, key=stated.__getitem__):
        if content in flags or content not in own:
            token = flags.get(content, {"special": content in usual, "normalized": content not in usual})
            wanted[content] = _token(content, token, is_named=content in contents.values())
    if where != DECODER:
        wanted |= {text: _token(text, tables[text], is_named=True) for text in contents.values() if text in own}
    listed = wanted.keys() | own.keys()
    for content, token in [*((contents[key], named[key]) for key in contents), *others.items()]:
        if content and content not in listed:  # the last one of several tables counts
            wanted[content] = _token(content, token, is_named=content in contents.values())
    report = _add(backend, wanted, most)
    found = {content: index for content, index in stated.items() if backend.token_to_id(content) is not None}
    differing = [content for content in found if own.get(content, found[content]) != found[content]]
    report += [
        f"{content!r} has id {own[content]}, as in tokenizer.json, and not {found.pop(content)}, as in {where}"
        for content in differing
    ]
    _check_ids(backend, name, found, where)
    _check_unique(backend, name)
    return contents, report


def _special_tokens(config: Table, beside: Table) -> tuple[Table, list[Any]]:
    """Special tokens by name, and those without a name, each a text or a table with its `content`. None: there is no
    token of this name."""
    beside = {key: _as_special(token) for key, token in beside.items()}
    extra, additional = config.get(EXTRA), config.get(ADDITIONAL)
    if not extra and additional is not None:
        extra, additional = additional, None
    named: Table = {key: {**config, **beside}.get(key) for key in NAMES}
    for table in (beside, config):
        named |= {
            key: table[key] for key in table if key not in NAMES and key.endswith("_token") and _is_token(table[key])
        }
    lists: list[list[Any]] = []
    for found in (extra, beside.get(EXTRA)):
        if isinstance(found, dict):
            named |= found
        elif isinstance(found, list):
            lists.append(found)
        elif found is not None:
            raise refuse(EXTRA, found, "it must be a list of tokens, or a table of them by name")
    if not lists:
        found = beside.get(ADDITIONAL, additional)
        if found is not None and not isinstance(found, list):
            raise refuse(ADDITIONAL, found, "it must be a list of tokens")
        lists.append(found or [])
    return named, [token for found in lists for token in found]


def _as_special(value: Any) -> Any:
    """A token of special_tokens_map.json, or a list of them. Older versions leave out that they are special."""
    if isinstance(value, list):
        return [_as_special(item) for item in value]
    return value | {"special": True} if isinstance(value, dict) and "content" in value else value


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _content(key: str, token: Any) -> str:
    """The text of a token: a string, or a table with its `content`."""
    if not _is_token(token):
        raise refuse(key, token, "a token is a text, or a table with its content; download the tokenizer again")
    return str(token if isinstance(token, str) else token["content"])


def _index(where: str, index: Any) -> int:
    found = int(index) if isinstance(index, str) and index.isdecimal() and len(index) < 10 else index
    if type(found) is not int or found < 0:
        raise refuse(where, index, "token ids are whole numbers from 0; download the tokenizer again")
    return found


def _token(content: str, token: Any, *, is_named: bool) -> Any:
    """A token with the flags of its table. A token that has a name is special, whatever the table says."""
    from tokenizers import AddedToken

    given = token if isinstance(token, dict) else {"special": True}
    found = AddedToken(content, **{flag: flag_of(given, flag) for flag in _FLAGS if given.get(flag) is not None})
    found.special = found.special or is_named
    return found


def _add(backend: Any, wanted: Mapping[str, Any], most: int | None) -> list[str]:
    """Add tokens in this order, and return a line for each one that has no place in the model."""
    report, kept = [], list[Any]()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    after = 1 + max(vocabulary.values(), default=-1)
    for content, token in wanted.items():
        is_new = content not in vocabulary
        if is_new and most is not None and after >= most:
            report.append(f"{content!r} is not a token: it would have id {after}, and the model has {most} ids")
            continue
        kept.append(token)
        after += is_new
    backend.add_tokens(kept)
    return report


def _check_ids(backend: Any, name: str, stated: Mapping[str, int], where: str) -> None:
    """Refuse tokens that have another id than the file says. tokenizers numbers added tokens in their order, from the
    size of the vocabulary on, and transformers uses these numbers without an error."""
    for content, index in stated.items():
        found = backend.token_to_id(content)
        if content and found != index:
            works = (
                f"{where} says that {content!r} has id {index}, and the tokenizers library gives it {found}; list "
                "added tokens in the order of their ids, without gaps after the vocabulary, or correct the id"
            )
            raise refuse("tokenizer", name, works)


def _check_unique(backend: Any, name: str) -> None:
    """Refuse two tokens of one id: tokenizers numbers added tokens from the number of tokens in the vocabulary, which
    is less than its largest id if ids are missing."""
    tokens: dict[int, str] = {}
    for content, index in backend.get_vocab(with_added_tokens=True).items():
        if index in tokens:
            both = " and ".join(map(repr, sorted((tokens[index], content))))
            works = f"{both} both have id {index}, because ids before it are missing; give all ids a token"
            raise refuse("tokenizer", name, works)
        tokens[index] = content
