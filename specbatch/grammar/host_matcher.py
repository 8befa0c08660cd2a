"""Grammars that are no finite automaton, matched on the host by llguidance: which tokens may follow the answer so far,
and each of its drafts; and which tokens are forced.

A matcher advances by the tokens that its request has emitted. For drafts it also goes through these and back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

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
        return HostMatcher(self._matcher.deep_copy(), -(-self._vocabulary // _WORD), self._texts)


class HostMatcher:
    """The state of a request after its tokens.

    inner   of llguidance
    words   int32 of a mask
    error   why it cannot go on, if so
    """

    def __init__(self, matcher: LLMatcher, words: int, texts: Mapping[int, bytes]) -> None:
        """texts: see `HostGrammar`."""
        self.inner = matcher
        self.words = words
        self._texts = texts
        self.error = ""
        self._followed = 0

    def follow(self, output: Sequence[int]) -> None:
        """Go on to the end of the tokens of an answer, which begin with those of the last call."""
        new = list(output[self._followed :])
        if new and not self.error:
            self.inner.consume_tokens(new)
            self._followed += len(new)
            self._note_error()

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

    def check(self, rows: np.ndarray) -> None:
        """Note an error of masks int32 [N, words], and let all tokens follow then: what they lead to is not used."""
        self._note_error()
        if not self.error and not rows.any(1).all():
            self.error = _NONE
        if self.error:
            rows.fill(-1)

    def _note_error(self) -> None:
        if not self.error and self.inner.is_error():
            reason = self.inner.get_error().partition("\n")[0].strip()
            self.error = _NONE if reason.startswith("NoExtension") else reason


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
    for matcher, rows in zip(matchers, found, strict=True):
        matcher.check(rows)
    return found


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
    for matcher, rows in zip(matchers, found, strict=True):
        matcher.check(rows)
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
