"""Models of simulated acceptance: the probability that each draft of a verify is accepted.

A verify accepts its first drafts up to the first rejection, so a model is the conditional probability p_j that draft j
is accepted if all before it are. Then k drafts have the mean accept length 1 + p_1 + p_1 p_2 + ... + p_1 .. p_k, bonus
token included: fewer drafts of the same model are accepted as often, position by position.

Acceptance may fall as the context grows: a profile by context has probabilities for some lengths. Between these they
are linear in the logarithm of the length, beyond them constant.

A single mean accept length gives the geometric model, with one p for all positions. A profile has a p for each: written
down, counted in a run, or from a golden acceptance curve, which lists the mean accept length for numbers of drafts as
SemiAnalysis' InferenceX publishes them. Between the numbers that a curve lists, p is constant. Each length of a
measured curve is of another run, so that the curve may fall, or rise faster than p = 1 allows: then numbers before are
left out as far as needed, and the mean of the number that is drafted is always that of the curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any

from specbatch.config.draft_shape import MOST
from specbatch.config.settings import is_number, is_whole
from specbatch.errors import counted, refuse
from specbatch.files.text_files import read_json, read_yaml

SETTING = "simulate_accept"
FORMS = (
    "name a JSON file of conditional probabilities, a golden acceptance curve (.json, .yaml), the folder of a run, or "
    "write probabilities such as 0.8,0.7,0.6"
)
_YAML = (".yaml", ".yml")
_DRAFTS = range(1, MOST + 1)
_ROUNDED = 1e-5  # in an accept length


@dataclass(frozen=True)
class AcceptanceProfile:
    """Conditional acceptance probabilities by draft position, from the first draft on.

    name   of the model, as tables show it
    curve  numbers of drafts with their mean accept lengths, if the probabilities follow from these; those of fewer
           drafts are then fitted to the first of them
    by_context  by length of the context in tokens, rising, if they depend on it; `conditional` is that of the shortest
    """

    name: str
    conditional: tuple[float, ...]
    curve: tuple[tuple[int, float], ...] = ()
    by_context: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def __str__(self) -> str:
        return self.name

    def accept_length(self, drafted: int | None = None) -> float:
        """Mean tokens per verify with so many drafts (default: all positions), bonus token included."""
        drafts: float = sum(accumulate(self.conditional[:drafted], mul))
        return 1.0 + drafts

    def of_drafts(self, count: int) -> AcceptanceProfile:
        """The first `count` positions. None is reached after a draft that is never accepted, so their probability is 0.
        Refused: a profile that has fewer, and values that are no probabilities."""
        if self.by_context:
            parts = [
                (length, replace(self, conditional=p, by_context=()).of_drafts(count).conditional)
                for length, p in self.by_context
            ]
            return replace(self, conditional=parts[0][1], by_context=tuple(parts))
        have = len(self.conditional)
        if have < count and not (have and self.conditional[-1] == 0):
            works = f"has {counted(have, 'position')}, but {counted(count, 'token')} would be drafted in a row"
            raise refuse(SETTING, self.name, f"{works}; draft at most {have}, or use a longer profile")
        conditional = self.conditional[:count]
        if self.curve and count <= have:
            last = min(drafted for drafted, _ in self.curve if drafted >= count)
            conditional = _fitted([point for point in self.curve if point[0] <= last])[:count]
        for place, p in enumerate(conditional):
            if not is_number(p) or not 0 <= p <= 1:
                fewer = f", or draft at most {place}" if place else ""
                works = f"the probability of draft {place + 1} is {p:.6g}; use 0 to 1{fewer}"
                raise refuse(SETTING, self.name, works)
        return AcceptanceProfile(self.name, conditional + (0.0,) * (count - have))

    def at(self, context: float) -> tuple[float, ...]:
        """The probabilities at a context of so many tokens."""
        if not self.by_context:
            return self.conditional
        after = next((place for place, (length, _) in enumerate(self.by_context) if length >= context), None)
        if not after:
            return self.by_context[-1 if after is None else 0][1]
        (short, ps), (long, qs) = self.by_context[after - 1 : after + 1]
        share = math.log(context / short) / math.log(long / short)
        return tuple(p + share * (q - p) for p, q in zip(ps, qs, strict=True))


def geometric(mean: float, count: int) -> AcceptanceProfile:
    """One conditional probability for all drafts, such that `count` drafts have this mean accept length, 1 to
    count + 1."""
    return AcceptanceProfile(f"geometric, mean {mean:g}", (_constant(mean - 1, count),) * count)


def whole_lengths(mean: float, count: int) -> AcceptanceProfile:
    """Accept lengths that are the whole number below or above the mean, at random: no head accepts like that. Earlier
    versions simulated it, as SGLang (match-expected) and vLLM (synthetic) do by default."""
    sure = (min(max(mean - 1 - place, 0.0), 1.0) for place in range(count))
    return AcceptanceProfile(f"floor or ceiling of {mean:g}", tuple(sure))


def from_accept_lengths(name: str, lengths: Mapping[int, float]) -> AcceptanceProfile:
    """The profile of a curve: mean accept lengths by number of drafts, at least 1. See `_fitted`."""
    curve = tuple(sorted(lengths.items()))
    return AcceptanceProfile(name, _fitted(curve), curve)


def from_counts(name: str, tried: Sequence[int], accepted: Sequence[int]) -> AcceptanceProfile:
    """The shares that were accepted, as far as drafts were tried."""
    known = next((place for place, count in enumerate(tried) if not count), len(tried))
    return AcceptanceProfile(name, tuple(accepted[place] / tried[place] for place in range(known)))


def read_profile(text: str) -> AcceptanceProfile:
    """The profile that `text` describes: probabilities with commas, or a path. FILE#NAME is one of several curves of a
    file, such as FILE#thinking_on."""
    numbers = [_number(item) for item in text.split(",")]
    if all(number is not None for number in numbers):
        return AcceptanceProfile(text, tuple(number for number in numbers if number is not None))
    path, curve = Path(text), ""
    if not path.exists() and "#" in text:
        place, _, curve = text.rpartition("#")
        path = Path(place)
    if path.is_dir():
        path /= "record.json"
    found = read_yaml(SETTING, path, FORMS) if path.suffix in _YAML else read_json(SETTING, path, FORMS)
    is_by_context = isinstance(found, dict) and bool(found) and all(isinstance(p, list) for p in found.values())
    if isinstance(found, list) or (is_by_context and "conditional" not in found):
        found = {"conditional": found}
    if not isinstance(found, dict):
        raise refuse(SETTING, text, f"is not a profile; {FORMS}")
    if "conditional" in found:
        name, listed = str(found.get("name", text)), found["conditional"]
        if not isinstance(listed, dict):
            return AcceptanceProfile(name, _conditional(text, listed))
        contexts = _contexts(text, listed)
        return AcceptanceProfile(name, contexts[0][1], by_context=contexts)
    if "counters" in found:
        return _of_record(text, found["counters"])
    return _of_curves(text, curve, dict(_curves(found)))


def _constant(total: float, count: int) -> float:
    """The p with p + p^2 + ... + p^count = total; for a total that no probability has, a number outside of 0 to 1."""
    if not 0 < total < count:
        return total / count
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**power for power in range(1, count + 1)) < total:
            low = middle
        else:
            high = middle
    return high


def _fitted(curve: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Conditional probabilities that have the accept length of the last point of a rising curve, and of as many points
    before it as probabilities can have; constant between these."""
    kept = [(0, 1.0, 1.0, 0.0)]  # drafts, accept length, probability that all of them are accepted, p of the last
    for drafted, length in curve:
        while True:
            before, shorter, reached, _ = kept[-1]
            count, more = drafted - before, length - shorter
            more = count * reached if 0 < more - count * reached < _ROUNDED else 0.0 if -_ROUNDED < more < 0 else more
            p = _constant(more / reached, count) if reached else 0.0 if more == 0 else math.inf
            if 0 <= p <= 1 or len(kept) == 1:
                break
            kept.pop()
        kept.append((drafted, length, reached * p**count, p))
    return tuple(p for (before, *_), (drafted, *_, p) in pairwise(kept) for _ in range(drafted - before))


def _conditional(text: str, found: Any) -> tuple[float, ...]:
    if not isinstance(found, list) or not found or not all(map(is_number, found)):
        raise refuse(SETTING, text, '"conditional" must list probabilities, one per draft position')
    return tuple(map(float, found))


def _contexts(text: str, found: Mapping[Any, Any]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    lengths = [_number(key) for key in found]
    if not lengths or not all(length is not None and length >= 1 and length == int(length) for length in lengths):
        works = f'"conditional" by context needs lengths in tokens such as "512", but has {", ".join(map(repr, found))}'
        raise refuse(SETTING, text, works)
    rows = sorted((int(key), _conditional(text, values)) for key, values in found.items())
    if len({len(values) for _, values in rows}) > 1:
        raise refuse(SETTING, text, "each context must list as many probabilities")
    return tuple(rows)


def _of_record(text: str, counters: Any) -> AcceptanceProfile:
    found = counters.get("acceptance") if isinstance(counters, dict) else None
    tried, accepted = (found.get(key) if isinstance(found, dict) else None for key in ("tried", "accepted"))
    if not (
        isinstance(tried, list)
        and isinstance(accepted, list)
        and len(tried) == len(accepted)
        and all(map(is_whole, tried + accepted))
        and any(tried)
    ):
        raise refuse(SETTING, text, "is the record of a run that drafted nothing; name a run with speculation")
    return from_counts(text, tried, accepted)


def _curves(found: Mapping[Any, Any], name: str = "") -> Iterator[tuple[str, dict[int, float]]]:
    """The curves in nested tables, by their path: tables from numbers of drafts to accept lengths."""
    values = {_number(key): _number(value) for key, value in found.items() if not isinstance(value, dict)}
    curve = {int(key): value for key, value in values.items() if key in _DRAFTS and key and value is not None}
    if curve and len(curve) == len(found):
        yield name, curve
        return
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _curves(value, f"{name}/{key}".lstrip("/"))


def _of_curves(text: str, wanted: str, curves: Mapping[str, Mapping[int, float]]) -> AcceptanceProfile:
    matching = [name for name in curves if not wanted or wanted in (name, name.rpartition("/")[2])]
    if not curves:
        raise refuse(SETTING, text, f"is not a profile; {FORMS}")
    if len(matching) != 1:
        listed = ", ".join(f"#{name}" for name in curves)
        raise refuse(SETTING, text, f"has {counted(len(curves), 'curve')}; add the name of one to the file: {listed}")
    return from_accept_lengths(text, curves[matching[0]])


def _number(value: Any) -> float | None:
    try:
        found = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return found if found is not None and math.isfinite(found) else None
