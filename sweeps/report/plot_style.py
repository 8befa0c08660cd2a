"""Style of plots, and their conversion to SVG and PNG.

Configurations differ in colour and marker, which are the same in all plots, and for known names in all reports. With
several algorithms under several schedules the colour is the algorithm and the marker the schedule. The colours are
those of Okabe and Ito (jfly.uni-koeln.de/color), which the common kinds of colour blindness can tell apart, as far as
they are seen on white and on near black; a figure in one colour and a marker stays readable in print. Text and axes of
an SVG have the colour of the page around it, dark on light or light on dark; a PNG has a white ground.

A figure is as wide as a phone's screen, so that its text is readable there; panels stand below each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, StringIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Looks = dict[str, dict[str, Any]]  # colour, marker and label of each configuration, as matplotlib takes them
INK = "#101418"  # replaced by the text colour of the page
GREY = "#9a9a9a59"  # seen on white and on near black, and through it the lines above
ROOM = 0.7  # share of a tick interval that its configurations use
GRID = 0.25  # opacity
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
WIDTH = 4.6  # inches, at 72 points each: 331
DARK = "svg{color:#101418}@media (prefers-color-scheme:dark){svg{color:#e6e8ea}}"


@dataclass(frozen=True)
class Plot:
    """A figure. remark: what it lacks, or why there is none."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    remark: str = ""


@dataclass(frozen=True)
class Mark:
    """Colour and marker of a configuration."""

    colour: str
    marker: str


KNOWN = {
    "baseline": Mark(INK, "o"),
    "v1": Mark(BLUE, "s"),
    "v2": Mark(VERMILLION, "^"),
    "v2+piecewise": Mark(GREEN, "D"),
}
# For all others: every pair of a colour and a marker that has no name, neighbours in both different.
_OTHERS = [
    Mark((PURPLE, BLUE, VERMILLION, GREEN, INK)[place % 5], ("P", "v", "X", "<", "*", ">", "h")[place % 7])
    for place in range(35)
]


# By algorithm and schedule: colours of the algorithms in their order, and a marker for each schedule with its graphs.
_ALGORITHMS = (BLUE, VERMILLION, GREEN, PURPLE, INK)
_SCHEDULES = {name: KNOWN[name].marker for name in ("v1", "v2", "v2+piecewise")} | {"v1+piecewise": "v"}
_PLAIN = {"v2": "o", "v2+piecewise": "P"}


def marks(names: Iterable[str], kinds: Mapping[str, tuple[str, str]] | None = None) -> dict[str, Mark]:
    """A colour and a marker for each configuration: its own, or by its place among those that have none.

    kinds: algorithm ("" without speculation) and schedule ("v2", "v2+piecewise") of each of `names`, if known.
    """
    if kinds and (found := _by_kind(kinds)):
        return found
    asked = list(dict.fromkeys(names))
    others = [name for name in asked if name not in KNOWN]
    own = KNOWN | {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}
    return {name: own[name] for name in asked}


def _by_kind(kinds: Mapping[str, tuple[str, str]]) -> dict[str, Mark]:
    """Marks by algorithm and schedule; empty where that does not tell all configurations apart, or where no algorithm
    has several schedules or only one algorithm drafts."""
    drafting = [algorithm for algorithm, _ in kinds.values() if algorithm]
    algorithms = dict.fromkeys(drafting)
    colours = {"": INK} | dict(zip(algorithms, _ALGORITHMS, strict=False))
    found = {
        name: Mark(colour, marker)
        for name, (algorithm, schedule) in kinds.items()
        if (colour := colours.get(algorithm)) and (marker := (_SCHEDULES if algorithm else _PLAIN).get(schedule))
    }
    fits = 1 < len(algorithms) < len(drafting) and len(found) == len({*found.values()}) == len(kinds)
    return found if fits else {}


@contextmanager
def style() -> Iterator[None]:
    """Settings of matplotlib, whatever the user's own are; figures are drawn and saved inside."""
    import matplotlib

    settings: Any = {  # matplotlib's own type of a key is one of 300 literals, and new with 3.11
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.titlesize": 11,
        "axes.labelsize": 11,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": GRID,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "figure.constrained_layout.use": True,
        "text.parse_math": False,  # a name may hold dollars
        "svg.fonttype": "none",  # text stays text: small, and to be searched
        "svg.hashsalt": "specbatch",  # the same figure gives the same bytes
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
        ),
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels below each other, `height` inches each."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(WIDTH, count * height))
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def beside(place: int, count: int) -> float:
    """Where the configuration at `place` of `count` stands beside the middle of its tick."""
    return ROOM * ((place + 0.5) / count - 0.5)


def legend(figure: Figure, *others: Artist) -> None:
    """What the lines of all panels are, each once, below them, and then what `others` stand for."""
    own = {str(other.get_label()): other for other in others}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        own = dict(zip(labels, handles, strict=True)) | own  # the panels' before the others
    columns = 2 if max(map(len, own)) < 22 else 1
    names = [fill(name, 42) for name in own]
    lines = sum(1 + name.count("\n") for name in names) / columns
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)  # the panels keep their size
    figure.legend(list(own.values()), names, loc="outside lower center", ncols=columns)


def svg(figure: Figure, name: str) -> str:
    """An SVG whose text has the colour of the page; ids begin with `name`, so that several fit into one page."""
    file = StringIO()
    unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no time of day: remade is the same
    figure.savefig(file, format="svg", transparent=True, metadata=unsaid)
    text = file.getvalue().replace(INK, "currentColor")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    return text.replace("<defs>", f"<style>{DARK}</style>\n <defs>", 1)


def inline(text: str, label: str) -> str:
    """An SVG for an HTML page: no prologue, full width, and `label` for screen readers."""
    from html import escape

    start = text.index("<svg")
    end = text.index(">", start)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", text[start:end])
    body = text[end:].replace(f"<style>{DARK}</style>", "", 1)
    return f'{head} role="img" aria-label="{escape(label)}"{body}'


def png(figure: Figure) -> bytes:
    """A PNG at 160 dpi on white."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return file.getvalue()
