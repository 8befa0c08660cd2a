"""Renders one chat template in a process of its own, with limits of CPU time, memory and output.

`text.chat_template` starts this file as a script and talks to it through pipes. Requests and replies start with
their length as 8 bytes. The first request is the template. Each of the others is a `marshal` list of renderings: the
variables of each, as `marshal` bytes. A reply is one of the kinds below, as one byte, and UTF-8 text. The template has
one, and so has each rendering.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, NoReturn

TEXT, REFUSED, TEMPLATE_ERROR, FAILED, MEMORY_EXCEEDED = b"trefm"
_LONGEST_REASON = 300  # characters


class RefusedError(Exception):
    """What a template raises itself for messages that it does not take. Other errors are faults of the template."""


def environment() -> Any:
    """Jinja's sandbox with the functions, filters and tags that chat templates expect, as in transformers 5.24."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model writes, for training. Its body is rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)  # what is set in it is not set after it

    class Namespace(jinja2.utils.Namespace):
        """Refuses names that begin with an underscore, which the sandbox would read as empty."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # any name may be a keyword, also `self`
            self, *given = args
            jinja2.utils.Namespace.__init__(self, visible(dict(*given, **kwargs)))

        def __setitem__(self, name: str, value: Any) -> None:
            visible({name: value})
            super().__setitem__(name, value)

    def visible(names: dict[str, Any]) -> dict[str, Any]:
        hidden = next((name for name in names if str(name).startswith("_")), None)
        if hidden is not None:
            raise ValueError(f"a namespace cannot have {hidden!r}; begin names with a letter")
        return names

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: Any) -> NoReturn:
        raise RefusedError(message)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["namespace"] = Namespace
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


def compiled(source: bytes) -> Any:
    """The template of a source."""
    return environment().from_string(source.decode(errors="surrogatepass"))


def rendered(template: Any, variables: bytes, longest: int) -> bytes:
    """The text for the variables, of at most `longest` bytes."""
    text: bytes = template.render(**marshal.loads(variables)).encode()
    if len(text) > longest:
        raise ValueError(f"its output is longer than {longest >> 20} MiB")
    return text


def attempt(call: Callable[[], Any], seconds: float) -> tuple[int, Any]:
    """The kind of the reply, and the result or the reason, of a call with a limit of CPU time."""
    from jinja2 import TemplateError

    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return TEXT, call()
    except MemoryError:
        return MEMORY_EXCEEDED, b""
    except RefusedError as error:
        return REFUSED, reason(error).encode(errors="backslashreplace")
    except Exception as error:  # a template can raise any of them
        kind = TEMPLATE_ERROR if isinstance(error, TemplateError) else FAILED
        return kind, f"{place(error)}{reason(error)}".encode(errors="backslashreplace")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def place(error: Exception) -> str:
    """The line of a template that an error comes from, as the beginning of a reason."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return "" if line is None else f"line {line}: "


def reason(error: Exception) -> str:
    """One short line for an error."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error)[:_LONGEST_REASON].split()) or type(error).__name__


def serve(seconds: float, memory: int, longest: int) -> None:
    """Answer requests until the pipe is closed.

    seconds   of CPU time for each rendering; the kernel ends the process when they are used up
    memory    bytes of address space
    longest   bytes of a rendered prompt
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def reply(kind: int, text: bytes) -> None:
        sink.write(len(text).to_bytes(8, "little") + bytes((kind,)) + text)

    kind, template = attempt(partial(compiled, _read(source)), seconds)
    reply(kind, b"" if kind == TEXT else template)
    sink.flush()
    while request := _read(source):
        for variables in marshal.loads(request):
            reply(*attempt(partial(rendered, template, variables, longest), seconds))
        sink.flush()


def _read(source: BinaryIO) -> bytes:
    """A request; empty at the end."""
    return source.read(int.from_bytes(source.read(8), "little"))


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
