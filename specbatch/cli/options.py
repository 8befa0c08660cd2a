"""Command-line options generated from settings dataclasses such as `EngineConfig` (`specbatch.config.settings`).

Name, type, default, choices and help text of an option are those of its field. `_OVERRIDES` lists the exceptions:
options that are written differently on a command line, and those whose default depends on the command or the device.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, get_args, get_type_hints

from typer import Context, Option

from specbatch.cli.help import HELP_ALL
from specbatch.config.acceptance_profile import read_profile
from specbatch.config.draft_shape import AUTO
from specbatch.config.engine_config import BATCH, CACHE, EXECUTION, LIMIT_RUNNING, MODEL, EngineConfig, Graphs
from specbatch.config.field_errors import did_you_mean
from specbatch.config.speculation import Speculation
from specbatch.config.values import layers
from specbatch.core.sampling_params import SAMPLED, SamplingParams
from specbatch.errors import MOST, MOST_SEED, at_least, refuse, shown_json

SPECS = ("off", "v1", "v2")
Json = Annotated[bool, Option("--json", help="Print one JSON line instead of tables.")]
Wide = Annotated[bool, Option("--wide", help="Show the tables of all columns, too.")]
Concurrency = Annotated[int | None, Option(help="Maximum number of requests in flight; also sets --max-running.")]
Output = Annotated[
    Path | None, Option("--output", "--out", help="New folder for the results. Default: out/COMMAND-TIME.")
]


@dataclass(frozen=True)
class DerivedOption:
    """One derived option. `panel` is the box of `--help` that shows it; for `parse` and `flags` see `setting`."""

    type: Any
    default: Any
    help: str
    panel: str | None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str, str], Any] | None = None
    flags: tuple[str, ...] = ()

    def with_default(self, text: str) -> DerivedOption:
        """The same option with another default in its help."""
        return replace(self, help=f"{self.help.partition(' Default: ')[0]} Default: {text}.")

    def parameter(self, name: str) -> inspect.Parameter:
        """What Typer reads."""
        complete = _completion(name, self.choices)
        option = Option(
            *self.flags, help=self.help, metavar=self.metavar, rich_help_panel=self.panel, autocompletion=complete
        )
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[self.type, option]
        )

    def value(self, name: str, given: Any) -> Any:
        """The value of the setting `name`, of what Typer read."""
        return given if given is None or self.parse is None else self.parse(name, given)


def _completion(name: str, choices: tuple[str, ...]) -> Callable[[str], list[str]] | None:
    """What a shell completes the value of an option with; None where any value is possible."""
    if not choices and name != "model":
        return None

    def complete(incomplete: str) -> list[str]:
        from specbatch.weights import known_models

        found = [row["name"] for row in known_models.rows()] if name == "model" else choices
        return [value for value in found if value.startswith(incomplete)]

    return complete


_SPECULATION, _SAMPLING = "Speculation", "Sampling"  # boxes of --help
_LONGEST_METAVAR = 24  # a longer one takes the width of the terminal from the help texts
# Option: type, default, and text to append to the help of the field.
_OVERRIDES: dict[str, tuple[Any, Any, str]] = {
    "algorithm": (str | None, None, "Default: standalone with --draft, ngram with --spec v1 or v2, else none."),
    "draft_tokens": (str | None, None, ""),
    "verify_budget": (str | None, None, ""),
    "aux_layers": (str | None, None, ""),
    "simulate_accept": (str | None, None, ""),
    "json_schema": (str | None, None, ""),
    "max_running": (str | None, None, "Default: the concurrency, else auto."),
    "prefill_chunk": (str, AUTO, ""),
    "memory_fraction": (str, AUTO, ""),
    "prefix_cache": (bool | None, None, "Default: on."),
    "decode_graph": (str | None, None, "Default: auto."),
    "prefill_graph": (
        str | None,
        None,
        "Default: piecewise on a CUDA device; off on a CPU, and where configurations with and without it are compared.",
    ),
}


def _derived() -> dict[str, DerivedOption]:
    """The options by name, in the order in which `--help` shows them."""
    spec = DerivedOption(
        str | None,
        None,
        "off: no speculation, even if --algorithm or --draft is given. v1: wait for each result before planning the "
        "next iteration. v2: overlap scheduling, launches the next step before reading the last result. "
        "Default: v2 if --algorithm or --draft is given, else off.",
        _SPECULATION,
        "|".join(SPECS),
        SPECS,
    )
    speculation = {"spec": spec} | options_of(Speculation, _SPECULATION, without=("schedule",))
    engine = options_of(EngineConfig, EXECUTION, without=("speculation", "graphs"))
    engine |= options_of(Graphs, EXECUTION, suffix="_graph")
    order = (MODEL, _SPECULATION, BATCH, CACHE, EXECUTION)
    return dict(sorted((engine | speculation).items(), key=lambda item: order.index(item[1].panel or "")))


def options_of(
    settings: type[Any],
    panel: str | None = None,
    panels: Mapping[str, str] = MappingProxyType({}),
    *,
    without: tuple[str, ...] = (),
    suffix: str = "",
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, DerivedOption]:
    """The options of the fields of a dataclass that have a help text.

    panels    other panels, by the name of a field
    defaults  what the help says of defaults that are the command's own, whose options are None if they are not given
    """
    types = get_type_hints(settings)
    found = {}
    for item in fields(settings):
        if item.name in without or not item.metadata.get("help"):
            continue
        name, data = f"{item.name}{suffix}", item.metadata
        kind, default, note = _OVERRIDES.get(name, (types[item.name], item.default, ""))
        if name in defaults:
            kind, default, note = kind | None, None, f"Default: {defaults[name]}."
        elif default is MISSING:
            kind, default = kind | None, None
        if data["parse"] is not None:
            kind, default = (str, _written(default)) if default is not None else (str | None, None)
        help, choices = data["help"], data["choices"]
        metavar = data["metavar"] or ("|".join(choices) if choices else None)
        if metavar and choices and len(metavar) > _LONGEST_METAVAR:
            metavar, help = "NAME", f"{help} One of {', '.join(choices)}."
        text, box = f"{help} {note}".strip(), panels.get(name, data["panel"] or panel)
        found[name] = DerivedOption(
            kind, default, text, box, metavar, tuple(choices or ()), data["parse"], data["flags"]
        )
    return found


def _written(value: Any) -> str:
    """A default as its option writes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


ENGINE_OPTIONS = _derived()
SAMPLING_OPTIONS = {name: option for name, option in options_of(SamplingParams, _SAMPLING).items() if name in SAMPLED}
ONLY_WITH_DRAFTS = tuple(
    item.name for item in fields(Speculation) if item.name not in ("algorithm", "schedule", "draft")
)


def key_of(option: str) -> str:
    """An option as a table of a file of configurations writes it."""
    return option.replace("_", "-")


WITH_DRAFTS = {"algorithm": "standalone with --draft, else ngram"}  # defaults of commands that speculate without --spec


class EngineOptions(SimpleNamespace):
    """The values of the options in `ENGINE_OPTIONS`, as attributes; those not given have the option's default."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**({name: option.default for name, option in ENGINE_OPTIONS.items()} | given))

    def having(self, **changes: Any) -> EngineOptions:
        """The same options with some other values."""
        return EngineOptions(**(vars(self) | changes))

    def updated(self, settings: Mapping[str, object], where: str) -> EngineOptions:
        """The same options with the settings of a configuration file; errors name `where` they were read."""
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in ENGINE_OPTIONS:
                works = f"is no option of an engine; {did_you_mean(key_of(name), map(key_of, ENGINE_OPTIONS))}"
                raise refuse("configs", f"{where}: {key_of(name)}", works)
            kind = ENGINE_OPTIONS[name].type
            kinds = get_args(kind) or (kind,)
            numbers = (int, float) if ENGINE_OPTIONS[name].metavar == "FLOAT|auto" else (int,)
            changes[name] = str(value) if str in kinds and type(value) in numbers else value
            if type(changes[name]) not in kinds and not (float in kinds and type(value) is int):
                works = "use true or false" if bool in kinds else "this is not a value of that option"
                raise refuse("configs", f"{where}: {key_of(name)}={shown_json(value)}", works)
        return self.having(**changes)

    def speculation(self) -> Speculation:
        """What --spec, --algorithm and --draft mean together. With `--spec off` all the others are ignored."""
        if self.spec not in (None, *SPECS):
            raise refuse("spec", self.spec, f"use one of {', '.join(SPECS)}")
        if self.spec == "off":
            return Speculation()
        draft_tokens = self._number_or_auto("draft_tokens", int)
        if self.spec is None and self.algorithm is None and self.draft is None:
            for name in ONLY_WITH_DRAFTS:
                if getattr(self, name) != ENGINE_OPTIONS[name].default:
                    raise refuse(name, getattr(self, name), "nothing is drafted; add --algorithm, or leave it out")
        default = "standalone" if self.draft else "none" if self.spec is None else "ngram"
        settings = {name: getattr(self, name) for name in ("draft", *ONLY_WITH_DRAFTS)}
        profile = None if self.simulate_accept is None else read_profile(self.simulate_accept)
        settings |= {
            "draft_tokens": draft_tokens,
            "verify_budget": self._number_or_auto("verify_budget", float),
            "aux_layers": None if self.aux_layers is None else layers("aux_layers", self.aux_layers),
            "simulate_accept": profile,
        }
        return Speculation(algorithm=self.algorithm or default, schedule=self.spec or "v2", **settings)

    def config(
        self,
        *,
        concurrency: int | None = None,
        prefix_cache: bool = True,
        compares: bool = False,
        elsewhere: bool = False,
    ) -> EngineConfig:
        """The configuration of the engine.

        concurrency    of the command, over all replicas; the default of --max-running
        prefix_cache   the command's default of --prefix-cache
        compares       whether the command compares configurations with and without prefill graphs, so that they are
                       off unless asked for
        elsewhere      whether it runs on a cluster, where a device cpu or cuda need not be one of this machine
        """
        if concurrency is not None:
            at_least("concurrency", concurrency, 1)
            if concurrency > (most := LIMIT_RUNNING * max(self.data_parallel, 1)):
                raise refuse("concurrency", concurrency, f"use at most {most}, or leave it out")
        settings = {item.name: getattr(self, item.name) for item in fields(EngineConfig) if item.name in ENGINE_OPTIONS}
        each = None if concurrency is None else -(-concurrency // settings["data_parallel"])
        running = self._number_or_auto("max_running", int)
        settings["max_running"] = running if running is not None else each or AUTO
        settings["prefill_chunk"] = self._number_or_auto("prefill_chunk", int)
        settings["memory_fraction"] = self._number_or_auto("memory_fraction", float)
        settings["prefix_cache"] = prefix_cache if self.prefix_cache is None else self.prefix_cache
        for item in fields(Graphs):
            name, rule = f"{item.name}_graph", item.metadata["rule"]
            if getattr(self, name) is not None and not rule.fits(getattr(self, name)):
                raise refuse(name, getattr(self, name), rule.works)
        graphs = Graphs(self.decode_graph or "auto", self.prefill_graph or ("off" if compares else "auto"))
        config = EngineConfig(**settings | {"speculation": self.speculation(), "graphs": graphs})
        if config.data_parallel == 1 and not elsewhere and not compares:  # else the engine may be in another process
            from specbatch.runtime.cuda_context import make_context_ahead

            make_context_ahead(config.device)
        if "auto" not in (graphs.decode, graphs.prefill):
            return config
        from specbatch.runtime.device import find_device

        _keep_imports()
        return replace(config, graphs=graphs.on(config.device if elsewhere else find_device(config.device).type))

    def _number_or_auto(self, name: str, kind: type[int] | type[float]) -> Any:
        """The value of an option that is a number or auto; None if it is not given and has no default."""
        text = getattr(self, name)
        if text in (None, AUTO):
            return text
        try:
            return kind(text)
        except ValueError:
            works = f"use a {'whole number' if kind is int else 'number'}, or auto"
            raise refuse(name, text, works) from None


@functools.cache
def _keep_imports() -> None:
    """Exclude the objects of imports from garbage collection: the collections at exit would walk them for half a
    second. Only once, because garbage is kept, too, and before Triton is imported, whose bindings print a warning for
    each of their objects that is not freed."""
    gc.freeze()


def takes_engine(
    *,
    without: tuple[str, ...] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
    **groups: dict[str, DerivedOption],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `engine` by the options in `ENGINE_OPTIONS`, except those in `without`.

    defaults: what the help says of the defaults that are the command's own, by the name of the option
    groups: other parameters of the command, each replaced by its options; the command gets a dict of their values.
    Typer reads the signature of a command, so this rewrites it.
    """
    shared = {name: option for name, option in ENGINE_OPTIONS.items() if name not in without}
    shared |= {name: shared[name].with_default(text) for name, text in defaults.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            del values["help_all"]
            engine = EngineOptions(**{name: values.pop(name) for name in shared})
            for group, options in groups.items():
                values[group] = {name: option.value(name, values.pop(name)) for name, option in options.items()}
            command(engine=engine, **values)

        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, item in signature.parameters.items():
            if name in groups:
                parameters += [option.parameter(own) for own, option in groups[name].items()]
            elif name != "engine":
                parameters.append(item.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters += [option.parameter(name) for name, option in shared.items()]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("help_all", keyword, default=False, annotation=Annotated[bool, HELP_ALL]))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def bounded(command: Callable[..., None]) -> Callable[..., None]:
    """A command that refuses whole numbers beyond any count before it does anything; Typer knows no upper limit."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, value in values.items():
            most = MOST_SEED if name == "seed" else MOST
            if type(value) is int and abs(value) > most:
                raise refuse(name, value, f"use a whole number of at most {most}")
        command(**values)

    return run


def is_given(context: Context, name: str) -> bool:
    """Whether the user gave option `name` on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
