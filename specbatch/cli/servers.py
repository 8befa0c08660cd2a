"""Servers of other engines: of --engine http, or in a file of configurations of `specbatch sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typer import Option

from specbatch.cli.configs import KEYS, configured, engine_of_table, tables_of, word_tables
from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions, key_of
from specbatch.cli.output import say
from specbatch.config.engine_config import EngineConfig
from specbatch.config.field_errors import did_you_mean
from specbatch.config.flags import in_keys
from specbatch.errors import SpecbatchError, refuse, shown_json
from specbatch.extras import needs

if TYPE_CHECKING:
    from specbatch.servers.engine import HttpEngine
    from specbatch.servers.server import Server

KINDS = ("specbatch", "http")
SERVER_PANEL = "HTTP server"  # a box of --help
SERVER_OPTIONS = ("base_url", "send", "api_key_env", "idle_timeout", "request_timeout")
_ENGINE_OPTIONS_OF_SERVERS = ("model", "tokenizer", "seed")
# What a server was started with: not sent, but shown in tables.
_DESCRIBING = (
    *("spec", "algorithm", "draft", "draft_tokens", "draft_steps", "draft_topk"),
    *("simulate_accept_length", "simulate_accept"),
)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("base_url", "send", "api_key_env", "model", "tokenizer"), (str,)),
    **dict.fromkeys(("idle_timeout", "request_timeout"), (int, float)),
}


def kind_option(does: str) -> Any:
    """The option --engine of a command. does: what the command does with a server."""
    return Option(
        "--engine",
        metavar="|".join(KINDS),
        help=f"http: {does} the server at --base-url instead of this engine.",
        rich_help_panel=SERVER_PANEL,
    )


def only_server(
    engine: EngineOptions,
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    given: Callable[[str], bool],
    *,
    seed: int | None = None,
    log: Callable[[str], None] | None = say,
    **how: bool,
) -> HttpEngine | None:
    """The server of --engine http, None for this engine. Raises SpecbatchError for options of the other kind of engine.

    settings  of the server
    values    of the command's options
    given     whether the user gave an option
    seed      of the server's configuration
    how       arguments of `HttpEngine`
    """
    kind = values["engine_kind"]
    if kind not in KINDS:
        raise refuse("engine", kind, "use specbatch, or http with --base-url")
    if kind == "specbatch":
        for name in filter(given, SERVER_OPTIONS):
            raise refuse(name, settings[name], "applies to servers only; add --engine http")
        return None
    needs("http")
    from specbatch.servers.engine import HttpEngine
    from specbatch.servers.server import Server

    for name in filter(given, ("configs", *ENGINE_OPTIONS)):
        if name not in _ENGINE_OPTIONS_OF_SERVERS:
            works = "does not apply to a server, which has its own engine settings; leave it out"
            raise refuse(name, values[name], works)
    model = engine.model if given("model") else None
    own = {**settings, "base_url": settings["base_url"] or ""}
    server = Server(model=model, tokenizer=engine.tokenizer, thinking=values["thinking"], seed=seed, **own)
    return HttpEngine(server, log=log, **how)


def configured_with_servers(
    engine: EngineOptions, configs: str, thinking: bool | None, **settings: Any
) -> dict[str, EngineConfig | Server]:
    """As `configured`, with the servers of a file. thinking: of --thinking."""
    from specbatch.sweeps.run.configurations import SUFFIXES

    if not configs.endswith(SUFFIXES):
        return dict(configured(engine, configs, **settings))
    found: dict[str, EngineConfig | Server] = {}
    tables = tables_of(engine, configs)
    word_tables(configs, tables)
    for name, changes in tables.items():
        where = f"{configs}: {name}"
        if (server := _server_of_table(changes, engine, thinking, where)) is not None:
            found[name] = server
        else:
            own = {key: value for key, value in changes.items() if key != "engine"}
            found[name] = engine_of_table(engine, own, where, compares=True, **settings)
    beside = next((config for config in found.values() if isinstance(config, EngineConfig)), None)
    return {
        name: config if isinstance(config, EngineConfig) else replace(config, alongside=beside)
        for name, config in found.items()
    }


def _server_of_table(
    settings: Mapping[str, Any], engine: EngineOptions, thinking: bool | None, where: str
) -> Server | None:
    """The server that a table of a file of configurations describes; None for a table of this engine.

    settings   of the table, with underscores
    where      it was read, for errors
    """
    kind = settings.get("engine", "specbatch")
    if kind not in KINDS:
        raise refuse("configs", f"{where}: engine={shown_json(kind)}", f"use one of {', '.join(KINDS)}")
    if kind == "specbatch":
        for name in filter(settings.__contains__, SERVER_OPTIONS):
            raise refuse("configs", f"{where}: {key_of(name)}", 'applies to servers only; add engine = "http"')
        return None
    needs("http")
    from specbatch.servers.server import Server

    own = {name: value for name, value in settings.items() if name in _TYPES}
    described = {name: value for name, value in settings.items() if name in _DESCRIBING}
    for name in settings:
        if name not in ("engine", *own, *described):
            known = [key_of(option) for option in ("engine", *_TYPES, *_DESCRIBING)]
            works = f"is no option of a server; {did_you_mean(key_of(name), known)}"
            raise refuse("configs", f"{where}: {key_of(name)}", works)
    for name, value in own.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise refuse(
                "configs", f"{where}: {key_of(name)}={shown_json(value)}", "this is not a value of that option"
            )
    try:
        speculation = EngineOptions().updated(described, where).speculation()
        usual = {"base_url": "", "tokenizer": engine.tokenizer, "thinking": thinking}
        return Server(**usual | own, speculation=speculation)
    except SpecbatchError as error:
        raise refuse("configs", where, in_keys(error, KEYS)) from error
