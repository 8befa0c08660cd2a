"""Log-probabilities of given continuations, computed by all replicas: each scores a part of the pairs at a time."""

from __future__ import annotations

from collections import Counter, deque

from specbatch.engine.scoring import Checked, Likelihood, OnScore
from specbatch.errors import ShortOfMemoryError, SpecbatchError
from specbatch.replicas.dispatcher import MOST_DEATHS
from specbatch.replicas.messages import Ended, Refused, Returned
from specbatch.replicas.pool import ReplicaPool

MOST_PAIRS = 64  # of a part
LOOK_S = 1.0  # between looks for replicas that are stuck


def score_on(pool: ReplicaPool, engine: int, pairs: list[Checked], on_score: OnScore) -> list[Likelihood]:
    """Score all pairs. Those of a replica that ends are scored by another; raises SpecbatchError if several end."""
    parts = deque(range(0, len(pairs), MOST_PAIRS))
    calls: dict[int, tuple[int, int]] = {}  # by ticket: replica, first pair
    deaths = Counter[int]()
    found: dict[int, Likelihood] = {}
    while len(found) < len(pairs):
        for number in pool.ready():
            while parts and sum(number == other for other, _ in calls.values()) < 2:
                first = parts.popleft()
                part = pairs[first : first + MOST_PAIRS]
                calls[pool.call(number, engine, "score", pairs=part)] = number, first
        for number, message in pool.receive(LOOK_S):
            match message:
                case Returned(ticket, values) if ticket in calls:
                    for index, value in enumerate(values, calls.pop(ticket)[1]):
                        found[index] = value
                        on_score(index, value)
                case Refused(error, _, int(ticket)) if ticket in calls:
                    kind = ShortOfMemoryError if isinstance(error, ShortOfMemoryError) else SpecbatchError
                    raise kind(f"of the pairs from {calls[ticket][1]} on: {error}")
                case Ended(reason):
                    for ticket, (other, first) in list(calls.items()):
                        if other == number:
                            del calls[ticket]
                            parts.appendleft(first)
                            deaths[first] += 1
                            if deaths[first] == MOST_DEATHS:
                                raise SpecbatchError(
                                    f"{MOST_DEATHS} replicas ended while they scored pairs {first} to "
                                    f"{min(first + MOST_PAIRS, len(pairs)) - 1}; the last: {reason}"
                                )
        pool.end_stuck({number for number, _ in calls.values()})
    return [found[index] for index in range(len(pairs))]
