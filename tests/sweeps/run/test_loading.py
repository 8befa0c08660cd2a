"""Engines of a sweep: one copy of the weights, and one KV pool of the target if they can share it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbatch import SamplingParams
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import FailedError, SpecbatchError, one_line, refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.sweeps.run import loading
from specbatch.sweeps.run.configurations import named
from specbatch.sweeps.run.loading import loaded, most_at_once, shares_of, with_concurrency

BASE = EngineConfig(
    model="toy", load_format="dummy", device="cpu", prefix_cache=False, page_size=4, max_running=4, max_model_len=64,
    speculation=Speculation("eagle3", draft="dummy"),
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4], [5, 6], [7] * 9, [8, 9]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def test_engines_that_run_in_turn_use_one_pool() -> None:
    """Also if the first one of the list cannot be built."""
    configs, failed = named(BASE, ["v2+piecewise", "baseline", "v1", "v2"]), dict[str, str]()
    with loaded(configs, None, failed=failed) as engines:
        assert [*engines] == ["baseline", "v1", "v2"]
        first, *others = (engine.parts.worker.decode_step.cache for engine in engines.values())  # type: ignore[attr-defined]
        assert all(other.keys is first.keys and other.values is first.values for other in others)
        assert len({engine.caps["kv_pages"] for engine in engines.values()}) == 1
        tokens = [
            [item.token_ids for item in engine.generate(PROMPTS, PARAMS)]
            for _ in range(2)
            for engine in engines.values()
        ]
    assert all(found == tokens[0] for found in tokens)


def test_a_group_that_is_loaded_again_has_the_engines_of_before() -> None:
    """A draft that could not be built then does not end the sweep of the others."""
    with loaded(named(BASE, ["baseline", "v1"]), None, failed={"v1": "too short"}) as engines:
        assert [*engines] == ["baseline"]


def test_engines_with_a_prefix_cache_have_pools_of_their_own() -> None:
    configs = named(replace(BASE, prefix_cache=True), ["baseline", "v2"])
    assert shares_of(configs) == [MemoryShare(0, 2), MemoryShare(1, 2)]
    with loaded(configs, None) as engines:
        first, other = (engine.parts.worker.decode_step.cache for engine in engines.values())  # type: ignore[attr-defined]
        assert other.keys is not first.keys


@pytest.mark.parametrize(("sizes", "pages"), [((80, 80), 80), ((80, 60), None)])
def test_pools_of_a_given_size(sizes: tuple[int, int], pages: int | None) -> None:
    configs = {str(index): replace(BASE, kv_pages=size) for index, size in enumerate(sizes)}
    expected = [MemoryShare(index, 2, pages=pages) for index in range(2)] if pages else [EXCLUSIVE] * 2
    assert shares_of(configs) == expected
    assert shares_of({"alone": BASE}) == [MemoryShare()]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FailedError("rank 1 ended by SIGKILL"), FailedError),
        (RuntimeError("CUDA error: an illegal memory access"), FailedError),
        (refuse("kv_pages", 9, "use 10"), SpecbatchError),
    ],
)
def test_where_no_engine_is_left_only_a_refusal_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[SpecbatchError]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(loading, "load_engine", fail)
    with (
        pytest.raises(SpecbatchError) as found,
        loaded({"alone": replace(BASE, speculation=Speculation())}, None, failed={}),
    ):
        pass
    assert (type(found.value), str(found.value)) == (kind, one_line(error))


def test_one_reason_for_all_configurations_is_said_once() -> None:
    """Reasons that differ, and those of some configurations, are logged by configuration."""
    plain, lines = replace(BASE, speculation=Speculation()), list[str]()
    damaged = replace(plain, model="nope")
    configs = dict.fromkeys(("baseline", "v1"), damaged)
    with pytest.raises(SpecbatchError, match="'nope'"), loaded(configs, lines.append, failed={}):
        pass
    assert not any(line.startswith(("baseline: model='nope'", "v1: model='nope'")) for line in lines)
    for more in ({"v2": replace(plain, model="other")}, {"v2": plain}):
        lines.clear()
        failed: dict[str, str] = {}
        try:
            with loaded(configs | more, lines.append, failed=failed):
                pass
        except SpecbatchError:
            assert len(failed) == 3, "an engine was built"
        assert [line.split(":")[0] for line in lines if ": model=" in line] == [*failed]


def test_max_running_is_that_of_the_concurrency() -> None:
    auto = replace(BASE, max_running="auto")
    assert with_concurrency(auto, 9).max_running == 9
    assert with_concurrency(replace(auto, data_parallel=4), 9).max_running == 3
    assert with_concurrency(BASE, 4) is BASE
    with pytest.raises(SpecbatchError, match=r"max_running=4: concurrency 9 on 2 replicas needs at least 5"):
        with_concurrency(replace(BASE, data_parallel=2), 9)


def test_most_at_once_is_what_all_configurations_plan() -> None:
    auto = replace(BASE, max_running="auto")
    assert most_at_once({"a": auto, "b": replace(auto, data_parallel=2)}, elsewhere=False) == 32  # on a CPU
    assert most_at_once({"a": auto, "b": BASE}, elsewhere=False) == 4
    assert most_at_once({"a": auto, "b": replace(BASE, max_running=40)}, elsewhere=True) == 40
    assert most_at_once({"a": auto}, elsewhere=True) == 32
