"""A job on a simulated device: all prompts come at once, are computed in passes between decode steps, and nothing is
known of acceptance when it begins. With times of Qwen3-8B and EAGLE-3 on an H200."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests
from specbatch.engine.schedule.runner import UNKNOWN
from specbatch.engine.schedule.step_model import StepModel
from specbatch.runtime.cuda_graphs import batch_buckets

# Milliseconds of steps with 0 to 3 drafts and short contexts (results/h200: qwen3-8b, qwen3-8b-eagle3-auto; 256 and 512
# from closed loops), and nanoseconds per cached token.
STEPS = {
    1: (3.8, 4.15, 4.6, 5.05),
    8: (4.4, 4.75, 5.1, 5.5),
    32: (4.9, 5.5, 6.0, 6.5),
    128: (5.8, 8.0, 11.0, 14.0),
    256: (8.3, 14.5, 20.5, 27.0),
    512: (14.0, 27.0, 40.0, 53.0),
}
CACHED_NS = (33.0, 34.0, 35.0, 36.0)
PROMPT_S = 22e-6  # per prompt token, and at the end of a context of 32,768 ...
LONGER_S = 21e-6  # ... so much more
HEAD = 0.015  # of the first, more where the head runs for the prompt, too
LENGTHS = (0, 1, 2, 3)
CHUNK = 8192
MODEL = StepModel([*STEPS], {size: dict(enumerate(times)) for size, times in STEPS.items()})
BUCKETS = batch_buckets(512)
Acceptance = Callable[[float], Sequence[float]]


def true_time(rows: int, drafts: int, cached: int, drafting: int | None = None) -> float:
    """Seconds of a step in which so many of the requests draft; None: all."""
    plain = 1e-3 * MODEL.expected((rows, 0, 0), 0) + 1e-9 * CACHED_NS[0] * cached
    if not drafts:
        return plain
    whole = 1e-3 * MODEL.expected((rows, drafts, rows), 0) + 1e-9 * CACHED_NS[drafts] * cached
    if drafting in (None, rows):
        return whole
    single = 1e-3 * (STEPS[1][drafts] - STEPS[1][0])
    return plain + single + (whole - plain - single) * drafting / rows


@dataclass(eq=False)
class Job:
    rows: int
    context: int
    acceptance: Acceptance
    output: int = 256
    requests: int = 0  # 0: as many as rows
    chooser: DraftLength | None = None
    fixed: int = 0
    cached_prompts: bool = False
    ends_early: bool = False
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    log: list = field(default_factory=list)

    def __post_init__(self):
        n = self.requests or self.rows
        self.waiting = deque({'i': i, 'pre': 0, 'gen': 0, 'miss': 0, 'pend': 0, 'done': False, 'out': round(self.output * (0.5 + (i * 0.754877666) % 1)) if self.ends_early else self.output} for i in range(n))
        self.running = []
        self.prefilling = []
        self.left = n
        self.number = 0

    def spend(self, what, s):
        self.seconds += s
        self.spent[what] += s

    def run(self):
        inflight = None
        while self.left:
            first = self._prefill()
            live = [r for r in self.running if not r['done']]
            if inflight is not None and not self.prefilling and all(r['gen'] + (r['pend']) >= r['out'] for r in live):
                self._handle(inflight); inflight = None
            now = self._decode()
            if inflight is not None:
                self._handle(inflight)
            inflight = now
            for r in first:
                r['gen'] += 1; r['pend'] -= 1
                self._end(r)
        return self.seconds

    def _prefill(self):
        budget = CHUNK
        chunks = []
        while budget > 0 and (self.prefilling or (self.waiting and len([r for r in self.running if not r['done']]) + len(self.prefilling) < self.rows)):
            if not self.prefilling:
                r = self.waiting.popleft()
                r['pre'] = self.context - 1 if self.cached_prompts else 0
                self.prefilling.append(r)
            r = self.prefilling[0]
            n = min(budget, self.context - r['pre'])
            chunks.append((r, r['pre'], n))
            r['pre'] += n
            budget -= n
            if r['pre'] == self.context:
                self.prefilling.pop(0)
                self.running.append(r); r['pend'] += 1
            else:
                break
        if not chunks:
            return []
        tokens = sum(n for _, _, n in chunks)
        drafts = self.fixed > 0
        if self.chooser is not None:
            unfinished = len(self.waiting) + len(self.prefilling) + len([r for r in self.running if not r['done']])
            drafts = self.chooser.drafts_prompts(min(unfinished, self.rows), [self.context for _ in chunks], *[[self.output if not self.ends_early else UNKNOWN for _ in chunks]][:self.chooser.drafts_prompts.__code__.co_argcount - 4], tokens)
        self.spend('prompt', sum(n * (PROMPT_S + LONGER_S * (s + n/2) / 32768) for _, s, n in chunks) + (max(0.0055 - tokens * PROMPT_S, 0.0)))
        if drafts:
            self.spend('head', tokens * HEAD * PROMPT_S)
        else:
            for r, _, n in chunks:
                r['miss'] += n
        return [r for r, s, n in chunks if s + n == self.context]

    def _end(self, r):
        if r['gen'] >= r['out'] and not r['done']:
            r['done'] = True
            self.left -= 1
            self.running.remove(r)
            return True
        return False

    def _decode(self):
        batch = [r for r in self.running if r['gen'] + r['pend'] < r['out']]
        if not batch:
            return None
        rows = len(batch)
        contexts = [self.context + r['gen'] + max(r['pend']-1, 0) for r in batch]
        cached = sum(contexts)
        choice = Choice(self.fixed)
        if self.chooser is not None:
            left = [max((self.output - r['gen']) if not self.ends_early else min(4096 - r['gen'], max(r['gen'], UNKNOWN)), 4) for r in batch]
            unfinished = len(self.waiting) + len(self.prefilling) + len([r for r in self.running if not r['done']])
            choice = self.chooser.choose(rows, lambda: Requests(contexts, [r['miss'] for r in batch], left, 0, *[min(unfinished, self.rows)][:len(Requests._fields) - 4]))
        members = range(rows) if choice.members is None else sorted(choice.members)
        drafting = len(members) if choice.num_drafts else 0
        bucket = next(b for b in BUCKETS if b >= rows)
        whole = drafting == rows
        t = true_time(bucket, choice.num_drafts, cached, None if whole else drafting)
        name = 'timing' if choice.timing else 'probe' if choice.probing else f'step{choice.num_drafts}' + ('' if whole or not drafting else 'split')
        self.spend(name, t)
        shown = set() if choice.timing or not choice.num_drafts else set(members)
        results = []
        catch = 0.0
        for i, r in enumerate(batch):
            r['pend'] += 1
            acc = None
            if i in shown:
                catch += r['miss'] * (PROMPT_S + LONGER_S * contexts[i] / 32768)
                r['miss'] = 0
                acc = self._accepted(contexts[i], choice.num_drafts)
            else:
                r['miss'] += 1 if r['miss'] else 6
            results.append((r, acc, contexts[i]))
        if catch:
            self.spend('catch_up', catch)
        self.log.append((rows, choice.num_drafts, drafting, choice.probing, choice.timing, choice.expected_s, t, catch))
        return choice, t, results

    def _handle(self, launched):
        choice, t, results = launched
        found = []; emitted = kept = ended = 0
        for r, acc, context in results:
            emitted += 1 + (acc or 0)
            r['pend'] -= 1
            if r['done']:
                continue
            if acc is not None:
                found.append((context, acc))
            k = min(1 + (acc or 0), r['out'] - r['gen'])
            r['gen'] += k
            kept += k
            ended += self._end(r)
        if self.chooser is not None:
            self.chooser.took(choice, t)
            self.chooser.learn(choice, found, emitted, kept, ended)

    def _accepted(self, context, drafts):
        self.number += 1
        x = self.number * 0.6180339887498949 % 1.0
        reached = itertools.accumulate(self.acceptance(context)[:drafts], lambda a, b: a * b)
        return sum(x < s for s in reached)


def auto(clock: float = 0.95) -> DraftLength:
    found = DraftLength(LENGTHS, BUCKETS)
    sizes = [size for size in BUCKETS if size & (size - 1) == 0]
    found.model = StepModel(
        BUCKETS,
        {size: {n: clock * true_time(size, n, 0) for n in LENGTHS} for size in sizes},
        {size: {n: 1e-9 * CACHED_NS[n] for n in LENGTHS} for size in sizes},
    )
    found.catch_up_s, found.prompt_s, found.idle_tokens, found.can_split = PROMPT_S, HEAD * PROMPT_S, 5, True
    return found


def falling(first: float, last: float, at: int = 512) -> Acceptance:
    def shares(context: float) -> list[float]:
        p = first + (last - first) * min(max(math.log2(context / at) / 6, 0.0), 1.0)
        return [p, 0.95 * p, 0.9 * p]

    return shares
