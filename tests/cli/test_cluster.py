"""Options of a cluster: what goes together, and what an engine on workers is configured with."""

from __future__ import annotations

from typing import Any

import pytest
from fake_ray import FakeRay
from typer.testing import CliRunner

from specbatch import SpecbatchError
from specbatch.cli.app import app
from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.options import EngineOptions
from specbatch.config.engine_config import Graphs
from specbatch.replicas.cluster import Cluster

NONE = dict.fromkeys(CLUSTER_OPTIONS)


@pytest.mark.parametrize(
    ("given", "engine", "message"),
    [
        ({"workers": "2"}, {}, "workers='2': applies to a Ray cluster; add --distributed ray"),
        ({"address": "auto"}, {}, "address='auto': applies to a Ray cluster"),
        ({"distributed": "ray"}, {}, "distributed='ray': add --workers MIN-MAX"),
        ({"distributed": "dask", "workers": "2"}, {}, "distributed='dask': use ray"),
        ({"distributed": "ray", "workers": "3-1"}, {}, "workers='3-1'"),
        (
            {"distributed": "ray", "workers": "1", "address": "head:99999"},
            {},
            "address='head:99999': use auto, local, or",
        ),
        (
            {"distributed": "ray", "workers": "2"},
            {"data_parallel": 2},
            "data_parallel=2: cannot be combined",
        ),
        ({"distributed": "ray", "workers": "2"}, {"device": "cuda:1"}, "device='cuda:1': Ray chooses the GPUs"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, str], engine: dict[str, object], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        clustered(EngineOptions(**engine), NONE | given)


def test_workers_may_have_gpus_that_this_machine_lacks(fake_ray: FakeRay, use_gpus: Any) -> None:
    use_gpus(0)
    engine, cluster = clustered(EngineOptions(device="cuda"), NONE | {"distributed": "ray", "workers": "2-4"})
    assert cluster == Cluster("auto", 2, 4)
    config = engine.config(concurrency=80, elsewhere=True)
    assert (config.data_parallel, config.max_running, config.graphs) == (4, 20, Graphs("whole", "piecewise"))
    assert clustered(EngineOptions(), NONE)[1] is None


def test_without_ray_the_extra_is_named(use_packages: Any) -> None:
    use_packages({"ray": None})
    words = "generate in.jsonl -o out.jsonl --distributed ray --workers 2 --device cpu"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert done.stderr.strip() == "error: ray not installed; pip install 'specbatch[ray]'"
    words = "eval gsm8k --ablation --distributed ray --workers 2 --device cpu"
    assert CliRunner().invoke(app, words.split()).stderr == done.stderr
