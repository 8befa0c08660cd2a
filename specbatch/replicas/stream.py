"""A stream of prompts on the replicas of a data-parallel engine, from submission to completion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.engine.requests.submissions import Submission
from specbatch.replicas.dispatcher import MOST_DEATHS, Dispatcher, Item
from specbatch.replicas.messages import Abort, Begin, Completed, End, Ended, Submit
from specbatch.replicas.pool import ReplicaPool


class ReplicaStream:
    """A stream of prompts on the replicas of a pool."""

    def __init__(self, number: int, pool: ReplicaPool, engine: int, room: int) -> None:
        """room: the most prompts that a replica has at a time."""
        self._number, self._pool, self._engine = number, pool, engine
        self._prompts = Dispatcher(room)
        self._begun: dict[int, int] = {}  # replicas, with the number of aborts that they know

    @property
    def unfinished(self) -> int:
        return self._prompts.unfinished

    def add(self, submission: Submission, arrived: float) -> None:
        prompt = submission.prompt
        if prompt.embeddings:  # a replica does not see the GPUs of this process
            on_host = {start: values.cpu() for start, values in prompt.embeddings.items()}
            submission = replace(submission, prompt=EmbeddedPrompt(prompt.token_ids, on_host))
        self._prompts.add(Item(submission, arrived))

    def dispatch(self, aborts: Sequence[int | str]) -> None:
        """Send waiting prompts to replicas with room, and aborts to all of them."""
        ready = self._pool.ready()
        for number in ready:
            if number not in self._begun:
                self._pool.send(number, Begin(self._number, self._engine))
            for name in aborts[self._begun.get(number, 0) :]:
                self._pool.send(number, Abort(self._number, name))
            self._begun[number] = len(aborts)
        batches: dict[int, list[tuple[Submission, float]]] = {}
        now = time.perf_counter()
        for number, item in self._prompts.assign(ready):
            batches.setdefault(number, []).append((item.submission, now - item.arrived))
        for number, items in batches.items():
            self._pool.send(number, Submit(self._number, items))

    def receive(self, timeout: float) -> Iterator[tuple[Completion, float]]:
        """Wait up to `timeout` seconds for completions. Yields each with the time at which its prompt arrived."""
        for number, message in self._pool.receive(timeout):
            if isinstance(message, Completed) and message.stream == self._number:
                done = message.completion
                item = self._prompts.finish(number, (done.index, done.sample))
                if item is not None:
                    yield replace(done, prompt_token_ids=list(item.submission.prompt.token_ids)), item.arrived
            elif isinstance(message, Ended):
                self._begun.pop(number, None)
                for item in self._prompts.lose(number, blames=not message.smaller):
                    yield _given_up(item, message.reason), item.arrived
        self._pool.end_stuck(self._prompts.busy)

    def end(self, *, drop: bool) -> None:
        """drop: what is unfinished is dropped."""
        for number in self._begun:
            self._pool.send(number, End(self._number, drop))


def _given_up(item: Item, reason: str) -> Completion:
    """The completion of a prompt that ended too many replicas."""
    submission, now = item.submission, time.perf_counter()
    tokens = list(submission.prompt.token_ids)
    waited = now - item.arrived
    return Completion(
        index=submission.index,
        prompt_token_ids=tokens,
        token_ids=[],
        text="",
        finish_reason="error",
        metrics=RequestMetrics(prompt_tokens=len(tokens), e2e_s=waited, queue_s=waited),
        error=f"{MOST_DEATHS} replicas ended while they ran it; the last: {reason}",
        sample=submission.sample,
        request_id=submission.request_id,
        seed=submission.params.seed,
    )
