"""Loads the engines of a sweep on one copy of the weights, and connects to its servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.draft_shape import AUTO
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import FailedError, SpecbatchError, reason_of, refuse
from specbatch.memory.capacity import CPU_RUNNING
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.servers.server import Server
from specbatch.sweeps.run.engine_groups import ON_DEVICES, Failed, engines_of
from specbatch.sweeps.workload.lengths import shown
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.engine.setup.prepare import Prepared
    from specbatch.servers.engine import HttpEngine

Log = Callable[[str], None]
Configs = Mapping[str, EngineConfig | Server]
Engines = Mapping[str, "InferenceEngine | HttpEngine"]
OF_WEIGHTS = ("model", "load_format", "tokenizer", "seed", "dtype", "device")


def check_machine(config: EngineConfig) -> Prepared:
    """Refuse an engine that cannot run on this machine, with nothing loaded. Returns that of one replica."""
    from specbatch.engine.ranks.ranks import checked
    from specbatch.replicas.engine import of_one
    from specbatch.replicas.process import LocalProcesses

    if config.data_parallel > 1:
        LocalProcesses(config)
    return checked(of_one(config, EXCLUSIVE)[0], lambda line: None)


def one_group(configs: Mapping[str, Any]) -> None:
    """Refuse configurations whose engines cannot share weights."""
    own = engines_of(configs)
    for key in ON_DEVICES:
        if len(values := dict.fromkeys(getattr(config, key) for config in own.values())) > 1:
            works = "the workers of a cluster load their engines once; use one number, and compare two sweeps"
            raise refuse(key, ", ".join(map(str, values)), works)


def refuse_servers(configs: Configs) -> None:
    """Refuse servers among what the workers of a cluster are to measure."""
    if names := [name for name, config in configs.items() if isinstance(config, Server)]:
        works = "the workers of a cluster cannot measure servers; leave them out, or run without a cluster"
        raise refuse("configs", ", ".join(names), works)


def with_concurrency(config: EngineConfig, concurrency: int) -> EngineConfig:
    """The configuration with a `max_running` for so many requests over all replicas. Refused: a lower one."""
    share = -(-concurrency // config.data_parallel)
    if config.max_running == AUTO:
        return replace(config, max_running=share)
    if config.max_running < share:
        on = f" on {config.data_parallel} replicas" if config.data_parallel > 1 else ""
        raise refuse("max_running", config.max_running, f"concurrency {concurrency}{on} needs at least {share}")
    return config


def most_at_once(configs: Mapping[str, EngineConfig], *, elsewhere: bool) -> int:
    """The most requests that all configurations can run at once, over all replicas, if they share the memory.
    elsewhere: engines run on other machines, whose memory is not known here."""
    from specbatch.engine.setup.memory_plan import memory_plan
    from specbatch.replicas.engine import of_one

    found: list[int] = []
    for config in configs.values():
        if config.max_running != AUTO:
            found.append(config.max_running * config.data_parallel)
        elif not elsewhere:
            share = replace(of_one(config, EXCLUSIVE)[1], count=len(configs))
            with suppress(SpecbatchError):  # it fails when it is built
                found.append(memory_plan(check_machine(config), share).max_running * config.data_parallel)
    return min(found, default=CPU_RUNNING)


@contextmanager
def connected(
    configs: Configs,
    log: Log | None,
    workload: Workload | None = None,
    failed: Failed | None = None,
    **of_clients: Any,
) -> Iterator[Engines]:
    """As `loaded`, with clients of the servers, which are connected to first. The prompts of servers next to an engine
    are made with its tokenizer, so that none can be measured if no engine can be built. of_clients: arguments of
    `HttpEngine`."""
    own, clients = engines_of(configs), _clients(configs, log, failed, of_clients)
    lines = [f"{name}: {text}" for name, text in (failed or {}).items() if name in configs and name not in own]
    if failed and not own and not clients:
        name, reason = next(iter(failed.items())) if len(failed) == 1 else (None, None)
        raise SpecbatchError("\n".join(lines), setting="configs", value=name, works=reason)
    if log is not None:
        for line in lines:
            log(line)
    with ExitStack() as stack:
        engines = stack.enter_context(loaded(own, log, workload, failed)) if own else {}
        for client in clients.values() if engines else ():
            client.tokenizer = next(iter(engines.values())).tokenizer
        every: dict[str, Any] = {**engines, **clients}
        yield {name: every[name] for name in configs if name in every}


@contextmanager
def loaded(
    configs: Mapping[str, EngineConfig], log: Log | None, workload: Workload | None = None, failed: Failed | None = None
) -> Iterator[Mapping[str, InferenceEngine]]:
    """The engines of the configurations, on one copy of the weights, to be run one at a time. They use one KV pool of
    the target, or if they cannot, each gets an equal share of the memory, or if all have kv_pages, what these take.

    workload: a max_model_len that is refused is reported in terms of its lengths. failed: gets the reasons why engines
    cannot be built; refused if none can. None: the first reason is raised.
    """
    causes: list[Exception] = []
    held: list[str] = []  # failures, until an engine is built: if none can be, for one reason, that is the error
    with ExitStack() as stack:
        engines: dict[str, InferenceEngine] = {}
        shares = shares_of(configs)
        for name, config in configs.items():
            first, side = next(iter(engines.values()), None), shares[len(engines)]
            if failed is None or name not in failed:
                with noted(failed, name, causes), of_lengths(config, workload):
                    engines[name] = stack.enter_context(load_engine(name, config, log, weights_of=first, share=side))
                if failed and name in failed:
                    held.append(f"{name}: {failed[name]}")
            if log is not None and (engines or (failed and len({*failed.values()}) > 1)):
                for line in held:
                    log(line)
                held.clear()
        if not engines and failed:
            has_failed = any(isinstance(one, FailedError) or not isinstance(one, SpecbatchError) for one in causes)
            raise (FailedError if has_failed else SpecbatchError)([*failed.values()][-1], setting="configs")
        yield engines


def shares_of(configs: Mapping[str, EngineConfig]) -> list[MemoryShare]:
    """Of the memory, for engines that are built one after the other and run one at a time."""
    pages, count = shared_pages(configs), len(configs)
    if pages is None and all(config.kv_pages for config in configs.values()):
        return [EXCLUSIVE] * count
    return [MemoryShare(index, count, pages=pages) for index in range(count)]


def shared_pages(configs: Mapping[str, EngineConfig]) -> int | None:
    if len(configs) == 1 or any(config.prefix_cache for config in configs.values()):
        return None
    from specbatch.engine.setup.memory_plan import pages_of_shared_pool
    from specbatch.engine.setup.prepare import prepare
    from specbatch.replicas.engine import of_one

    prepared, replicas = [], 1
    for config in configs.values():
        own, share = of_one(config, EXCLUSIVE)
        with suppress(SpecbatchError):  # it fails when it is built
            prepared.append(prepare(own, lambda line: None))
        replicas = share.replicas
    return pages_of_shared_pool(prepared, replicas) if prepared else None


def clients_of(engines: Engines) -> list[HttpEngine]:
    """Those of servers."""
    return [engine for engine in engines.values() if isinstance(engine.config, Server)]


def _clients(
    configs: Configs, log: Log | None, failed: Failed | None, settings: Mapping[str, Any]
) -> dict[str, HttpEngine]:
    """Clients of the servers."""
    clients: dict[str, HttpEngine] = {}
    for name, server in configs.items():
        if isinstance(server, Server):
            from specbatch.servers.engine import HttpEngine

            with noted(failed, name):
                clients[name] = HttpEngine(server, log=prefixed(log, name), **settings)
    return clients


def prefixed(log: Log | None, name: str) -> Log | None:
    """A log whose lines begin with a name."""
    return None if log is None else lambda line: log(f"{name}: {line}")


def check_draft(configs: Iterable[EngineConfig], log: Log | None) -> None:
    """Refuse a draft or corpus that does not fit its target, before an engine without speculation has loaded the
    target."""
    from specbatch.engine.setup.prepare import prepare

    drafting = (config for config in configs if config.speculation.reads_files)
    if (config := next(drafting, None)) is not None:
        prepare(config, log or (lambda line: None))


def load_engine(
    name: str,
    config: EngineConfig,
    log: Log | None,
    *,
    weights_of: InferenceEngine | None,
    share: MemoryShare = EXCLUSIVE,
) -> InferenceEngine:
    """Load the engine of configuration `name`, which prefixes the lines of its log. weights_of: see `Engine`."""
    from specbatch.replicas.engine import engine_of

    return engine_of(config, log=prefixed(log, name), weights_of=weights_of, share=share)


def speculating_of(configs: Configs) -> set[str]:
    """The configurations with speculation."""
    return {name for name, one in engines_of(configs).items() if one.speculation.algorithm != NO_SPECULATION}


@contextmanager
def noted(errors: dict[str, str] | None, name: str, causes: list[Exception] | None = None) -> Iterator[None]:
    """Keep the first line of an exception as the error of `name`, and the exception itself in `causes`. errors=None:
    let it through."""
    try:
        yield
    except Exception as error:
        if errors is None:
            raise
        errors[name] = reason_of(name, error)
        if causes is not None:
            causes.append(error)


@contextmanager
def of_lengths(config: EngineConfig, workload: Workload | None) -> Iterator[None]:
    """Report a max_model_len that is refused in terms of the workload's lengths, if it follows from them."""
    try:
        yield
    except SpecbatchError as error:
        of_workload = workload is not None and config.max_model_len == workload.max_model_len
        if error.setting != "max_model_len" or workload is None or not of_workload:
            raise
        lengths = {name: shown(getattr(workload, name)) for name in ("shared_len", "input_len", "output_len")}
        name, *others = lengths if workload.is_grouped else ("input_len", "output_len")
        works = f"with {' and '.join(f'{other}={lengths[other]}' for other in others)} that is {error}"
        raise refuse(name, lengths[name], works) from None


def check(configs: Configs) -> dict[str, Prepared]:
    """Refuse engines that cannot run, with nothing loaded. Returns those of one replica each."""
    prepared: dict[str, Prepared] = {}
    causes, failed = list[Exception](), Failed()
    own = engines_of(configs)
    for name, config in own.items():
        with noted(failed, name, causes):
            prepared[name] = check_machine(config)
    refuse_failed(own, failed, causes)
    return prepared


def refuse_failed(every: Collection[str], failed: Failed, causes: Sequence[Exception]) -> None:
    """Raise why configurations have failed, of one of them with its name, unless `every` one has the same reason."""
    if failed and len({*failed.values()}) == 1 and len(failed) == len(every):
        raise causes[0]
    for name, reason in failed.items():
        raise SpecbatchError(f"{name}: {reason}", setting="configs", value=name, works=reason)
