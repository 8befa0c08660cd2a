"""Which replica runs which prompt, against a model that plays replicas ending at any time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specbatch import SamplingParams
from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.engine.requests.submissions import Submission
from specbatch.replicas.dispatcher import MOST_DEATHS, Dispatcher, Item

ROOM = 4


def item(index: int, sample: int = 0) -> Item:
    return Item(Submission(index, sample, EmbeddedPrompt([1]), SamplingParams(), None), 0.0)


@given(st.data(), st.integers(1, 3), st.integers(0, 12), st.sets(st.integers(0, 11), max_size=2))
def test_prompts_end_once_and_only_those_that_end_replicas_are_given_up(
    data: st.DataObject, replicas: int, prompts: int, fatal: set[int]
) -> None:
    """Fatal prompts end their replica at some time; one that is not fatal may meet them, and must survive that."""
    work = Dispatcher(ROOM)
    for index in range(prompts):
        work.add(item(index))
    running: dict[int, list[int]] = {}
    numbers, ended, given_up = replicas, [], []
    alive = list(range(replicas))
    while work.unfinished:
        for number, one in work.assign({number: place for place, number in enumerate(alive)}):
            running.setdefault(number, []).append(one.submission.index)
            assert len(running[number]) <= ROOM
            if len(one.deaths) == MOST_DEATHS - 1:  # it runs alone, and where it has not run
                assert len(running[number]) == 1
                assert alive.index(number) not in one.deaths or {*range(replicas)} == {*one.deaths}
        busy = [number for number in alive if running.get(number)]
        assert busy  # else nothing would ever end
        number = data.draw(st.sampled_from(busy))
        mortal = [index for index in running[number] if index in fatal]
        index = data.draw(st.sampled_from(running[number]))
        if mortal and (index in fatal or data.draw(st.booleans())):
            given_up += [one.submission.index for one in work.lose(number)]
            del running[number]
            alive[alive.index(number)] = numbers
            numbers += 1
        elif index not in fatal:
            running[number].remove(index)
            assert work.finish(number, (index, 0)) is not None
            ended.append(index)
    assert sorted(ended) == sorted(set(range(prompts)) - fatal)
    assert sorted(given_up) == sorted(fatal & set(range(prompts)))


def test_prompts_are_spread_and_samples_stay_together() -> None:
    work = Dispatcher(ROOM)
    for index, sample in ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0)):
        work.add(item(index, sample))
    places = {one.key: number for number, one in work.assign({7: 0, 8: 1})}
    assert {places[0, sample] for sample in range(3)} == {7}
    assert [places[index, 0] for index in (1, 2, 3)] == [8, 8, 8]
    assert work.finish(8, (0, 0)) is None  # it is on the other one
    assert work.finish(7, (0, 0)) is not None
