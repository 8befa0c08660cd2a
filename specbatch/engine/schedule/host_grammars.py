"""What grammars on the host say of the requests of a pass: which tokens may follow their answers, and their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbatch.engine.device.host_masks import MaskUpload, Paths, Replaced
from specbatch.engine.schedule.plans import ScheduledRequest

if TYPE_CHECKING:
    from specbatch.grammar.host_matcher import HostMatcher


def host_masks(
    requests: Sequence[ScheduledRequest],
    drafts: Sequence[list[int]] = (),
    ancestors: Sequence[list[int]] | None = None,
) -> MaskUpload | None:
    """What grammars on the host allow after the tokens of requests, and after each draft; None if there are none.

    drafts: of all requests of a decode step, those that count; ancestors: see `Proposal`, of a tree."""
    matchers = _matchers(requests)
    if not matchers:
        return None
    from specbatch.grammar.host_matcher import masks

    places = [place for place, _ in matchers]
    given = [drafts[place] if drafts else [] for place in places]
    parents = None if ancestors is None else [_parents(ancestors[place], len(drafts[place])) for place in places]
    return MaskUpload(places, masks([matcher for _, matcher in matchers], given, parents))


class HostDrafting:
    """Answers what a decode step asks while it drafts, see `HostAnswers`."""

    def __init__(self, requests: Sequence[ScheduledRequest]) -> None:
        """requests: of the step, some of which have such a grammar."""
        self._matchers = _matchers(requests)

    def masks(self, paths: Paths) -> MaskUpload:
        from specbatch.grammar.host_matcher import masks_after

        places = [place for place, _ in self._matchers]
        return MaskUpload(places, masks_after([one for _, one in self._matchers], [paths[place] for place in places]))

    def replaced(self, drafts: list[list[int]], drafted: list[int]) -> Replaced:
        for place, matcher in self._matchers:
            found = matcher.replace(drafts[place], drafted[place])
            drafts[place][: len(found)] = found
            drafted[place] = len(found)
        return drafts, drafted


def _matchers(requests: Sequence[ScheduledRequest]) -> list[tuple[int, HostMatcher]]:
    """The matchers, after the tokens of their requests, and the places of these."""
    found = [(place, item.request.matcher) for place, item in enumerate(requests) if item.request.matcher]
    for place, matcher in found:
        matcher.follow(requests[place].request.output)
    return found


def _parents(ancestors: Sequence[int], drafts: int) -> list[int]:
    """Of the first drafts of a tree the node before each: the last one that it sees beside itself."""
    return [(ancestors[node] & ~(1 << node)).bit_length() - 1 for node in range(1, drafts + 1)]
