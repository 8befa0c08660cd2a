"""Sampling parameters of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from specbatch.config.settings import (
    FLAG,
    Rule,
    check_fields,
    foreign_names,
    is_number,
    is_whole,
    number,
    setting,
    whole,
)
from specbatch.errors import MOST, MOST_SEED, refuse

MOST_TOP_LOGPROBS = 20
MOST_BIASES, MOST_BIAS = 300, 100  # of `logit_bias`, as in OpenAI's API
MOST_BAD_WORDS, MOST_WORD_TOKENS = 64, 16  # of a request, in all their spellings as tokens; of one of these
_UNSUPPORTED = "it is not supported; leave it out"
_GRAMMAR = "use json_schema or regex"
# Parameters of vLLM, OpenAI's API and transformers that users try, and what works here.
FOREIGN_NAMES = {
    "max_tokens": "use max_new_tokens",
    "max_completion_tokens": "use max_new_tokens",
    "max_length": "use max_new_tokens",
    "min_new_tokens": "use min_tokens",
    "stop_tokens": "use stop_token_ids",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "num_return_sequences": "use n",
    "best_of": "it is not supported; use n, which returns all samples",
    "num_logprobs": "use logprobs, or top_logprobs for the most likely tokens",
    "do_sample": "use temperature; 0 is greedy",
    "length_penalty": _UNSUPPORTED,
    "use_beam_search": _UNSUPPORTED,
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use regex, such as yes|no",
    "guided_decoding": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "response_format": _GRAMMAR,
    "include_stop_str_in_output": _UNSUPPORTED,
}
_STOP = Rule(
    lambda x: isinstance(x, tuple) and all(isinstance(text, str) for text in x), "use a text or a list of texts"
)
_STOP_TOKENS = Rule(
    lambda x: isinstance(x, tuple) and all(is_whole(token) and 0 <= token <= MOST for token in x),
    "use a list of token ids",
)
_SEED = Rule(lambda x: is_whole(x) and abs(x) <= MOST_SEED, f"use a whole number up to {MOST_SEED}, or leave it out")
_BIAS = Rule(
    lambda pairs: isinstance(pairs, tuple)
    and len(pairs) <= MOST_BIASES
    and all(
        isinstance(pair, tuple) and len(pair) == 2 and is_whole(pair[0]) and 0 <= pair[0] <= MOST
        and is_number(pair[1]) and abs(pair[1]) <= MOST_BIAS
        for pair in pairs
    ),
    f"use a mapping of at most {MOST_BIASES} token ids to numbers from -{MOST_BIAS} to {MOST_BIAS}",
)  # fmt: skip
_PENALTY = number(lambda x: abs(x) <= 2, "use a number from -2 to 2; 0 is off")
_REGEX = Rule(lambda x: isinstance(x, str), "use a regular expression")
_SCHEMA = Rule(lambda x: isinstance(x, str), "use a JSON schema, as an object or as JSON")
_LOGPROBS = Rule(FLAG.fits, "use a boolean; top_logprobs=K adds the K most likely tokens")


@foreign_names(FOREIGN_NAMES)
@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off; they apply in the order temperature, top-k,
    top-p, min-p. `stop` strings end the output and are not part of the text; `stop_token_ids` end it like the
    model's own end tokens, which `ignore_eos` switches off. Within the first `min_tokens` tokens end tokens are not
    sampled and stop strings are ignored. `seed` None derives one from the engine's seed and the request's index; each
    of `n` samples has its own, derived from it. `logprobs` asks for the log-probability of each emitted token under
    the model's own distribution (before temperature, truncation, penalties, biases and `min_tokens`); `top_logprobs`
    also for the most likely tokens in its place.

    `logit_bias` maps token ids to what is added to their logits; it is kept as pairs. Penalties apply after it, also to
    greedy answers. `presence_penalty` is subtracted once from the logits of tokens that the answer has,
    `frequency_penalty` as often as it has them. `repetition_penalty` divides positive and multiplies negative logits of
    tokens that the prompt or the answer has. `bad_words` are not completed: the last token of a word, as the tokenizer
    encodes it alone and after a space, is not chosen after the others of the word.

    `regex` is an expression that the whole answer matches, and `json_schema` a schema that it is a document of: tokens
    that lead to no match are not chosen, and end tokens where the answer is one. It is kept as JSON. Where bad words
    and `min_tokens` leave none of the tokens that the grammar allows, they do not apply.

    `reasoning` lists texts that begin reasoning, such as `<think>`: stop strings after one of them do not end an
    output, nor do those within the first characters while these may become one. What follows the reasoning is then to
    be cut by the caller, who knows where the reasoning ends.
    """

    temperature: float = setting(
        0.0, "Sampling temperature; 0 is greedy.", number(lambda x: x >= 0, "use 0 (greedy) or a positive number")
    )
    top_p: float = setting(
        1.0,
        "Nucleus sampling; 1 is off.",
        number(lambda x: 0 < x <= 1, "use a value above 0 and up to 1 (1 is off)"),
    )
    top_k: int = setting(
        0,
        "Sample from the K most likely tokens; 0 is off.",
        whole(0, works="use 0 (off) or a positive whole number"),
    )
    min_p: float = setting(
        0.0,
        "Least probability relative to the most likely token; 0 is off.",
        number(lambda x: 0 <= x <= 1, "use a value from 0 (off) to 1"),
    )
    max_new_tokens: int = setting(128, "Maximum number of tokens per answer.", whole(1))
    stop: Sequence[str] = setting((), "", _STOP)
    stop_token_ids: Sequence[int] = setting((), "", _STOP_TOKENS)
    ignore_eos: bool = setting(False, "Continue after the model's end-of-text tokens.")
    seed: int | None = setting(None, "", _SEED)
    logprobs: bool = setting(False, "Write the log-probability of each token.", _LOGPROBS)
    skip_special_tokens: bool = True
    n: int = setting(1, "Samples per prompt. The prompt is computed once.", whole(1))
    min_tokens: int = setting(
        0, "Minimum number of tokens before an end token or a stop string can end the answer.", whole(0)
    )
    top_logprobs: int = setting(
        0, "Write the log-probabilities of the K most likely tokens in each place.", whole(0, MOST_TOP_LOGPROBS)
    )

    prompt_logprobs: bool = setting(
        False, "Write the log-probability of each token of the prompt, which is then computed without the prefix cache."
    )
    presence_penalty: float = setting(
        0.0, "Lowers the logits of tokens that the answer has; -2 to 2, 0 is off.", _PENALTY
    )
    frequency_penalty: float = setting(
        0.0, "Lowers the logits of tokens for each time that the answer has them; -2 to 2, 0 is off.", _PENALTY
    )
    repetition_penalty: float = setting(
        1.0,
        "Makes tokens of the prompt and the answer less likely if above 1; 1 is off.",
        # Logits divided by much less would not be finite.
        number(lambda x: 0.01 <= x <= 100, "use a number from 0.01 to 100, such as 1.1; 1 is off"),
    )
    logit_bias: Any = setting((), "", _BIAS)
    bad_words: Sequence[str] = setting((), "", _STOP)
    regex: str | None = setting(None, "A regular expression that the whole answer matches.", _REGEX)
    json_schema: Any = setting(None, "A JSON schema that the answer is a document of, as JSON.", _SCHEMA)
    reasoning: Sequence[str] = setting((), "", _STOP)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        words = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words
        object.__setattr__(self, "bad_words", _tuple(words))
        for name in ("stop", "reasoning"):
            given = getattr(self, name)
            object.__setattr__(self, name, _tuple([given] if isinstance(given, str) else given))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", _json(self.json_schema))
        check_fields(self)
        for name, kind in (("stop", "stop string"), ("reasoning", "text")):
            if not all(getattr(self, name)):
                raise refuse(name, getattr(self, name), f"a {kind} must not be empty")
        if not all(word.strip() for word in self.bad_words):
            raise refuse("bad_words", self.bad_words, "a word must not be empty")
        for word in self.bad_words:
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise refuse("bad_words", word, "it has half of a surrogate pair, which is not text")
        tokens = [token for token, _ in self.logit_bias]
        for token in tokens:
            if tokens.count(token) > 1:
                raise refuse("logit_bias", token, "this token id is there more than once; use one bias for it")
        if self.min_tokens > self.max_new_tokens:
            raise refuse("min_tokens", self.min_tokens, f"use at most max_new_tokens={self.max_new_tokens}")
        self._check_grammar()
        if self.top_logprobs:
            object.__setattr__(self, "logprobs", True)

    def _check_grammar(self) -> None:
        if self.regex is None and self.json_schema is None:
            return
        if self.regex is not None and self.json_schema is not None:
            raise refuse("regex", self.regex, "there is a json_schema as well; use one of them")
        if self.ignore_eos:
            raise refuse("ignore_eos", True, "an end token ends what matches regex or json_schema; leave it out")
        from specbatch.grammar.limits import RegexError
        from specbatch.grammar.regex_parser import checked_regex
        from specbatch.grammar.schema_engine import checked_schema

        name, value = ("json_schema", self.json_schema) if self.regex is None else ("regex", self.regex)
        try:
            if self.regex is None:
                checked_schema(value)
            else:
                checked_regex(value)
        except RegexError as error:
            raise refuse(name, value, str(error)) from None

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Presence, frequency and repetition."""
        return float(self.presence_penalty), float(self.frequency_penalty), float(self.repetition_penalty)

    @property
    def is_penalized(self) -> bool:
        return self.penalties != (0.0, 0.0, 1.0)

    def updated(self, changes: Mapping[str, Any]) -> SamplingParams:
        """The same parameters with other values. `regex` and `json_schema` replace each other."""
        if not changes.keys().isdisjoint(("regex", "json_schema")):
            changes = {"regex": None, "json_schema": None, **changes}
        return replace(self, **changes)

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The same as `SamplingParams(**values)` of JSON values, fast where rows of a file share all but the seed."""
        return _shared(None, values)

    def with_row(self, changes: Mapping[str, Any]) -> SamplingParams:
        """The same as `updated` with JSON values, fast where rows of a file share all but the seed."""
        return _shared(self, changes)

    def with_seed(self, seed: int | None) -> SamplingParams:
        """The same parameters with a valid seed. Unlike `replace` it checks nothing again, because jobs call it for
        each row."""
        found = copy(self)
        object.__setattr__(found, "seed", seed)
        return found


def _shared(base: SamplingParams | None, values: Mapping[str, Any]) -> SamplingParams:
    seed = values.get("seed")
    if seed is not None and not _SEED.fits(seed):
        raise refuse("seed", seed, _SEED.works)
    own = json.dumps(values if seed is None else {name: values[name] for name in values if name != "seed"})
    make = _made if len(own) <= _LONGEST_KEPT else _made.__wrapped__
    found = make(base, own)
    return found.with_seed(seed) if "seed" in values else found


@lru_cache(256)
def _made(base: SamplingParams | None, values: str) -> SamplingParams:
    changes = json.loads(values)
    return SamplingParams(**changes) if base is None else base.updated(changes)


_LONGEST_KEPT = 1 << 16  # characters of JSON, which bounds the memory of `_made`
SAMPLED = ("temperature", "top_p", "top_k", "min_p")  # parameters that decide on the distribution of a token
ADJUSTED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")  # change greedy answers, too


def sampling_of(params: SamplingParams) -> dict[str, float] | None:
    """How a request is answered, as records have it: the parameters `SAMPLED`, of a greedy one the temperature alone,
    and those of `ADJUSTED` that are in effect. None if it is greedy and nothing is adjusted."""
    names = [name for name in ADJUSTED if getattr(params, name) != getattr(SamplingParams, name)]
    if not params.temperature and not names:
        return None
    return {name: getattr(params, name) for name in (*(SAMPLED if params.temperature else SAMPLED[:1]), *names)}


def unsampled(sampling: Mapping[str, float]) -> list[str]:
    """The parameters `SAMPLED` that have no effect because the temperature is 0: those other than the defaults."""
    if sampling["temperature"]:
        return []
    return [name for name in SAMPLED if name in sampling and sampling[name] != getattr(SamplingParams, name)]


def refuse_unsampled(sampling: Mapping[str, float]) -> None:
    """Refuse parameters `SAMPLED` that have no effect because the temperature is 0."""
    for name in unsampled(sampling):
        works = "greedy answers are not sampled; add a temperature, such as temperature=0.7"
        raise refuse(name, sampling[name], works)


def sampling_text(sampling: Mapping[str, Any] | None) -> str:
    """What `sampling_of` returns in words, for tables: "greedy", "greedy, repetition-penalty 1.1", or "temperature
    0.6, top-p 0.95"."""
    if not sampling:
        return "greedy"
    names = (*(SAMPLED if sampling["temperature"] else ()), *ADJUSTED)
    given = (name for name in names if sampling.get(name, usual := getattr(SamplingParams, name)) != usual)
    texts = [f"{name.replace('_', '-')} {sampling[name]:g}" for name in given]
    return ", ".join(texts if sampling["temperature"] else ["greedy", *texts])


def _pairs(bias: Any) -> Any:
    """A mapping as sorted pairs, whose keys may be digits, as in JSON; anything else stays as it is. Different keys may
    be the same token."""
    if not isinstance(bias, Mapping):
        return (
            tuple(tuple(pair) if isinstance(pair, list) else pair for pair in bias) if isinstance(bias, list) else bias
        )
    try:
        return tuple(sorted((_token_id(key), value) for key, value in bias.items()))
    except TypeError:  # keys that are no token ids
        return bias


def _token_id(key: Any) -> Any:
    is_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(MOST))
    return int(key) if is_id else key


def _json(schema: Any) -> Any:
    """A schema as JSON; what has none stays as it is, and is refused."""
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return schema


def _tuple(values: Any) -> Any:
    """`values` as a tuple; what is not iterable stays as it is, and is refused."""
    return tuple(values) if isinstance(values, Iterable) else values
