"""Tokenizer: text to token ids and back, chat templates, and end-of-text ids.

Built from a folder's `tokenizer.json` as it is. transformers 5 would rebuild the pre-tokenizer from the class named in
`tokenizer_config.json`, which changes the tokens of some models (digits in SmolLM2), so it is used only for folders
without `tokenizer.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError, refuse, refuse_json
from specbatch.text.chat_template import ChatTemplate, with_argument_texts, with_reasoning
from specbatch.text.token_bytes import byte_tokens, token_bytes
from specbatch.text.tokenizer_files import read_folder

BYTE_EOS = 256
_USUAL_CHARACTERS = 8  # of a token, at most
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # of transformers: marks where the final message ends
_TOOLS = re.compile(r"\btools\b")  # the variable of templates
_PADDING = re.compile(r"|\[PAD\d*\]|<pad>|<\|pad\|>")  # names of padding ids


class Tokenizer:
    """A vocabulary with its rules for splitting text.

    name               where it was read from
    vocab_size         number of ids, from 0; a model's embedding may have more rows, which mean no text
    eos_ids            all ids that end an answer, from every file that names one
    bos_id             the beginning-of-text id, if there is one
    has_chat_template  whether `apply_chat_template` works
    """

    def __init__(
        self,
        backend: Any,
        *,
        name: str,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        is_of_transformers: bool = False,
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`. With `add_bos` None the backend decides. is_of_transformers: whether
        transformers reads it from the same files."""
        backend.no_truncation()  # both are the state of whoever saved the file, and not of the model
        backend.no_padding()
        self.name = name
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self._backend = backend
        self._add_bos = add_bos
        self._is_of_transformers = is_of_transformers
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, name)
        self._tool_template = None if tool_template is None else ChatTemplate(tool_template, name)
        self._special_tokens = special_tokens or {}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_folder(
        cls, folder: Path, *, name: str | None = None, log: Callable[[str], None] | None = None, most: int | None = None
    ) -> Tokenizer:
        """Read the folder of a model or tokenizer. `log` receives lines about files that disagree. With `most`, the
        number of the model's ids, files beside tokenizer.json add no tokens that it does not have. Raises
        SpecbatchError if that fails."""
        found = read_folder(folder, most, compare=log is not None)
        bos, end = (found.backend.token_to_id(found.special_tokens.get(key, "")) for key in ("bos_token", "eos_token"))
        made = cls(
            found.backend,
            name=name or folder.name,
            eos_ids=found.eos_ids if end is None else (*found.eos_ids, end),
            bos_id=bos,
            add_bos=found.add_bos,
            chat_template=found.chat_template,
            tool_template=found.tool_template,
            special_tokens=found.special_tokens,
            is_of_transformers=found.names_class or found.backend.post_processor is not None,
        )
        if log is not None:
            for line in (*found.report, *made._differing_bos()):
                log(f"tokenizer {made.name}: {line}")
        return made

    def _differing_bos(self) -> list[str]:
        """A line if `add_bos_token` and tokenizer.json differ. transformers 5 does not read the key beside the file."""
        if self._add_bos is None or self.bos_id is None:
            return []
        if (self._backend.encode("").ids[:1] == [self.bos_id]) == self._add_bos:
            return []
        return [
            f"prompts of plain text begin {'with' if self._add_bos else 'without'} the bos token, as add_bos_token of "
            "tokenizer_config.json says; transformers 5 follows tokenizer.json, which says otherwise"
        ]

    @property
    def eos_id(self) -> int | None:
        """The end-of-text id: that of the `eos_token` in the configuration, else the lowest of `eos_ids`."""
        text = self._special_tokens.get("eos_token")
        found: int | None = None if text is None else self._backend.token_to_id(text)
        return min(self.eos_ids, default=None) if found is None else found

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def tool_template(self) -> str | None:
        """The source of the template for conversations with tools."""
        return self.chat_template if self._tool_template is None else self._tool_template.source

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by name, such as "pad_token"."""
        return self._special_tokens

    def template_writes(self, text: str) -> bool:
        """Whether there is a chat template, with `text` in its source."""
        return self._chat_template is not None and text in self._chat_template.source

    def encode(self, text: str, *, add_special_tokens: bool = True, as_transformers: bool = False) -> list[int]:
        """Token ids of a text. Special tokens are added only if the model's files ask for them.

        as_transformers: where add_bos_token of tokenizer_config.json and tokenizer.json disagree, the latter counts, as
        in transformers 5."""
        if as_transformers and self._is_of_transformers:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        by_rule = add_special_tokens and self._add_bos is not False
        ids: list[int] = self._backend.encode(text, add_special_tokens=by_rule).ids
        if add_special_tokens and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that mean no text are left out."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for a conversation, to be encoded without adding special tokens.

        `continue_final_message`: the text ends within the last message, after its content, instead of with the
        generation prompt. As in transformers 5.23, what the template does to the content (trimming) is kept.
        `enable_thinking` is the template's variable; None leaves its default. `tools`: functions that the answer may
        call, in OpenAI's form. Arguments of calls in messages are objects; a template that fails with those gets their
        JSON. Raises SpecbatchError if the model has no template, or the template rejects the messages, has no such
        variable, shows no tools, does not render tool calls or does not render the last message as it is.
        """
        template = self._tool_template if tools and self._tool_template is not None else self._chat_template
        if template is None:
            raise refuse("chat_template", None, f"{self.name} has none; use chat_template=False, or plain prompts")
        if enable_thinking is not None and "enable_thinking" not in template.source:
            works = f"the chat template of {self.name} has no enable_thinking; leave it out"
            raise refuse("thinking", enable_thinking, works)
        if any(message.get("tool_calls") for message in messages) and "tool_calls" not in template.source:
            works = f"the chat template of {self.name} does not render tool calls; write them as content"
            raise refuse_json("messages", messages, works)
        if tools and not _TOOLS.search(template.source):
            works = f"the chat template of {self.name} does not show tools to the model; leave them out"
            raise refuse_json("tools", [tool["function"]["name"] for tool in tools], works)
        if continue_final_message:
            return self._continued(template, messages, enable_thinking)
        variables = self._variables(messages, add_generation_prompt, enable_thinking, tools)
        try:
            return template.render(**variables)
        except SpecbatchError:
            texts = with_argument_texts(variables["messages"])
            if texts is None:
                raise
            with suppress(SpecbatchError):  # the first reason is that of the usual form
                return template.render(**variables | {"messages": texts})
            raise

    def _continued(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], enable_thinking: bool | None
    ) -> str:
        """The conversation up to the end of the content of its last message."""
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str) or "content" not in template.source:
            works = "a final message to continue needs a text as content, and a template that renders content"
            raise refuse_json("messages", messages, works)
        marked = [*messages[:-1], {**messages[-1], "content": content + _TAG}]
        text = template.render(**self._variables(marked, False, enable_thinking))
        before, tag, after = text.rpartition(_TAG.strip())
        if not tag or content.strip() not in text:
            works = f"the chat template of {self.name} changes the final message, so that it cannot be continued"
            raise refuse_json("messages", messages, works)
        return before if after[:1] == " " else before.rstrip()  # trimmed: so would be the end of the content

    def render_ahead(self, conversations: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Render several conversations at once, so that the next calls of `apply_chat_template` with one of them and
        the default options take less time."""
        if self._chat_template is not None:
            self._chat_template.render_ahead(self._variables(messages, True, None) for messages in conversations)

    def _variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        enable_thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        # As in transformers: a key without a value is not there, since many templates write "None" for one.
        given = [
            with_reasoning({key: value for key, value in message.items() if value is not None}) for message in messages
        ]
        shown = None if tools is None else list(tools)
        prompt = {"messages": given, "tools": shown, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._special_tokens | prompt | switch

    def vocabulary(self) -> list[str]:
        """Token strings by id; "" for unused ids."""
        strings = [""] * self.vocab_size
        for token, index in self._backend.get_vocab(with_added_tokens=True).items():
            strings[index] = token
        return strings

    @cached_property
    def hidden(self) -> dict[str, int]:
        """Tokens that a decoded text leaves out, such as <|im_end|>, by name."""
        added = self._backend.get_added_tokens_decoder()
        return {item.content: token for token, item in added.items() if item.special}

    def token_bytes(self) -> list[bytes | None]:
        """The bytes of each token's text by id; None for special tokens and unused ids. Raises SpecbatchError if tokens
        do not join to a text."""
        found = token_bytes(self._backend)
        if found is None:
            raise refuse("tokenizer", self.name, "regex and json_schema need byte-level BPE or SentencePiece")
        return found

    @cached_property
    def shown_bytes(self) -> list[bytes | None] | None:
        """`token_bytes` with special tokens, whose text is their name; None if tokens do not join to a text."""
        return token_bytes(self._backend, special=True)

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """The byte of each token of byte fallback, whose text the tokens beside it change."""
        return byte_tokens(self._backend)


class ByteTokenizer(Tokenizer):
    """One id per byte, and 256 for end of text, for models with random weights. Larger ids are shown as `<id>`."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size <= BYTE_EOS:
            raise refuse("vocab_size", vocab_size, f"a model without a tokenizer needs at least {BYTE_EOS + 1}")
        self.name = "bytes"
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({BYTE_EOS})
        self.bos_id = None
        self._chat_template = self._tool_template = None
        self._special_tokens = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, as_transformers: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        shown = bytearray()
        for index in ids:
            if index < BYTE_EOS:
                shown.append(index)
            elif index > BYTE_EOS or not skip_special_tokens:
                shown += self._name(index).encode()
        return shown.decode(errors="replace")

    def vocabulary(self) -> list[str]:
        return [self._name(index) for index in range(self.vocab_size)]

    @cached_property
    def hidden(self) -> dict[str, int]:
        return {self._name(BYTE_EOS): BYTE_EOS}

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([index]) if index < BYTE_EOS else None for index in range(self.vocab_size)]

    @cached_property
    def shown_bytes(self) -> list[bytes | None] | None:
        return [bytes([index]) if index < BYTE_EOS else self._name(index).encode() for index in range(self.vocab_size)]

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        return {}

    @staticmethod
    def _name(index: int) -> str:
        return "<eos>" if index == BYTE_EOS else chr(index) if index < BYTE_EOS else f"<{index}>"


def refuse_longer(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Refuse a text that has far more than `most` tokens, at a cost that depends on `most` and not on the text.

    A word of 30 MB takes minutes and gigabytes to encode, so prefixes of rising length are encoded first.
    """
    end = _USUAL_CHARACTERS * most
    while end < len(text):
        if len(tokenizer.encode(text[:end])) > 2 * most:  # the end of the cut text may have other tokens
            works = f"its first {end} characters have more than max_model_len={most} tokens; shorten it"
            raise refuse("prompt", f"{len(text)} characters", works)
        end *= 4


def vocabulary_difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """A phrase for the first difference between two vocabularies; None if the ids mean the same tokens.

    Unused and padding ids at the end do not count, because models of one family pad to different sizes.
    """
    ours, theirs = (_without_padding(item.vocabulary()) for item in (a, b))
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"id {index} is {our!r} in {a.name} and {their!r} in {b.name}"
    if len(ours) != len(theirs):
        return f"{a.name} has {len(ours)} tokens and {b.name} has {len(theirs)}"
    return None


def _without_padding(tokens: list[str]) -> list[str]:
    used = len(tokens)
    while used and _PADDING.fullmatch(tokens[used - 1]):
        used -= 1
    return tokens[:used]
