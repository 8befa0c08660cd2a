"""Chooses how many tokens to draft, and for which requests, for `draft_tokens="auto"`. Host code only: no device, no
clock.

A step with N drafts emits E(N) = 1 + p_1 + p_1 p_2 + ... + p_1 .. p_N tokens per request on average, where p_j is the
share of drafts at position j that are accepted if all before them are; it depends on the length of the context
(`AcceptanceByContext`). The step takes t(N) seconds, which depends on the batch size and on the cached tokens of the
batch (`StepModel`). What is drafted has the most expected tokens per second. Where requests differ, it may be best that
only some of them draft.

Requests that draft nothing cost a drafter nothing: it does not run for them, and has to catch up before they draft
again. Nor does it have to run for prompts whose requests are not expected to draft. What catching up takes is divided
among the steps that a request is expected to run; what prompts take of a drafter, among the new tokens.

So a choice counts for longer than a step: what is compared are the steps in the middle of the tokens that are expected
next. While more requests join a batch, and the batch is not expected to draft once they have, those that would have to
catch up draft nothing. The drafter runs for all prompts until acceptance is known, and later wherever drafting might
pay.

Both sides are measured: acceptance and the tokens that were kept of it, and the times of the run's steps, which correct
those measured at start. Rarely, what is not used is probed. Where nothing is drafted, in turn a single step in which
all requests draft shows the time of that, and a few that draft for some steps what is accepted. Else a single step
drafts another number of tokens, in turn the most, which shows the acceptance of all positions, and the next best, whose
time may have changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from specbatch.config.draft_shape import AUTO
from specbatch.engine.schedule.acceptance_by_context import AcceptanceByContext, range_of
from specbatch.engine.schedule.step_model import Kind, StepModel

MARGIN = 1.01  # how much better another choice must be
# A cost of drafting that no step shows: requests that began together end at different times, so that batches shrink and
# prompts come in more passes.
APART = 1.01
SPLIT = 1.02  # how much better than the best common length a choice must be in which only some requests draft
EVERY = 8  # steps after which such choices are compared again, if none is in use
PROBES = 0.004  # share of the time that probes may cost
MAY = 0.95  # of the speed without drafts: then the drafter runs for prompts, as catching up later takes much longer
AHEAD = 512  # expected tokens of a request, at most, in the middle of which the cached ones count: a choice should last
SOON = 4  # tokens that a request is expected to generate before others join the batch
REST = 64  # fewest steps between probes
NEAR = 0.85  # lengths with less than this share of the best speed are not probed for their time
PROBED, PROBE_STEPS = 4, 16  # requests that draft in a probe where none does, and for how many steps
KEPT = 1 / 64  # weight of a step in the share of emitted tokens that is kept
RATE = 1 / 1024  # the same in the number of prompt tokens for each new token


def probe_size(rows: int) -> int:
    """How many of so many requests draft in a probe."""
    return min(rows, PROBED)


class Requests(NamedTuple):
    """The requests of a step.

    contexts  tokens of each
    missing   of these, tokens that the drafter has to catch up with before the request drafts
    left      tokens that it is expected to generate yet, at least 1
    shared    of all contexts together, tokens that attention need not read, because requests share them
    expected  how many requests the batch has when those that wait have joined it; 0: as many as now
    """

    contexts: Sequence[int]
    missing: Sequence[int]
    left: Sequence[int]
    shared: int = 0
    expected: int = 0


class Choice(NamedTuple):
    """What a step drafts: so many tokens for each of `members`, which are indices of its requests; None: for all.

    kind, expected_s  for `StepModel.observe`
    probing           whether it is not the best choice, but shows what others would do
    timing            of a probe: it shows the time of a step only, so that the drafter need not catch up before it
    budget            rows per request of the verify, if that is chosen; see `VerifyRows`
    """

    num_drafts: int
    members: Sequence[int] | None = None
    kind: Kind = (0, 0, 0)
    expected_s: float = 0.0
    probing: bool = False
    timing: bool = False
    budget: float | None = None


class Option(NamedTuple):
    """A choice that is compared."""

    speed: float  # expected tokens per second
    num_drafts: int
    members: Sequence[int] | None = None  # None: all

    @property
    def form(self) -> tuple[int, int | None]:
        return self.num_drafts, None if self.members is None else len(self.members)


_Probe = tuple[int, Sequence[int] | None, bool]  # of a choice: drafts, members, and whether it is for timing


NONE = 0, None  # the form of no drafts


class DraftLength:
    """Chooses one of `draft_lengths` for each decode step; with a single one there is nothing to choose or to learn.

    model         times of steps, filled in at start
    catch_up_s    seconds that catching up takes for each missing token; 0: the drafter misses nothing
    prompt_s      seconds that the drafter takes for each token of a prompt
    idle_tokens   tokens that a request misses after a single step without drafts
    can_split     whether some requests of a step may draft while others do not
    chooses_rows  whether it chooses verify budgets
    """

    chooses_rows = False

    def __init__(self, draft_lengths: tuple[int, ...], buckets: list[int]) -> None:
        """draft_lengths: ascending; buckets: batch sizes, ascending, the last of which holds every batch."""
        self.draft_lengths = draft_lengths
        self.buckets = buckets
        self.model = StepModel(buckets, {size: dict.fromkeys(draft_lengths, 1.0) for size in buckets})
        self.catch_up_s = 0.0
        self.prompt_s = 0.0
        self.idle_tokens = 0
        self.can_split = False
        self.acceptance = AcceptanceByContext(draft_lengths[-1])
        self._most = draft_lengths[-1]
        self._current: dict[int, tuple[int, int | None]] = {}  # by bucket: the form of the last option
        self._kept = {False: 1.0, True: 1.0}  # of the emitted tokens of steps without drafts, and with
        self._prompt_tokens = self._new_tokens = 0.0  # of late
        self._has_ended = False
        self._saved = 0.0  # seconds that a probe may cost
        self._rested = 0
        self._longest_next = True
        self._probe_left = 0  # steps of a probe in which a few requests draft
        self._times_next = True
        self._after_timing = False
        self._until_split = 0

    @property
    def is_auto(self) -> bool:
        return len(self.draft_lengths) > 1

    def bucket(self, rows: int) -> int:
        return self.model.bucket(rows)

    def form(self, length: int) -> tuple[int, float | None]:
        """What a step of that length drafts and verifies: `num_drafts` and `budget` of its `Choice`."""
        return length, None

    # -- choice -----------------------------------------------------------------------------------------------

    def choose(self, rows: int, describe: Callable[[], Requests]) -> Choice:
        """What a step of so many requests drafts."""
        if not self.is_auto:
            return Choice(self._most)
        requests = describe()
        cached, bucket = max(sum(requests.contexts) - requests.shared, 0), self.bucket(rows)
        grows = self.bucket(max(requests.expected, rows)) > bucket
        if grows and any(requests.missing) and not self._may_draft(requests.expected, requests.contexts, requests.left):
            requests = requests._replace(left=[SOON] * rows)  # what it catches up with is of use until then only
        ahead = cached + sum(min(left, AHEAD) for left in requests.left) // 2
        options = self._options(requests, rows, ahead)
        best = max(options.values(), key=lambda option: option.speed)
        current = options.get(self._current.get(bucket, NONE), best)
        if best.speed > MARGIN * current.speed:
            current = best
        self._current[bucket] = current.form
        seconds = self.model.seconds(self._kind(rows, current.num_drafts, current.members), cached)
        self._saved += PROBES * seconds
        self._rested += 1
        probe = self._probe(requests, rows, cached, current, options)
        num_drafts, members, timing = probe or (current.num_drafts, current.members, False)
        if self._after_timing:  # until its result is known, what the drafter misses is not
            probe, num_drafts, members, timing = None, 0, None, False
        self._after_timing = timing
        kind, (num_drafts, budget) = self._kind(rows, num_drafts, members), self.form(num_drafts)
        return Choice(num_drafts, members, kind, self.model.expected(kind, cached), probe is not None, timing, budget)

    def drafts_prompts(self, rows: int, contexts: Sequence[int], left: Sequence[int], tokens: int) -> bool:
        """Whether the drafter runs for `tokens` of prompts as soon as they are computed: whether their requests, whose
        contexts and expected tokens are given, might draft in a batch of so many, and as long as acceptance is not
        known."""
        self._prompt_tokens += tokens if self._has_ended else 0  # later prompts come as answers end
        if not self.is_auto or not self.catch_up_s or not self._is_known:
            return True
        return self._may_draft(rows, contexts, left)

    def _may_draft(self, rows: int, contexts: Sequence[int], left: Sequence[int]) -> bool:
        """Whether drafts might pay in a batch of so many requests like these, in the middle of what is left of them."""
        if self._current.get(self.bucket(rows), NONE)[0]:
            return True
        middle = [context + more // 2 for context, more in zip(contexts, left, strict=True)]
        contexts = [middle[index % len(middle)] for index in range(rows)]
        requests = Requests(contexts, [0] * rows, [1] * rows)
        plain, *others = self._options(requests, rows, sum(contexts), splits=False).values()
        return max(option.speed for option in others) > MAY * plain.speed

    def _options(
        self, requests: Requests, rows: int, cached: int, *, splits: bool = True
    ) -> dict[tuple[int, int | None], Option]:
        """By form: one common length each, and where requests differ the best in which only some of them draft."""
        places = [context.bit_length() - 1 for context in requests.contexts]  # as `range_of`
        counts = Counter(places)
        lags: dict[int, float] = defaultdict(float)  # tokens to catch up with, per token that is expected yet
        if any(requests.missing):
            for place, missing, left in zip(places, requests.missing, requests.left, strict=True):
                lags[place] += missing / left
        prompts = self.prompt_s * self._prompt_tokens / max(self._new_tokens, 1.0)  # seconds per new token
        found = []
        for drafts in self.draft_lengths:
            if not drafts:
                found.append(Option(rows * self._kept[False] / self.model.seconds(self._kind(rows, 0), cached), 0))
                continue
            emitted = {place: self._emitted(rows, place, drafts) for place in counts}
            tokens = sum(count * emitted[place] for place, count in counts.items())
            late = self.catch_up_s * sum(lag * emitted[place] for place, lag in lags.items())
            seconds = self.model.seconds(self._kind(rows, drafts), cached) * APART + late + tokens * prompts
            found.append(Option(tokens * self._kept[True] / seconds, drafts))
        is_split = self._current.get(self.bucket(rows), NONE)[1] is not None
        self._until_split -= 1
        if splits and self.can_split and (lags or len(counts) > 1) and (is_split or self._until_split <= 0):
            self._until_split = EVERY
            found += self._split_options(requests, places, cached, max(found, key=lambda option: option.speed).speed)
        return {option.form: option for option in found}

    def _emitted(self, rows: int, place: int, drafts: int) -> float:
        """Tokens that a request of that range of contexts is expected to emit in a step of so many requests."""
        return self.acceptance.emitted(place)[drafts]

    @property
    def _is_known(self) -> bool:
        """Whether acceptance is no longer a guess."""
        return self.acceptance.is_known

    def _split_options(self, requests: Requests, places: Sequence[int], cached: int, best: float) -> Iterable[Option]:
        """For each length the best option in which some requests draft, at least as many as in a probe; that in use,
        too."""
        rows = len(places)
        used = self._current.get(self.bucket(rows))
        for drafts in self.draft_lengths[1:]:
            gains = [self.acceptance.emitted(place)[drafts] - 1 for place in places]
            late = [
                self.catch_up_s * missing / left * (gain + 1)
                for missing, left, gain in zip(requests.missing, requests.left, gains, strict=True)
            ]
            worth = [gain - best * seconds for gain, seconds in zip(gains, late, strict=True)]
            order = sorted(range(rows), key=worth.__getitem__, reverse=True)
            gained = list(accumulate(gains[index] for index in order))
            lost = list(accumulate(late[index] for index in order))
            options = []
            size = PROBED
            while size < rows:
                seconds = self.model.seconds(self._kind(rows, drafts, order[:size]), cached) * APART + lost[size - 1]
                option = Option((rows + gained[size - 1]) * self._kept[True] / seconds, drafts, order[:size])
                if option.form == used:
                    yield option
                elif option.speed > SPLIT * best:
                    options.append(option)
                size *= 2
            if options:
                yield max(options, key=lambda option: option.speed)

    def _kind(self, rows: int, drafts: int, members: Sequence[int] | None = None) -> Kind:
        return self.model.kind(rows, drafts, None if members is None or len(members) == rows else len(members))

    # -- probes -----------------------------------------------------------------------------------------------

    def _probe(
        self,
        requests: Requests,
        rows: int,
        cached: int,
        current: Option,
        options: dict[tuple[int, int | None], Option],
    ) -> _Probe | None:
        """What a step drafts that probes; None where it is not time for one."""
        if not current.num_drafts:
            may_time = self.catch_up_s and not self.chooses_rows  # what was accepted counts, whatever was missing
            if may_time and self._times_next and not self._probe_left and rows > PROBED:
                return self._probe_time(requests, rows, cached)
            if self.can_split or (self.catch_up_s and rows <= PROBED):
                return self._probe_few(requests, rows, cached)
        self._probe_left = 0
        if self._rested < REST or current.members is not None:
            return None
        common = [option for option in options.values() if option.members is None]
        drafts = self._most
        if current.num_drafts == self._most or not self._longest_next:
            others = [option for option in common if option.num_drafts != current.num_drafts]
            next_best = max(others, key=lambda option: option.speed)
            if next_best.speed < NEAR * current.speed:
                self._rested, self._longest_next = 0, True
                return None
            drafts = next_best.num_drafts
        [probed] = [option for option in common if option.num_drafts == drafts]
        seconds = self.model.seconds(self._kind(rows, drafts), cached)
        loss = seconds * max(1 - probed.speed / current.speed, 0.0)
        loss += self.catch_up_s * (sum(requests.missing) if drafts else self.idle_tokens * rows)
        if self._saved < loss:
            return None
        self._saved, self._rested, self._longest_next, self._times_next = 0.0, 0, not self._longest_next, True
        return drafts, None, False

    def _probe_time(self, requests: Requests, rows: int, cached: int) -> _Probe | None:
        """Where nothing is drafted, a step in which all draft shows its time, and nothing else."""
        if self._rested < REST:
            return None
        ready = requests._replace(missing=[0] * rows)
        found = sorted(self._options(ready, rows, cached, splits=False).values(), key=lambda option: option.speed)
        plain = next(option for option in found if not option.num_drafts)
        best = [option for option in found if option.num_drafts][-1]
        if best.speed < NEAR * plain.speed:
            self._times_next = False
            return None
        seconds = self.model.seconds(self._kind(rows, best.num_drafts), cached)
        if self._saved < seconds - self.model.seconds(self._kind(rows, 0), cached):
            return None
        self._saved, self._rested, self._times_next = 0.0, 0, False
        return best.num_drafts, None, True

    def _probe_few(self, requests: Requests, rows: int, cached: int) -> _Probe | None:
        """Where nothing is drafted, those requests draft for which the drafter has least to catch up with."""
        size = probe_size(rows)
        if self._probe_left:
            self._probe_left -= 1
            members = [index for index, missing in enumerate(requests.missing) if not missing][:size]
            if len(members) == size:
                return self._most, members, False
            self._probe_left = 0
        if self._rested < REST:
            return None
        members = sorted(range(rows), key=requests.missing.__getitem__)[:size]
        plain = self.model.seconds(self._kind(rows, 0), cached)
        loss = PROBE_STEPS * (self.model.seconds(self._kind(rows, self._most, members), cached) - plain)
        loss += self.catch_up_s * sum(requests.missing[index] for index in members)
        if self._saved < loss:
            return None
        self._saved, self._rested, self._probe_left, self._times_next = 0.0, 0, PROBE_STEPS - 1, True
        return self._most, members, False

    # -- what steps show --------------------------------------------------------------------------------------

    def learn(
        self,
        choice: Choice,
        accepted: Iterable[tuple[int, int]],
        emitted: int,
        kept: int,
        ended: int,
        values: Sequence[Sequence[float]] = (),
    ) -> None:
        """Observe a step: of each request that drafted its context and how many drafts it accepted; of all requests
        the emitted tokens, those of them that were kept, and how many of the requests ended. values: for
        `VerifyRows`."""
        self._learn_accepted(choice, accepted, values)
        self._has_ended |= ended > 0
        self._prompt_tokens *= 1 - RATE
        self._new_tokens += kept - RATE * self._new_tokens
        if emitted and not choice.probing:
            drafted = choice.num_drafts > 0
            self._kept[drafted] += KEPT * (kept / emitted - self._kept[drafted])

    def _learn_accepted(
        self, choice: Choice, accepted: Iterable[tuple[int, int]], values: Sequence[Sequence[float]]
    ) -> None:
        drafts = 0 if choice.timing else choice.num_drafts
        self.acceptance.learn(drafts, ((range_of(context), count) for context, count in accepted))

    def took(self, choice: Choice, seconds: float) -> None:
        """Observe the time of a step."""
        self.model.observe(choice.kind, choice.expected_s, seconds, probing=choice.probing)


def announced(draft_lengths: tuple[int, ...]) -> str:
    return f"draft tokens: {AUTO}, one of {', '.join(map(str, draft_lengths))}"
