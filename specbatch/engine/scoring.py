"""Log-probabilities of given texts: what the target says of tokens that somebody else chose.

A text passes through the target as a prompt does, by the same kernels, in chunks and in pages, while no request runs.
Nothing is drafted or sampled. Texts that are alike but for their last token are computed once; where the prefix cache
is on, and no layer is recurrent, so are the pages with which several texts begin, such as the choices of one question.
"""

from __future__ import annotations

import math
import operator
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from specbatch.core.async_copy import AsyncCopy, upload
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk, split_into_passes
from specbatch.core.device_batch import DeviceBatch
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.memory.page_pool import pages_for
from specbatch.memory.planner import MemoryPlan
from specbatch.models.decoder import Decoder
from specbatch.runtime.prefill_forward import Forward

Pair = tuple[Sequence[int], Sequence[int]]  # context and continuation
Checked = tuple[list[int], list[int]]
_BYTES_PER_LOGIT = 16  # the model's own, float32, and what the sum of their exponentials takes


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities (natural logarithm, float32 each), and whether each
    token is the one that greedy decoding would take (of equally likely ones the lowest id)."""

    logprob: float
    is_greedy: bool


OnScore = Callable[[int, Likelihood], None]


class Tally:
    """What was scored since `reset`, for the record. rows: one per pair; seconds: that took."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0

    def add(self, pairs: list[Checked], found: list[Likelihood], seconds: float) -> None:
        self.seconds += seconds
        for (context, continuation), likelihood in zip(pairs, found, strict=True):
            counts = {"prompt_tokens": len(context), "scored_tokens": len(continuation)}
            self.rows.append({"index": len(self.rows), **counts, **likelihood._asdict()})

    def numbers(self) -> dict[str, float | None]:
        """Metrics of the rows; see `specbatch.records.metrics`."""
        scored = sum(row["scored_tokens"] for row in self.rows)
        total = scored + sum(row["prompt_tokens"] for row in self.rows)
        rate = 1 / self.seconds if self.seconds else math.nan
        return {
            "requests": len(self.rows),
            "duration_s": self.seconds,
            "input_tokens": total,
            "scored_tokens": scored,
            "request_throughput": rate * len(self.rows),
            "input_throughput": rate * total,
        }


class _Text(NamedTuple):
    """tokens: all but the last, which nothing follows. first: the position that the first token of the continuations is
    read off. members: the pairs of which it is the text."""

    tokens: tuple[int, ...]
    first: int
    members: list[int]


class _Placed(NamedTuple):
    """begin: tokens in pages of the text before it in its group."""

    text: _Text
    begin: int


class Scorer:
    """Runs texts through the target of an engine while that is idle and its prefix cache empty: all pages and device
    rows are then nobody's. tally: what it has scored.
    """

    def __init__(
        self,
        model: Decoder,
        forward: Forward,
        batch: DeviceBatch,
        plan: MemoryPlan,
        *,
        chunk: int,
        needs_all_hidden: bool,
        shares: bool,
        float8: bool = False,
    ) -> None:
        """chunk: tokens of a pass; every: `forward` gives the features of all tokens; shares: texts may share pages;
        float8: see `use_fp8_activations`."""
        self._model = model
        self._forward = forward
        self._batch = batch
        self._plan = plan
        self._chunk = chunk
        self._needs_all_hidden = needs_all_hidden
        self._float8 = float8
        self._shares = shares and not model.recurrent_layers
        # Rows of logits at a time: they may take what the activations of their pass have left.
        self._logits = max(1, plan.workspace // (_BYTES_PER_LOGIT * model.config.vocab_size))
        self._stream = torch.cuda.Stream(batch.device) if batch.device.type == "cuda" else None
        self.tally = Tally()

    def checked(self, pairs: Sequence[Pair]) -> list[Checked]:
        """In plain types. Refused: what is no token id, an empty part, and a text that is too long."""
        found = []
        for index, pair in enumerate(pairs):
            try:
                context, continuation = ([operator.index(token) for token in part] for part in pair)
            except (TypeError, ValueError):
                works = "give (context, continuation), two lists of token ids"
                raise refuse(f"pair {index}", f"{pair!r:.60}", works) from None
            if not context:
                raise refuse(f"context of pair {index}", context, "give the token that begins a text, such as bos")
            if not continuation:
                raise refuse(f"continuation of pair {index}", continuation, "it has no tokens; give at least one")
            vocabulary = self._model.config.vocab_size
            wrong = [token for token in context + continuation if not 0 <= token < vocabulary]
            if wrong:
                raise refuse(f"pair {index}", f"token {wrong[0]}", f"token ids go from 0 to {vocabulary - 1}")
            count = len(context) + len(continuation) - 1
            if count > self._plan.max_model_len:
                works = f"pair {index} has {count} tokens before its last; use at least that, or shorten its context"
                raise refuse("max_model_len", self._plan.max_model_len, works)
            found.append((context, continuation))
        return found

    @torch.inference_mode()
    def score(self, pairs: list[Checked], on_score: OnScore | None) -> list[Likelihood]:
        """Of checked pairs, in their order; on_score hears of each as its group ends."""
        start = time.perf_counter()
        found: dict[int, Likelihood] = {}
        launched = (self._launch(group, pairs) for group in self._groups(_texts(pairs)))
        for (owners, copy), _ in pairwise(chain(launched, [([], None)])):  # the next one runs meanwhile
            assert copy is not None
            for index, likelihood in _sums(owners, *copy.wait()):
                if not math.isfinite(likelihood.logprob):
                    raise SpecbatchError(
                        f"logits of pair {index} are not finite: the weights are damaged or overflow in this dtype; "
                        "try dtype='float32' or 'bfloat16'"
                    )
                found[index] = likelihood
                if on_score is not None:
                    on_score(index, likelihood)
        done = [found[index] for index in range(len(pairs))]
        self.tally.add(pairs, done, time.perf_counter() - start)
        return done

    def _groups(self, texts: list[_Text]) -> Iterator[list[_Placed]]:
        """Those that begin alike one behind the other: as many as fit into a pass, or go on from where another one's
        pages end."""
        group: list[_Placed] = []
        tokens = pages = 0
        for text in sorted(texts, key=lambda text: text.tokens):
            begin = self._shared(group[-1].text, text) if group else 0
            full = len(group) == self._batch.slots or pages + self._pages(text, begin) > self._plan.kv_pages
            if group and (full or (not begin and tokens + len(text.tokens) > self._chunk)):
                yield group
                group, tokens, pages, begin = [], 0, 0, 0
            group.append(_Placed(text, begin))
            tokens += len(text.tokens) - begin
            pages += self._pages(text, begin)
        if group:
            yield group

    def _shared(self, before: _Text, text: _Text) -> int:
        """How many of its tokens lie in pages of the one before; what is read off is its own."""
        if not self._shares:
            return 0
        pairs = zip(before.tokens, text.tokens[: text.first], strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return alike // self._plan.page_size * self._plan.page_size

    def _pages(self, text: _Text, begin: int) -> int:
        return pages_for(len(text.tokens), self._plan.page_size) - begin // self._plan.page_size

    def _launch(self, group: list[_Placed], pairs: list[Checked]) -> tuple[list[int], AsyncCopy]:
        """The pair that each scored token is of, and on their way to the host the tokens' log-probabilities float32 and
        whether they are greedy."""
        owners: list[int] = []
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self._batch.device
        for part in split_into_passes(self._place(group), self._chunk):
            metadata = PrefillMetadata(self._batch.page_table, part, self._plan.page_size)
            tokens = [token for span in part for token in group[span.slot - 1].text.tokens[span.start : span.end]]
            read: list[int] = []  # rows of the pass whose logits are wanted
            asked: list[tuple[int, int]] = []  # which of these is read for which token
            for span, offset in zip(part, metadata.spans.offsets, strict=False):
                text = group[span.slot - 1].text
                for position in range(max(span.start, text.first), span.end):
                    asked += [(len(read), pairs[index][1][position - text.first]) for index in text.members]
                    owners += text.members
                    read.append(offset + position - span.start)
            rows = upload(read, device)
            with use_fp8_activations(self._float8):
                last = self._forward(upload(tokens, device), metadata, None if self._needs_all_hidden else rows).last
            found += self._read_off(last[rows] if self._needs_all_hidden else last, asked)
        logprobs, greedy = (torch.cat(values) for values in zip(*found, strict=True))
        return owners, AsyncCopy(logprobs, greedy, stream=self._stream)

    def _place(self, group: list[_Placed]) -> list[PromptChunk]:
        """What is to be computed of the texts on device rows 1, 2, ..., with the pool's pages in order."""
        table = np.zeros((len(group), self._batch.page_table.shape[1]), np.int64)
        taken = 1  # page 0 is for padding
        for row, (text, begin) in enumerate(group):
            shared, own = begin // self._plan.page_size, self._pages(text, begin)
            table[row, :shared] = table[row - 1, :shared]
            table[row, shared : shared + own] = np.arange(taken, taken + own)
            taken += own
        self._batch.page_table[1 : 1 + len(group)] = upload(table, self._batch.device)
        return [PromptChunk(row, begin, len(text.tokens)) for row, (text, begin) in enumerate(group, start=1)]

    def _read_off(
        self, hidden: torch.Tensor, asked: list[tuple[int, int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """hidden [n, hidden_size], asked: rows of it, rising, and tokens -> of these, piece by piece, float32
        log-probabilities and whether they are greedy."""
        if not asked:
            return
        places = [row for row, _ in asked]
        rows, tokens = upload(asked, hidden.device).unbind(1)
        for first in range(0, len(hidden), self._logits):
            begin, end = (bisect_left(places, place) for place in (first, first + self._logits))
            row, token = rows[begin:end] - first, tokens[begin:end]
            logits = self._model.logits(hidden[first : first + self._logits])
            greedy = logits.argmax(-1)[row] == token
            logits = logits.float()
            yield logits[row, token] - logits.logsumexp(-1)[row], greedy


def _texts(pairs: list[Checked]) -> list[_Text]:
    """Each text once: choices of one token behind one context share it."""
    found: dict[tuple[tuple[int, ...], int], _Text] = {}
    for index, (context, continuation) in enumerate(pairs):
        tokens, first = (*context, *continuation[:-1]), len(context) - 1
        found.setdefault((tokens, first), _Text(tokens, first, [])).members.append(index)
    return list(found.values())


def _sums(owners: list[int], logprobs: list[float], greedy: list[bool]) -> Iterator[tuple[int, Likelihood]]:
    """By pair."""
    parts: dict[int, list[tuple[float, bool]]] = {}
    for index, logprob, is_greedy in zip(owners, logprobs, greedy, strict=True):
        parts.setdefault(index, []).append((logprob, is_greedy))
    for index, tokens in parts.items():
        yield index, Likelihood(math.fsum(value for value, _ in tokens), all(right for _, right in tokens))
