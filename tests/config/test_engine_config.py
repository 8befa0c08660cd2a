"""Configurations of an engine: devices, limits, equality and serialisation."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:13"])
def test_device_names_are_those_of_torch(device: str) -> None:
    assert EngineConfig(device=device).device == device


def test_limits_are_accepted() -> None:
    EngineConfig(max_running=1, max_model_len=2, page_size=1, kv_pages=2, prefill_chunk=1, memory_fraction=1.0)


def test_configuration_is_frozen_and_serialisable() -> None:
    config = EngineConfig(speculation=Speculation("ngram"), kv_pages=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kv_pages = 8  # type: ignore[misc]
    found = json.loads(json.dumps(config.as_dict()))
    assert found["kv_pages"] == 7
    assert found["speculation"]["algorithm"] == "ngram"
    assert found["graphs"] == {"decode": "auto", "prefill": "auto"}
    assert {item.name for item in dataclasses.fields(EngineConfig)} == {*found, "job"}
    assert config == dataclasses.replace(config)
    assert hash(config) == hash(dataclasses.replace(config))


def test_names_of_other_engines_are_refused_with_ours() -> None:
    with pytest.raises(SpecbatchError, match=r"^gpu_memory_utilization=0\.9: use memory_fraction$"):
        EngineConfig(gpu_memory_utilization=0.9)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("graphs", "cuda", "cpu"),
    [
        (EngineConfig().graphs, Graphs("whole", "piecewise"), Graphs()),
        (Graphs("auto"), Graphs("whole"), Graphs()),
        (Graphs(), Graphs(), Graphs()),
        (Graphs(prefill="piecewise"), Graphs(prefill="piecewise"), Graphs(prefill="piecewise")),
    ],
)
def test_graphs_that_are_not_named_follow_the_device(graphs: Graphs, cuda: Graphs, cpu: Graphs) -> None:
    assert (graphs.on("cuda"), graphs.on("cpu")) == (cuda, cpu)
