"""A job on a simulated device: all requests come at once, their prompts are computed in passes between decode steps,
and nothing is known of acceptance when it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulated_device import HEAD, PROMPT_S, Acceptance, Draws, prompt_s, step_s

from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests
from specbatch.engine.schedule.runner import UNKNOWN
from specbatch.runtime.cuda_graphs import batch_buckets

LEAST_PASS_S = 5.5e-3


@dataclass(eq=False)
class _Request:
    output: int
    prefilled: int = 0
    generated: int = 0
    pending: int = 0  # results that the host does not know
    lacking: int = 0  # tokens that the draft lacks


_Step = tuple[Choice, float, list[tuple[_Request, int, int | None]]]  # with each request's context and accepted drafts


@dataclass
class Job:
    """Of `total` requests up to `rows` at once.

    cached  whether their prompts are cached, but for the last token
    stops   whether answers end at half to one and a half times `output`, which is not known before
    """

    rows: int
    context: int
    acceptance: Acceptance
    output: int = 256
    total: int = 0  # 0: as many as `rows`
    cached: bool = False
    stops: bool = False
    chunk: int = 8192
    chooser: DraftLength | None = None  # None: `fixed` drafts
    fixed: int = 0
    seconds: float = 0.0
    catch_up_s: float = 0.0  # of these
    _waiting: deque[_Request] = field(default_factory=deque)
    _prefilling: list[_Request] = field(default_factory=list)
    _running: list[_Request] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of the whole job. Results are known a step late."""
        for index in range(self.total or self.rows):
            length = round(self.output * (0.5 + index * 0.754877666 % 1)) if self.stops else self.output
            self._waiting.append(_Request(length, self.context - 1 if self.cached else 0))
        self._draws, self._buckets = Draws(self.acceptance), batch_buckets(self.rows)
        before: _Step | None = None
        while self._waiting or self._prefilling or self._running:
            first = self._prefill()
            if before and all(request.generated + request.pending >= request.output for request in self._running):
                before = self._handle(before)
            step = self._decode()
            if before:
                self._handle(before)
            before = step
            for request in first:
                self._receive(request, 1)
        return self.seconds

    def _prefill(self) -> list[_Request]:
        """Compute a pass. Returns the requests whose prompts are complete."""
        budget, chunks = self.chunk, []
        while budget > 0:
            if not self._prefilling:
                if not self._waiting or len(self._running) == self.rows:
                    break
                self._prefilling.append(self._waiting.popleft())
            [request] = self._prefilling
            start, request.prefilled = request.prefilled, min(request.prefilled + budget, self.context)
            chunks.append((request, start, request.prefilled))
            budget -= request.prefilled - start
            if request.prefilled == self.context:
                request.pending = 1
                self._running.append(self._prefilling.pop())
        if not chunks:
            return []
        tokens, runs = self.chunk - budget, self.fixed > 0
        if self.chooser is not None:
            left = [self._left(request) for request, _, _ in chunks]
            runs = self.chooser.drafts_prompts(self._expected(), [self.context] * len(chunks), left, tokens)
        self.seconds += max(sum(prompt_s(start, end) for _, start, end in chunks), LEAST_PASS_S)
        self.seconds += HEAD * PROMPT_S * tokens * runs
        for request, start, end in chunks:
            request.lacking += 0 if runs else end - start
        return [request for request, _, end in chunks if end == self.context]

    def _decode(self) -> _Step | None:
        batch = [request for request in self._running if request.generated + request.pending < request.output]
        if not batch:
            return None
        rows = len(batch)
        contexts = [self.context + request.generated + request.pending - 1 for request in batch]
        choice = Choice(self.fixed)
        if self.chooser is not None:
            requests = Requests(
                contexts,
                [request.lacking for request in batch],
                [self._left(request) for request in batch],
                expected=self._expected(),
            )
            choice = self.chooser.choose(rows, lambda: requests)
        drafting: Sequence[int] = range(rows) if choice.members is None else choice.members
        members = set(drafting if choice.num_drafts else ())
        bucket = next(size for size in self._buckets if size >= rows)
        seconds = step_s(bucket, choice.num_drafts, sum(contexts), len(members) if len(members) < rows else None)
        catch_up_s = 0.0
        results: list[tuple[_Request, int, int | None]] = []
        for index, request in enumerate(batch):
            request.pending += 1
            accepted = None
            if index in members and not choice.timing:
                catch_up_s += prompt_s(contexts[index] - request.lacking, contexts[index])
                request.lacking = 0
                accepted = self._draws.accepted(contexts[index], choice.num_drafts)
            else:
                request.lacking += 1 if request.lacking else 6
            results.append((request, contexts[index], accepted))
        self.seconds += seconds + catch_up_s
        self.catch_up_s += catch_up_s
        return choice, seconds, results

    def _handle(self, step: _Step) -> None:
        choice, seconds, results = step
        found = [(context, accepted) for request, context, accepted in results if accepted is not None]
        running = len(self._running)
        kept = sum(self._receive(request, (accepted or 0) + 1) for request, _, accepted in results)
        emitted = len(results) + sum(accepted for _, accepted in found)
        if self.chooser is not None:
            self.chooser.took(choice, seconds)
            self.chooser.learn(choice, found, emitted, kept, running - len(self._running))

    def _receive(self, request: _Request, tokens: int) -> int:
        """Note a result. Returns how many tokens were kept."""
        kept = min(tokens, request.output - request.generated)
        request.generated += kept
        request.pending -= 1
        if kept and request.generated == request.output:
            self._running.remove(request)
        return kept

    def _expected(self) -> int:
        return min(len(self._waiting) + len(self._prefilling) + len(self._running), self.rows)

    def _left(self, request: _Request) -> int:
        """As the engine knows it."""
        if self.stops:
            return max(request.generated // 2, UNKNOWN)
        return max(request.output - request.generated, 4)
