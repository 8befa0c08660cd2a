"""Options of commands that can run on a Ray cluster: --distributed, --address and --workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbatch.cli.options import DerivedOption, EngineOptions
from specbatch.errors import refuse
from specbatch.extras import needs

if TYPE_CHECKING:
    from specbatch.replicas.cluster import Cluster

_PANEL = "Cluster"
CLUSTER_OPTIONS = {
    "distributed": DerivedOption(
        str | None, None, "ray: run on workers of a Ray cluster, each with an engine of its own.", _PANEL, "ray"
    ),
    "address": DerivedOption(
        str | None,
        None,
        "The Ray cluster: auto (that of this machine), local (start one here) or the head node. Default: auto.",
        _PANEL,
        "auto|local|HOST[:PORT]",
    ),
    "workers": DerivedOption(
        str | None,
        None,
        "Start when MIN workers are ready; up to MAX join as the cluster has room for them.",
        _PANEL,
        "N|MIN-MAX",
    ),
}


def clustered(
    engine: EngineOptions, given: dict[str, Any], *, replicas: bool = True
) -> tuple[EngineOptions, Cluster | None]:
    """The cluster of the options, if they name one, and the options of the engine there.

    replicas: whether the workers are replicas of one engine, with one queue

    Refused: options of a cluster without --distributed, and --distributed without Ray, --workers or a known device.
    """
    kind, address, workers = (given[name] for name in CLUSTER_OPTIONS)
    if kind is None:
        for name in ("address", "workers"):
            if given[name] is not None:
                raise refuse(name, given[name], "applies to a Ray cluster; add --distributed ray")
        return engine, None
    if kind != "ray":
        raise refuse("distributed", kind, "use ray")
    if engine.data_parallel != 1:
        works = "cannot be combined with --distributed, whose replicas are the --workers; leave one out"
        raise refuse("data_parallel", engine.data_parallel, works)
    if workers is None:
        raise refuse("distributed", kind, "add --workers MIN-MAX, such as --workers 2-8")
    from specbatch.replicas.cluster import AUTO, Cluster

    cluster = Cluster.of(AUTO if address is None else address, workers)
    device = cluster.device(engine.device)
    needs("ray")
    return engine.having(device=device, data_parallel=cluster.most if replicas else 1), cluster
