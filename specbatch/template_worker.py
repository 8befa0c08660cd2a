"""Renders one chat template in a process of its own, with limits of CPU time, memory and output.

`specbatch.chat_template` starts this file as a script and talks to it through pipes. Requests and replies start with
their length as 8 bytes. A request is `marshal` data: first the template, then the variables of each rendering. A reply
is one of the kinds below, as one byte, and UTF-8 text.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

TEXT, REFUSED, MEMORY_EXCEEDED = b"tem"
_LONGEST_REASON = 300  # characters


def environment() -> Any:
    """Jinja's sandbox with the functions and filters that chat templates expect."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    found.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


def answer(template: Any, request: bytes, longest: int) -> tuple[Any, int, bytes]:
    """The compiled template, and the kind and text of the reply to a request, of at most `longest` bytes. The first
    request, with template None, compiles it."""
    try:
        value = marshal.loads(request)
        if template is None:
            return environment().from_string(value), TEXT, b""
        text = template.render(**value).encode()
        if len(text) > longest:
            return template, REFUSED, f"its output is longer than {longest >> 20} MiB".encode()
        return template, TEXT, text
    except MemoryError:
        return template, MEMORY_EXCEEDED, b""
    except Exception as error:  # a template can raise any of them
        return template, REFUSED, reason(error).encode(errors="backslashreplace")


def reason(error: Exception) -> str:
    """One short line for an error."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error)[:_LONGEST_REASON].split()) or type(error).__name__


def serve(seconds: float, memory: int, longest: int) -> None:
    """Answer requests until the pipe is closed.

    seconds   of CPU time for each request; the kernel ends the process when they are used up
    memory    bytes of address space
    longest   bytes of a rendered prompt
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    template = None
    while header := source.read(8):
        request = source.read(int.from_bytes(header, "little"))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        template, kind, text = answer(template, request, longest)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(len(text).to_bytes(8, "little") + bytes((kind,)) + text)
        sink.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
