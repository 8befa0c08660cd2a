"""Grammars that are no finite automaton, matched on the host by llguidance: which tokens may follow the answer so far,
and each of its drafts; and which tokens are forced.

A matcher advances by the tokens that its request has emitted. For drafts it also goes through these and back. Where
llguidance cannot go on after a draft, which may be rejected, the matcher starts anew after the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from specbatch.grammar.limits import RegexError
from specbatch.grammar.token_automaton import longest

_NONE = "no token of this vocabulary may follow"
_WORD = 32  # tokens of an int32 of a mask


class HostVocabulary:
    """The tokens of a model, as llguidance has them."""

    def __init__(self, tokens: Sequence[bytes | None], ends: Collection[int], vocabulary: int) -> None:
        """tokens: the bytes of each, None for those that may not be part of a text; ends: end tokens; vocabulary:
        number of ids of the model."""
        given = [*tokens[:vocabulary], *[None] * (vocabulary - len(tokens))]
        self._texts = {token: text for token, text in enumerate(given) if text and token not in ends}
        texts = [self._texts.get(token, b"<%d>" % token) for token in range(len(given))]
        special = [token for token in range(len(given)) if token not in self._texts]
        found = TokenizerWrapper(_Tokens(texts, special, min(ends)))
        self._tokenizer = LLTokenizer(found, eos_token=sorted(ends), slices=LLTokenizer.json_slices())

    def compile(self, grammar: str) -> HostGrammar:
        """Raises RegexError if llguidance cannot compile a grammar, or no sequence of tokens matches it."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        found = HostGrammar(matcher, self._tokenizer.vocab_size, self._texts)
        probe = found.matcher()
        masks([probe], [[]], None)
        if probe.error:
            raise RegexError(probe.error)
        return found


class HostGrammar:
    """A compiled grammar. Each request has a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, texts: Mapping[int, bytes]) -> None:
        """texts: of tokens that are no ends."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._texts = texts

    def matcher(self) -> HostMatcher:
        return HostMatcher(self._matcher, -(-self._vocabulary // _WORD), self._texts)


class HostMatcher:
    """The state of a request after its tokens.

    inner   of llguidance
    words   int32 of a mask
    error   why it cannot go on, if so
    """

    def __init__(self, matcher: LLMatcher, words: int, texts: Mapping[int, bytes]) -> None:
        """matcher: before any token, which is copied; texts: see `HostGrammar`."""
        self.inner = matcher.deep_copy()
        self.words = words
        self._start = matcher
        self._texts = texts
        self.error = ""
        self._has_dead_ends = False  # whether nothing may follow some draft of the last masks
        self._followed: list[int] = []

    def follow(self, output: Sequence[int]) -> None:
        """Go on to the end of the tokens of an answer, which begin with those of the last call."""
        new = list(output[len(self._followed) :])
        if new and not self.error:
            self.inner.consume_tokens(new)
            self._followed += new
            self.error = _error_of(self.inner)

    def until_dead_end(self, tokens: list[int]) -> list[int]:
        """Of the tokens that a step has emitted, those up to one that nothing may follow: the next one, if any, was
        chosen without a mask. There is an error then."""
        for count in range(1, len(tokens) if self._has_dead_ends else 0):
            self.error = self._mask_anew(tokens[:count], np.empty(self.words, np.int32))
            if self.error:
                return tokens[:count]
        return tokens

    def replace(self, drafts: Sequence[int], drafted: int) -> list[int]:
        """Of drafts after the answer, of which the first `drafted` count, keep those before the first that may not
        follow, and go on with tokens that are forced, to as many as there are places: see `Constraint.replace`."""
        if self.error:
            return list(drafts[:drafted])
        taken = self.inner.try_consume_tokens(list(drafts[:drafted]))
        found = list(drafts[:taken])
        while len(found) < len(drafts) and (forced := self._forced()) is not None:
            self.inner.consume_token(forced)
            found.append(forced)
        if self.inner.is_error():
            self.inner = self._anew()
        else:
            self.inner.rollback(len(found))
        return found

    def _forced(self) -> int | None:
        """`TokenAutomaton.forced` of what was consumed."""
        if self.inner.is_stopped() or not self.inner.compute_ff_bytes():
            return None
        row = np.empty(self.words, np.int32)
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        return longest(tokens, self._texts)

    def fill_tree(self, rows: np.ndarray, drafts: Sequence[int], parents: Sequence[int]) -> None:
        """Write masks int32 [N, words] after the answer, and after each draft that may follow its parent. parents: of
        each draft the row of the node before it."""
        children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        for row, parent in enumerate(parents, start=1):
            children[parent].append(row)

        def walk(row: int) -> None:
            self.inner.unsafe_compute_mask_ptr(rows[row].ctypes.data, rows[row].nbytes)
            for child in children[row]:
                if self.inner.try_consume_tokens([drafts[child - 1]]):
                    walk(child)
                    self.inner.rollback(1)

        walk(0)

    def check(self, rows: np.ndarray, path: Callable[[int], Sequence[int] | None]) -> None:
        """Note an error of masks int32 [N, words], and let all tokens follow then: what they lead to is not used. An
        error after drafts is none of the answer, so the masks are computed again. path: the drafts before a row, None
        if there is none."""
        self._has_dead_ends = False
        if not self.error and (self.inner.is_error() or not rows.any(1).all()):
            for row, words in enumerate(rows):
                drafts = path(row)
                if drafts is None or not (reason := self._mask_anew(drafts, words)):
                    continue
                if drafts:
                    self._has_dead_ends = True
                else:
                    self.error = reason
            self.inner = self._anew()
        if self.error:
            rows.fill(-1)

    def _mask_anew(self, drafts: Sequence[int], words: np.ndarray) -> str:
        """Write the mask after drafts. Returns why nothing may follow them, if so: all tokens do then, and after drafts
        that may not be there."""
        inner = self._anew()
        taken = inner.try_consume_tokens(list(drafts))
        reason = _error_of(inner)
        if taken == len(drafts) and not reason:
            inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            reason = _error_of(inner) or ("" if words.any() else _NONE)
        if reason or taken < len(drafts):
            words.fill(-1)
        return reason

    def _anew(self) -> LLMatcher:
        found = self._start.deep_copy()
        found.try_consume_tokens(self._followed)
        return found


def _error_of(matcher: LLMatcher) -> str:
    if not matcher.is_error():
        return ""
    reason = matcher.get_error().partition("\n")[0].strip()
    return _NONE if reason.startswith("NoExtension") else reason


def masks(
    matchers: Sequence[HostMatcher], drafts: Sequence[list[int]], parents: Sequence[Sequence[int]] | None
) -> np.ndarray:
    """Which tokens may follow the answers of H requests, and each of their drafts: int32 [H, N, words], bit t % 32 of
    word t // 32 for token t, with N - 1 the most drafts. All may follow a draft that may not be there.

    parents: the row of the node before each draft; None for chains. Several threads share the chains."""
    nodes = max(map(len, drafts)) + 1
    found = np.full((len(matchers), nodes, matchers[0].words), -1, dtype=np.int32)
    live = [index for index, matcher in enumerate(matchers) if not matcher.error]
    if parents is None:
        where = found.ctypes.data, found[0, 0].nbytes, len(matchers) * nodes
        if single := [(matchers[index].inner, index * nodes) for index in live if not drafts[index]]:
            _executor().unsafe_compute_mask_ptr(single, *where)
        if chains := [(matchers[index].inner, index * nodes, drafts[index]) for index in live if drafts[index]]:
            _executor().unsafe_compute_mask_ptr_with_draft_token(chains, *where)
    else:
        for index in live:
            matchers[index].fill_tree(found[index], drafts[index], parents[index])
    for index, (matcher, rows) in enumerate(zip(matchers, found, strict=True)):
        above = range(len(drafts[index])) if parents is None else parents[index]
        matcher.check(rows, partial(_path, drafts[index], above))
    return found


def _path(drafts: Sequence[int], parents: Sequence[int], row: int) -> list[int] | None:
    """The drafts up to the one of a row; None if it has none."""
    if row > len(drafts):
        return None
    return [*(_path(drafts, parents, parents[row - 1]) or ()), drafts[row - 1]] if row else []


def masks_after(matchers: Sequence[HostMatcher], paths: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Which tokens may follow the answers of H requests and W paths of drafts of each: int32 [H, W, words], see
    `masks`."""
    count = len(paths[0])
    found = np.full((len(matchers), count, matchers[0].words), -1, dtype=np.int32)
    for node in range(count):
        taken = [
            0 if one.error else one.inner.try_consume_tokens(list(own[node]))
            for one, own in zip(matchers, paths, strict=True)
        ]
        live = [
            (one.inner, place * count + node)
            for place, (one, own) in enumerate(zip(matchers, paths, strict=True))
            if taken[place] == len(own[node]) and not one.error
        ]
        if live:
            _executor().unsafe_compute_mask_ptr(live, found.ctypes.data, found[0, 0].nbytes, found.shape[0] * count)
        for one, steps in zip(matchers, taken, strict=True):
            if steps:
                one.inner.rollback(steps)
    for matcher, rows, own in zip(matchers, found, paths, strict=True):
        matcher.check(rows, own.__getitem__)
    return found


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _Tokens:
    """What `TokenizerWrapper` reads."""

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, which nothing asks for: see `HostMatcher._forced`."""
        return []
