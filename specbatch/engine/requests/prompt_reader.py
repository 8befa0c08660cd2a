"""Reads prompts: text, token ids, embeddings and conversations become token ids that are known to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbatch.core.device_batch import MOST_END_TOKENS
from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.core.sampling_params import MOST_BAD_WORDS, MOST_WORD_TOKENS, SamplingParams
from specbatch.errors import refuse
from specbatch.grammar.compiler import Compiler, Grammar
from specbatch.grammar.limits import RegexError
from specbatch.memory.grammar_pool import CELLS
from specbatch.memory.page_pool import pages_for, reserved_length
from specbatch.models.config import ModelConfig
from specbatch.text.tokenizer import Tokenizer, refuse_longer

Prompt = str | list[int] | EmbeddedPrompt
Message = Mapping[str, Any]


class PromptReader:
    """Encodes prompts and refuses those that cannot run.

    end_tokens   ids that end an answer of this model
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        caps: Mapping[str, Any],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """config: of the target; caps: of the engine; log: called with what a user should know of a grammar."""
        self._tokenizer = tokenizer
        self._vocabulary = config.vocab_size
        self._hidden = config.hidden_size
        self._caps = caps
        self._spellings: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self.end_tokens = frozenset(token for token in tokenizer.eos_ids if token < self._vocabulary)
        self._compiler = Compiler(tokenizer.token_bytes, self.end_tokens, self._vocabulary, CELLS, log)

    def read(self, prompt: Prompt, params: SamplingParams, index: int) -> EmbeddedPrompt:
        """The tokens of a prompt. Raises SpecbatchError, with its index, if it cannot run."""
        if isinstance(prompt, str):
            refuse_longer(self._tokenizer, prompt, self._caps["max_model_len"])
            found = EmbeddedPrompt(self._tokenizer.encode(prompt))
        else:
            asked = prompt if isinstance(prompt, EmbeddedPrompt) else EmbeddedPrompt(prompt)
            found = asked.checked(index, self._hidden)
            if found.embeddings and params.prompt_logprobs:
                works = f"prompt {index} has embeddings in place of tokens, which have no probability; leave it out"
                raise refuse("prompt_logprobs", True, works)
        self.check(found.token_ids, params, index)
        return found

    def chats(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], thinking: bool | None
    ) -> list[list[int]]:
        """The prompts of one or several conversations. thinking: see `Tokenizer.apply_chat_template`."""
        works = 'use a list of {"role": ..., "content": ...}, or a list of such lists'
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise refuse("messages", type(messages).__name__, works)
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            if isinstance(conversation, str) or not isinstance(conversation, Sequence) or not conversation:
                raise refuse(f"messages {index}", f"{conversation!r:.60}", works)
            for message in conversation:
                if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                    raise refuse(f"messages {index}", f"{message!r:.60}", works)
            text = self._tokenizer.apply_chat_template([dict(item) for item in conversation], enable_thinking=thinking)
            refuse_longer(self._tokenizer, text, self._caps["max_model_len"])
            prompts.append(self._tokenizer.encode(text, add_special_tokens=False))
        return prompts

    def check(self, tokens: Sequence[int], params: SamplingParams, index: int | None) -> None:
        """Refuse a prompt that can never run. index: see `InferenceEngine.check`."""
        check_size(self._caps, len(tokens), params.max_new_tokens, index)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:  # a loop would take 0.1 us for each
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary)
            raise refuse(_named(index), [wrong], f"token ids go from 0 to {self._vocabulary - 1}")
        if params.min_tokens:
            self._check_end_tokens(params)
        highest = max((token for token, _ in params.logit_bias), default=0)
        if highest >= self._vocabulary:
            raise refuse("logit_bias", highest, f"token ids go from 0 to {self._vocabulary - 1}")
        self.banned(params.bad_words)
        self.grammar(params)

    def banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each spelling of bad words: alone, and after a space. Refuses what is too much."""
        if not words:
            return ()
        key = tuple(words)
        if key not in self._spellings:
            found: dict[tuple[int, ...], None] = {}
            for word in key:
                alone, after = (
                    tuple(self._tokenizer.encode(text, add_special_tokens=False))
                    for text in (word, " " + word.lstrip())
                )
                if not alone:  # after a space it would be the space
                    raise refuse("bad_words", word, "the tokenizer has no tokens for it; leave it out")
                found |= {alone: None, after: None}
            longest = max(map(len, found))
            if len(found) > MOST_BAD_WORDS:
                works = f"they have {len(found)} spellings as tokens; use words with at most {MOST_BAD_WORDS}"
                raise refuse("bad_words", list(words), works)
            if longest > MOST_WORD_TOKENS:
                works = f"one has {longest} tokens; use words of at most {MOST_WORD_TOKENS}"
                raise refuse("bad_words", list(words), works)
            # Tokenizers may know tokens that the model does not have, and never chooses.
            self._spellings[key] = tuple(word for word in found if max(word) < self._vocabulary)
        return self._spellings[key]

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """What constrains the answer, compiled for this vocabulary. Refuses what cannot be compiled."""
        name = "regex" if params.regex is not None else "json_schema"
        if (value := getattr(params, name)) is None:
            return None
        if not self.end_tokens:
            raise refuse(name, value, f"{self._tokenizer.name} has no end token, with which an answer could end")
        try:
            return self._compiler.compile(name, value)
        except RegexError as error:
            raise refuse(name, value, str(error)) from None

    def _check_end_tokens(self, params: SamplingParams) -> None:
        """Refuse end tokens that cannot be masked."""
        highest = max(params.stop_token_ids, default=0)
        if highest >= self._vocabulary:
            raise refuse("stop_token_ids", highest, f"token ids go from 0 to {self._vocabulary - 1}")
        ends, most = {*params.stop_token_ids, *self.end_tokens}, min(MOST_END_TOKENS, self._vocabulary - 1)
        if len(ends) > most:
            raise refuse("min_tokens", params.min_tokens, f"there are {len(ends)} end tokens; use at most {most}")


def _named(index: int | None) -> str:
    return "prompt" if index is None else f"prompt {index}"


def check_size(caps: Mapping[str, Any], prompt_len: int, max_new_tokens: int, index: int | None) -> None:
    """Refuse a prompt that is empty, or too long with its output for an engine with the capacities `caps`."""
    if not prompt_len:
        raise refuse(_named(index), "", "it has no tokens; give at least one")
    longest = caps["max_model_len"]
    if prompt_len + max_new_tokens > longest:
        room = longest - prompt_len
        works = (
            f"the prompt's {prompt_len} tokens leave room for {room} of max_model_len={longest}"
            if room > 0
            else f"the prompt has {prompt_len} tokens and max_model_len={longest}; shorten it"
        )
        raise refuse("max_new_tokens" if index is None else f"max_new_tokens of prompt {index}", max_new_tokens, works)
    need = pages_for(reserved_length(prompt_len + max_new_tokens, caps["verify_slots"]), caps["page_size"])
    if need > caps["kv_pages"]:
        works = f"{'the ' if index is None else ''}{_named(index)} with its output needs {need}; use at least that"
        raise refuse("kv_pages", caps["kv_pages"], works)
