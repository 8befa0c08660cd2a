"""Log-probabilities of given continuations under the target (as lm-eval's `loglikelihood`).

A text passes through the target as a prompt does, by the same kernels, in chunks and pages, while no request runs.
Nothing is drafted or sampled. Texts that differ in their last token only are computed once; with the prefix cache on
and no recurrent layers, so are pages that several texts begin with, such as the question of several choices.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from specbatch.core.async_copy import AsyncCopy
from specbatch.core.attention_metadata import PromptChunk, split_into_passes
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.score_step import ScoreWork
from specbatch.engine.schedule.smaller_batch import Launch
from specbatch.errors import SpecbatchError, refuse
from specbatch.memory.page_pool import pages_for
from specbatch.memory.planner import MemoryPlan
from specbatch.runtime.device import is_out_of_memory

Pair = tuple[Sequence[int], Sequence[int]]  # context and continuation
Checked = tuple[list[int], list[int]]


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities (natural logarithm, float32 each), and whether each
    token is the one that greedy decoding would take (of equally likely ones the lowest id)."""

    logprob: float
    is_greedy: bool


OnScore = Callable[[int, Likelihood], None]


class Tally:
    """What was scored since `reset`, for the record. rows: one per pair; seconds: the time it took."""

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
    """tokens: all but the last one, after which nothing is read. first: the position whose logits give the first token
    of the continuations. members: the pairs whose text this is."""

    tokens: tuple[int, ...]
    first: int
    members: list[int]


class _Placed(NamedTuple):
    """begin: so many tokens are in pages of the previous text of its group."""

    text: _Text
    begin: int


def checked_pairs(pairs: Sequence[Pair], vocabulary: int, longest: int) -> list[Checked]:
    """The pairs in plain types. Refuses what is no token id, empty parts and texts that are too long.

    vocabulary: of the target; longest: `max_model_len`
    """
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
        wrong = [token for token in context + continuation if not 0 <= token < vocabulary]
        if wrong:
            raise refuse(f"pair {index}", [wrong[0]], f"token ids go from 0 to {vocabulary - 1}")
        count = len(context) + len(continuation) - 1
        if count > longest:
            works = f"pair {index} has {count} tokens before its last; use at least that, or shorten its context"
            raise refuse("max_model_len", longest, works)
        found.append((context, continuation))
    return found


class Scorer:
    """Scores texts while its engine is idle and the prefix cache empty, so that all pages and slots are free. tally:
    what it has scored."""

    def __init__(
        self,
        worker: DeviceWorker,
        plan: MemoryPlan,
        *,
        shares: bool,
        most: Callable[[], int],
        shrink: Callable[[Launch], None],
    ) -> None:
        """shares: texts may share pages; most: tokens of a pass, at most; shrink: lowers that after a pass that ran out
        of memory."""
        self._worker = worker
        self._plan = plan
        self._shares = shares
        self._most = most
        self._shrink = shrink
        device = worker.batch.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.tally = Tally()

    @torch.inference_mode()
    def score(self, pairs: list[Checked], on_score: OnScore | None) -> list[Likelihood]:
        """Score checked pairs, in their order; on_score is called with each as its group ends."""
        start = time.perf_counter()
        found: dict[int, Likelihood] = {}
        launched = (self._launch(group, pairs) for group in self._groups(_texts(pairs)))
        for (owners, copy), _ in pairwise(chain(launched, [([], None)])):  # the next group runs meanwhile
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
        """Sorted, so that texts with a common prefix are neighbors: as many as fit into a pass, or continue after the
        pages of their predecessor."""
        group: list[_Placed] = []
        tokens = pages = 0
        for text in sorted(texts, key=lambda text: text.tokens):
            begin = self._shared(group[-1].text, text) if group else 0
            full = len(group) == self._worker.batch.slots or pages + self._pages(text, begin) > self._plan.kv_pages
            if group and (full or (not begin and tokens + len(text.tokens) > self._most())):
                yield group
                group, tokens, pages, begin = [], 0, 0, 0
            group.append(_Placed(text, begin))
            tokens += len(text.tokens) - begin
            pages += self._pages(text, begin)
        if group:
            yield group

    def _shared(self, before: _Text, text: _Text) -> int:
        """How many of its tokens are in pages of the previous text; tokens whose logits are read are its own."""
        if not self._shares:
            return 0
        pairs = zip(before.tokens, text.tokens[: text.first], strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return alike // self._plan.page_size * self._plan.page_size

    def _pages(self, text: _Text, begin: int) -> int:
        return pages_for(len(text.tokens), self._plan.page_size) - begin // self._plan.page_size

    def _launch(self, group: list[_Placed], pairs: list[Checked]) -> tuple[list[int], AsyncCopy]:
        """The pair that each scored token belongs to; and on their way to the host, the tokens' log-probabilities
        float32 and whether they are greedy. A group that runs out of memory is launched again, in shorter passes."""
        tokens = sum(len(text.tokens) - begin for text, begin in group)
        while True:
            longest = Launch(min(tokens, self._most()), prefills=True, rank=self._worker.rank)
            try:
                return self._passes(group, pairs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not longest.can_shrink(self._worker):
                    raise longest.error(self._plan) from error
            self._shrink(longest)  # here, because the frames of the error hold tensors

    def _passes(self, group: list[_Placed], pairs: list[Checked]) -> tuple[list[int], AsyncCopy]:
        owners: list[int] = []
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunks in split_into_passes(self._place(group), self._most()):
            tokens = [token for chunk in chunks for token in group[chunk.slot - 1].text.tokens[chunk.start : chunk.end]]
            read: list[int] = []
            targets: list[tuple[int, int]] = []
            offset = 0
            for chunk in chunks:
                text = group[chunk.slot - 1].text
                for position in range(max(chunk.start, text.first), chunk.end):
                    targets += [(len(read), pairs[index][1][position - text.first]) for index in text.members]
                    owners += text.members
                    read.append(offset + position - chunk.start)
                offset += chunk.end - chunk.start
            found += self._worker.score(ScoreWork(chunks, tokens, read, targets))
        logprobs, greedy = (torch.cat(values) for values in zip(*found, strict=True))
        return owners, AsyncCopy(logprobs, greedy, stream=self._stream)

    def _place(self, group: list[_Placed]) -> list[PromptChunk]:
        """What is to be computed of the texts, in slots 1, 2, ..., with the pool's pages in order."""
        table = np.zeros((len(group), self._worker.batch.page_table.shape[1]), np.int64)
        taken = 1  # page 0 is for padding
        for row, (text, begin) in enumerate(group):
            shared, own = begin // self._plan.page_size, self._pages(text, begin)
            table[row, :shared] = table[row - 1, :shared]
            table[row, shared : shared + own] = np.arange(taken, taken + own)
            taken += own
        self._worker.assign_pages(table)
        return [PromptChunk(slot, begin, len(text.tokens)) for slot, (text, begin) in enumerate(group, start=1)]


def _texts(pairs: list[Checked]) -> list[_Text]:
    """Each text once: choices of one token after the same context share it."""
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
