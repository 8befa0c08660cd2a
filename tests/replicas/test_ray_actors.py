"""Replicas as actors of a stand-in for Ray; `test_ray.py` runs Ray itself."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay

from specbatch import DataParallelEngine, Engine, EngineConfig, SamplingParams, SpecbatchError
from specbatch.config.speculation import Speculation
from specbatch.memory.planner import EXCLUSIVE
from specbatch.replicas import ray_actors, ray_cluster
from specbatch.replicas.cluster import Cluster
from specbatch.replicas.messages import Build, Built, Call, Ended, Message, Output, Refused, Returned
from specbatch.replicas.ray_actors import RayActors, ReplicaActor
from specbatch.replicas.ray_cluster import Requirements, connected, ending_of, meet, requirements

CONFIG = EngineConfig(model="toy", load_format="dummy", device="cpu", max_model_len=96, max_running=4)
PROMPTS = [f"prompt {number}" for number in range(16)]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True)


@pytest.fixture
def ray(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setattr(ray_actors, "POLL_S", 0.05)
    monkeypatch.setattr(ray_actors, "PATIENCE_S", 0.05)
    return fake_ray


def wanted() -> list[list[int]]:
    with Engine(CONFIG) as engine:
        return [item.token_ids for item in engine.generate(PROMPTS, PARAMS)]


def test_prompts_of_lost_actors_and_nodes_run_again_once(ray: FakeRay) -> None:
    lines: list[str] = []
    cluster = Cluster(least=2, most=2)
    config = replace(CONFIG, data_parallel=2)
    with DataParallelEngine(config, starter=RayActors(config, cluster), log=lines.append) as engine:
        found = {}
        for event in engine.stream(PROMPTS, PARAMS):
            assert event.index not in found
            assert event.completion is not None
            found[event.index] = event.completion.token_ids
            if len(found) in (2, 5):
                ray.actors[len(found) // 5].lose("node" if len(found) == 5 else "worker process")
        assert engine.record().counters["replaced_replicas"] == 2
    assert [found[index] for index in range(16)] == wanted()
    assert "replica 0 ended (its process on 10.0.0.7 was lost); starting another" in lines
    assert "replica 1 ended (its node on 10.0.0.7 was lost); starting another" in lines
    assert len(ray.actors) == 4
    assert all(actor.is_lost for actor in ray.actors)
    assert ray.options["max_restarts"] == 0


def test_work_begins_with_the_least_and_goes_on_when_no_replacement_can_be_had(ray: FakeRay) -> None:
    ray.room = 2
    lines: list[str] = []
    config = replace(CONFIG, data_parallel=3)
    with DataParallelEngine(config, starter=RayActors(config, Cluster(least=1, most=3)), log=lines.append) as engine:
        assert [item.token_ids for item in engine.generate(PROMPTS, PARAMS)] == wanted()
        ray.room = 1
        ray.actors[0].lose("node")
        assert [item.token_ids for item in engine.generate(PROMPTS, PARAMS)] == wanted()
    assert any("waits for a node with 1 CPU; the whole cluster has" in line for line in lines)


def test_an_actor_that_is_lost_while_it_is_built_is_replaced(ray: FakeRay) -> None:
    class LoseFirst(RayActors):
        def start(self, place: int, deliver: Any) -> Any:
            link = super().start(place, deliver)
            if len(ray.actors) == 1:
                ray.actors[0].lose("node")
            return link

    config = replace(CONFIG, data_parallel=1)
    with DataParallelEngine(config, starter=LoseFirst(config, Cluster())) as engine:
        assert [item.token_ids for item in engine.generate(PROMPTS, PARAMS)] == wanted()
    assert len(ray.actors) == 2


def test_a_worker_with_other_versions_or_without_the_model_ends_the_start(ray: FakeRay) -> None:
    config = replace(CONFIG, data_parallel=1)
    starter = RayActors(config, Cluster())
    starter._wanted.versions["specbatch"] = "0.0.1"
    match = r"ended while it was built: worker on 10.0.0.7 has specbatch \S+ and the process that leads it 0.0.1; "
    with pytest.raises(SpecbatchError, match=match):
        DataParallelEngine(config, starter=starter)
    assert ray.actors[0].is_lost


def test_what_a_worker_must_meet(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "head").mkdir()
    speculation = Speculation("eagle3", "v2", draft="head")
    found = requirements(replace(CONFIG, model="model", tokenizer="org/name", speculation=speculation))
    assert found.paths == [str(tmp_path / "head"), str(tmp_path / "model")]
    assert found.folder == str(tmp_path)
    monkeypatch.chdir("/")
    meet(found)
    assert Path.cwd() == tmp_path
    (tmp_path / "model").rmdir()
    with pytest.raises(SpecbatchError, match=f"worker on 10.0.0.7 cannot find {tmp_path}/model; put it in a folder"):
        meet(found)


def test_an_actor_takes_commands_in_order_and_refuses_what_it_cannot_build(ray: FakeRay) -> None:
    actor = ReplicaActor(requirements(CONFIG))
    commands = [Build(0, CONFIG, EXCLUSIVE, None), Call(7, 0, "score", {"pairs": [([1, 2], [3])]})]
    for number in (1, 0):
        actor.receive(number, pickle.dumps(commands[number]))
    got = fetched(actor, Returned)
    assert isinstance(got[0], Output)
    assert [type(item) for item in got if isinstance(item, Built | Returned)] == [Built, Returned]
    actor.receive(2, pickle.dumps(Build(1, replace(CONFIG, max_model_len=100_000), EXCLUSIVE, None)))
    *_, last = fetched(actor, Refused)
    assert "max_model_len=100000" in str(last)
    refusing = ReplicaActor(Requirements({"Python": "3.1", "Ray": "2.60.0", "specbatch": "0"}, "/", []))
    refusing.receive(0, pickle.dumps(commands[0]))
    (only,) = refusing.messages()
    assert isinstance(only, Ended)
    assert "and the process that leads it 3.1" in only.reason


def fetched(actor: ReplicaActor, last: type[Message]) -> list[Message]:
    """All messages up to the first of a kind."""
    found: list[Message] = []
    while not found or not isinstance(found[-1], last):
        found += actor.messages()
    return found


def test_ends_are_named() -> None:
    imports = "...\n\tip: 10.1.1.1\n  File x\nModuleNotFoundError: No module named 'specbatch'"
    assert ending_of(Exception(imports)) == Ended(
        "a worker lacks specbatch or has an older one; install the same version on all machines"
    )
    gone = "The actor 3ad is unavailable: The actor is temporarily unavailable: RpcError: Socket closed"
    assert ending_of(Exception(gone)) == Ended("its process cannot be reached", lost=True)
    assert ending_of(Exception("one\nRayError: two\n")) == Ended("RayError: two", lost=True)


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "least", "most"), [("3", 3, 3), ("1-64", 1, 64)])
def test_workers_are_a_number_or_a_range(text: str, least: int, most: int) -> None:
    assert Cluster.of("auto", text) == Cluster("auto", least, most)


@pytest.mark.parametrize(
    ("address", "workers", "message"),
    [
        ("auto", "3-1", "workers='3-1': use a number, or MIN-MAX with MIN at least 1"),
        ("auto", "0", "workers='0'"),
        ("auto", "1-x", "workers='1-x': use a number, or MIN-MAX such as 2-8"),
        ("ray://head:10001", "2", "address='ray://head:10001': use auto, local, or HOST"),
    ],
)
def test_settings_of_a_cluster_are_checked(address: str, workers: str, message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        Cluster.of(address, workers)


def test_needs_of_a_worker() -> None:
    cluster = Cluster("head:6379", 1, 2)
    assert cluster.needs_of(EngineConfig(device="cpu")) == {"CPU": 1}
    assert cluster.needs_of(EngineConfig(device="cuda", tensor_parallel=4)) == {"CPU": 4, "GPU": 4}
    with pytest.raises(SpecbatchError, match=r"device='cuda:1': Ray chooses the GPUs"):
        cluster.needs_of(EngineConfig(device="cuda:1"))


def test_auto_is_no_device_of_workers_elsewhere(use_gpus: Any) -> None:
    use_gpus(0)
    assert Cluster("local").device("auto") == "cpu"
    with pytest.raises(SpecbatchError, match="device='auto': this machine has no GPU, but the workers may; use"):
        Cluster("auto").device("auto")


def test_clusters_that_are_too_small_or_do_not_answer_are_refused(ray: FakeRay) -> None:
    for cluster, each, message in (
        (Cluster("local", 3, 5), 1, "workers='3-5': 3 workers would need 3 CPUs, and this machine has 2; use at"),
        (Cluster("local"), 4, "workers='1': 1 worker would need 4 CPUs, and this machine has 2; use the address of a"),
    ):
        with pytest.raises(SpecbatchError, match=message):
            ray_cluster.check_size(cluster, {"CPU": each}, {"CPU": 2.0})
    ray.connected = False
    with (
        pytest.raises(SpecbatchError, match=r"address='127.0.0.1:9': nothing answers at 127.0.0.1:9 \(.*refused"),
        connected(Cluster("127.0.0.1:9"), CONFIG),
    ):
        pass
    mismatch = """Version mismatch: The cluster was started with:
    Ray: 2.9.0
    Python: 3.11.7
This process on node 127.0.0.1 was started with:
    Ray: 3.0
    Python: 3.12.1
"""
    works = "the cluster has Ray 2.9.0 and Python 3.11.7, and this process Ray 3.0 and Python 3.12.1; install the same"
    assert ray_cluster.why_not(mismatch).startswith(works)
    assert "no head node of Ray" in ray_cluster.why_not("Failed to connect to Ray cluster at 127.0.0.1:7000")


def test_ray_is_an_extra(use_packages: Any) -> None:
    use_packages({"ray": None})
    with (
        pytest.raises(SpecbatchError, match=r"ray not installed; pip install 'specbatch\[ray\]'"),
        connected(Cluster(), CONFIG),
    ):
        pass
