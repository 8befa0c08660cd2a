"""The plot that a report opens with: speedup over the baseline by concurrency, with 95% intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from specbatch.records.bases import base_in_words, bases_sentence
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.verdicts import LOSES, PAYS, Speedup
from specbatch.sweeps.report.plot_style import INK, Looks, Plot, beside, legend, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "speedup"
TITLE = "Speedup by concurrency"
CAPTION = (
    f"Output tokens per second relative to {{base}} (the line at 1). Bar: {CONFIDENCE:.0%} interval over the repeats. "
    "Filled: the interval excludes 1. Hollow: it does not, or one repeat has none."
)
CUT = " Bars end in an arrow where the interval goes on beyond the plot."
HEIGHT = 3.0  # inches
MANY = 8  # configurations; with more of them a concurrency has a panel of its own
LEAST_ROOM = 0.25  # times


def speedup_plot(speedups: Mapping[tuple[Any, ...], Speedup], own: Looks, bases: Mapping[str, str]) -> Plot:
    """The plot. speedups: by (concurrency, configuration), relative to the configuration's base in `bases`."""
    *others, base = {base_in_words(base): None for base in bases.values()}
    caption = CAPTION.format(base="what each configuration is compared with" if others else base)
    caption += f" {bases_sentence(bases)}" if others else ""
    if not speedups:
        return Plot(NAME, TITLE, caption, None, "There are no two configurations to compare.")
    concurrencies = list(dict.fromkeys(concurrency for concurrency, _ in speedups))
    names = [name for name in own if any(name == which for _, which in speedups)]
    shown = [[number] for number in concurrencies] if len(names) > MANY else [concurrencies]
    figure, every = panels(len(shown), HEIGHT if len(shown) == 1 else 0.7 * HEIGHT)
    low, high = limits(speedups.values())
    is_cut = False
    for axes, numbers in zip(every, shown, strict=True):
        axes.axhline(1, color=INK, linewidth=1, linestyle="--", label="1: no difference" if others else base)
        axes.set_ylim(low, high)
        for place, name in enumerate(names):
            look = own[name] | {"label": None}
            axes.plot([], [], linestyle="none", markersize=8, **own[name])  # for the legend
            for spot, concurrency in enumerate(numbers):
                if (speedup := speedups.get((concurrency, name))) is None:
                    continue
                x = spot + beside(place, len(names))
                is_cut |= _bar(axes, x, speedup, look["color"])
                decided = speedup.verdict in (PAYS, LOSES)
                face = look["color"] if decided else "none"
                axes.plot(x, speedup.ratio, linestyle="none", markerfacecolor=face, markersize=8, **look)
        if len(shown) == 1:
            axes.set_xlim(-0.5, len(numbers) - 0.5)
            axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
            axes.set_xlabel("concurrency (requests)")
        else:
            axes.set_xticks([])
            axes.set_title(f"concurrency {numbers[0]}", loc="left")
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("speedup (times)")
    legend(figure)
    return Plot(NAME, TITLE, caption + (CUT if is_cut else ""), figure)


def limits(speedups: Collection[Speedup]) -> tuple[float, float]:
    """Of the axis: all ratios and 1, and of the intervals what lies near them. An interval over two repeats can reach
    to many times the ratio, and would hide the differences between the others."""
    ratios = [1.0, *(one.ratio for one in speedups)]
    room = max((max(ratios) - min(ratios)) / 2, LEAST_ROOM)
    lows, highs = ([end for one in speedups if (end := getattr(one, name)) is not None] for name in ("low", "high"))
    low = max(min([*ratios, *lows]), min(ratios) - room)
    high = min(max([*ratios, *highs]), max(ratios) + room)
    margin = 0.12 * max(high - low, 0.01)
    return max(low - margin, 0.0), high + margin


def _bar(axes: Axes, x: float, speedup: Speedup, colour: str) -> bool:
    """Draw the interval; return whether a part of it lies outside of the axis, which an arrow at the edge says."""
    if speedup.low is None or speedup.high is None:
        return False
    bottom, top = axes.get_ylim()
    axes.vlines(x, max(speedup.low, bottom), min(speedup.high, top), color=colour, linewidth=3, alpha=0.6)
    edges = [edge for edge, is_beyond in (("v", speedup.low < bottom), ("^", speedup.high > top)) if is_beyond]
    for marker in edges:
        axes.plot(x, bottom if marker == "v" else top, marker, color=colour, markersize=5, clip_on=False)
    return bool(edges)
