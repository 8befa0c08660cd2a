"""What each configuration is compared with, from settings and from records."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.records.bases import bases_of, bases_sentence
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.run.configurations import named

BASE = EngineConfig(speculation=Speculation("ngram"))
ALL = ("v1", "baseline", "v2", "baseline+piecewise", "v2+piecewise")


def records_of(configs: dict[str, EngineConfig], **more: object) -> dict[str, RunRecord]:
    return {name: RunRecord(asdict(config) | more, {}, {}, {}, []) for name, config in configs.items()}


@pytest.mark.parametrize(
    ("names", "bases"),
    [
        (ALL, ["baseline", "baseline", "baseline", "baseline", "baseline+piecewise"]),
        (("baseline", "v2+piecewise"), ["baseline", "baseline"]),
        (("v1", "v2"), ["v1", "v1"]),
        (("v1", "baseline+piecewise", "v2+piecewise"), ["baseline+piecewise"] * 3),  # no two are over each other
        (("v2",), ["v2"]),
    ],
)
def test_speculation_is_compared_with_none_and_the_same_prefill_graphs(names, bases) -> None:
    configs = named(BASE, names)
    assert bases_of(configs) == bases_of(records_of(configs)) == dict(zip(names, bases, strict=True))


def test_baseline_comes_before_others_with_the_same_prefill_graphs() -> None:
    plain = named(BASE, ("baseline",))
    assert bases_of({"plain": plain["baseline"]} | plain | named(BASE, ("v1",)))["v1"] == "baseline"


def test_of_several_with_the_same_prefill_graphs_the_first_is_the_base() -> None:
    plain, drafting = (named(BASE, (name,))[name] for name in ("baseline+piecewise", "v2+piecewise"))
    configs = named(BASE, ("baseline",)) | {"first": plain, "second": plain, "drafts": drafting}
    assert bases_of(configs)["drafts"] == bases_of(records_of(configs))["drafts"] == "first"


def test_speculation_is_compared_with_none_on_as_many_devices() -> None:
    configs = {
        f"{name} {setting}={number}": replace(config, **{setting: number})
        for name, config in named(BASE, ("baseline", "v1")).items()
        for setting in ("tensor_parallel", "data_parallel")
        for number in (1, 2)
    }
    found = bases_of(configs)
    assert found == bases_of(records_of(configs))
    for setting in ("tensor_parallel", "data_parallel"):
        assert found[f"v1 {setting}=2"] == f"baseline {setting}=2"
        assert found[f"baseline {setting}=2"] == found[f"v1 {setting}=1"] == "baseline tensor_parallel=1"
    assert bases_of({"baseline": configs["baseline data_parallel=1"], "v1": configs["v1 data_parallel=2"]}) == {
        "baseline": "baseline",
        "v1": "baseline",
    }


def test_servers_are_compared_with_the_baseline_else_with_the_first() -> None:
    """Their prefill graphs are unknown, whatever a record has in their place."""
    servers = records_of(named(BASE, ALL), server="s")
    assert {*bases_of(servers).values()} == {"baseline"}
    del servers["baseline"]
    assert {*bases_of(servers).values()} == {"v1"}


def test_sentence_about_several_bases() -> None:
    assert bases_sentence(bases_of(named(BASE, ("baseline", "v1", "v2")))) == bases_sentence({}) == ""
    assert bases_sentence(bases_of(named(BASE, ALL))) == (
        "v2+piecewise is compared with baseline+piecewise, the others with baseline."
    )
    bases = bases_of(named(BASE, (*ALL, "v1+piecewise")))
    assert bases_sentence(bases) == (
        "v2+piecewise and v1+piecewise are compared with baseline+piecewise, the others with baseline."
    )
