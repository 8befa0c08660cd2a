"""Counts how many files and functions of specbatch a prompt passes in `Engine.generate`, and one decode step.

python tests/kit/hops.py [-v]     -v: with the files, and how many functions of each
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from targets import Targets

from specbatch import Engine, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_new_tokens=19, ignore_eos=True)


class Hops(Counter[CodeType]):
    """Calls of each function of specbatch, without comprehensions, which Python 3.12 no longer calls."""

    @property
    def files(self) -> Counter[str]:
        """Functions that were entered, by file."""
        return Counter(str(Path(code.co_filename).relative_to(ROOT)) for code in +self)

    def __str__(self) -> str:
        return f"{len(self.files)} files, {sum(self.files.values())} functions, {self.total()} calls"


@contextmanager
def hops() -> Iterator[Hops]:
    """Count the calls of this thread."""
    found = Hops()
    outside = (str(ROOT / "tests"), str(ROOT / ".venv"))

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_filename.startswith(outside):
            found[code] += not code.co_name.endswith(("comp>", "genexpr>"))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def of_a_prompt(engine: Engine) -> Hops:
    """From `generate` to a completion of a few tokens."""
    with hops() as found:
        engine.generate([PROMPT], PARAMS)
    return found


def of_a_step(engine: Engine) -> Hops:
    """The third decode step of a request, from its plan to its tokens."""
    with closing(engine.stream([PROMPT], PARAMS, text=False)) as events:
        for _ in range(3):
            next(events)
        with hops() as found:
            next(events)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        targets = Targets(Path(folder))
        for title, count, algorithm in (
            ("a prompt, no speculation", of_a_prompt, "none"),
            ("a prompt, EAGLE-3", of_a_prompt, "eagle3"),
            ("a decode step, no speculation", of_a_step, "none"),
            ("a decode step, EAGLE-3", of_a_step, "eagle3"),
        ):
            with targets.engine("llama", algorithm) as engine:
                found = count(engine)
            print(f"{title}: {found}")
            for file, functions in found.files.most_common() if "-v" in sys.argv else ():
                print(f"  {functions:3} {file}")


if __name__ == "__main__":
    main()
