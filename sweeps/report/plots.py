"""Plots of a sweep, made from its records alone. Each caption explains its plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.core.completion import INCOMPLETE
from specbatch.records.markdown import sum_lists
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.plot_style import GREY, INK, ROOM, Looks, Plot, beside, legend, marks, panels
from specbatch.sweeps.report.points import Points, bases, points_of, speedups_of
from specbatch.sweeps.report.speedup_plot import speedup_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 12  # axes are logarithmic from this ratio of largest to smallest value
LOW, HIGH = 10, 90  # percentiles of requests that a bar spans


def draw(records: list[RunRecord]) -> list[Plot]:
    """All plots of a sweep. Call it, and save the figures, inside `plot_style.style`."""
    points = points_of(records)
    own = looks(points)
    return [
        speedup_plot(speedups_of(records), own, bases(records)),
        _throughput(points, own),
        _latency(points, own, "ttft", "Time to first token"),
        _latency(points, own, "tpot", "Time per output token"),
        _accept_lengths(points, own),
        _acceptance(points, own),
        _steps(points, own),
        _shares(points, own),
    ]


def looks(points: Points) -> Looks:
    """Colour, marker and label of each configuration."""
    first = {name: found[0] for (_, name), found in points.items()}
    return {
        name: {"color": mark.colour, "marker": mark.marker, "label": label(name, first[name])}
        for name, mark in marks(first, {name: _kind(one) for name, one in first.items()}).items()
    }


def label(name: str, record: RunRecord) -> str:
    """A configuration in a legend. matplotlib hides labels that begin with an underscore."""
    shown = f" {name}" if name.startswith("_") else name
    return shown if record.simulated_accept_length is None else f"{shown} (simulated)"


def _kind(record: RunRecord) -> tuple[str, str]:
    """Algorithm ("" without speculation), and schedule with prefill graphs."""
    asked, prefill = record.config["speculation"], record.config["graphs"]["prefill"]
    return asked["algorithm"] if record.drafts else "", asked["schedule"] + ("" if prefill == "off" else f"+{prefill}")


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point dominates, sorted by their first number; larger is better in both."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


# -- speed ------------------------------------------------------------------------------------------------------------


def _throughput(points: Points, own: Looks) -> Plot:
    name, title = "throughput", "Throughput against speed per user"
    caption = (
        "A point is a concurrency (the number beside it), the mean over repeats: up is more for all, right is "
        "faster for one. No point lies above and to the right of one on the wide grey Pareto line."
    )
    places: dict[tuple[int, str], tuple[float, float]] = {}
    for (concurrency, configuration), found in points.items():
        user, total = (_mean(found, metric) for metric in ("per_user_throughput", "output_throughput"))
        if user is not None and total is not None:
            places[concurrency, configuration] = (user, total)
    if not places:
        return Plot(name, title, caption, None, "The records have no throughput.")
    figure, (axes,) = panels(1, 3.2)
    front = pareto(places.values())
    band: dict[str, Any] = (
        {"linewidth": 9, "solid_capstyle": "round"} if len(front) > 1 else {"marker": "o", "markersize": 14}
    )
    axes.plot(*_columns(front), color=GREY, label="Pareto line", **band)
    for configuration in own:
        line = [place for (_, which), place in places.items() if which == configuration]
        if line:
            axes.plot(*_columns(line), **own[configuration] | {"linewidth": 1.2})
    for concurrency in dict.fromkeys(concurrency for concurrency, _ in places):
        best = max(place for (which, _), place in places.items() if which == concurrency)
        axes.annotate(str(concurrency), best, xytext=(7, 4), textcoords="offset points")
    users, totals = _columns(places.values())
    _scale(axes, "x", users)
    _scale(axes, "y", totals)
    axes.margins(0.1)
    axes.set_xlabel("throughput per user (tok/s)")
    axes.set_ylabel("total throughput (tok/s)")
    legend(figure)
    return Plot(name, title, caption, figure)


def _latency(points: Points, own: Looks, which: str, what: str) -> Plot:
    caption = (
        f"Marker: the median request ({which.upper()}), all repeats together. Bar: {LOW}th to {HIGH}th percentile of "
        "requests. Small dots: the median of each repeat, where there are several."
    )
    title = f"{what} by concurrency"
    metric = f"{which}_s"
    figure, (axes,) = panels(1, 2.8)
    concurrencies = _concurrencies(points)
    drawn: list[float] = []
    for place, configuration in enumerate(own):
        line = []
        for spot, concurrency in enumerate(concurrencies):
            found = points.get((concurrency, configuration), [])
            values = [1000 * value for record in found for value in _of_requests(record, metric)]
            if not values:
                continue
            x = spot + beside(place, len(own))
            low, middle, high = np.percentile(values, (LOW, 50, HIGH)).tolist()
            axes.vlines(x, low, high, color=own[configuration]["color"], linewidth=4, alpha=0.4)
            if len(found) > 1:
                each = [1000 * median(own_values) for one in found if (own_values := _of_requests(one, metric))]
                axes.plot([x] * len(each), each, ".", color=own[configuration]["color"], markersize=3)
            line.append((x, middle))
            drawn += [low, high]
        if line:  # not joined: a line from one concurrency to the next would hide what differs at each
            axes.plot(*_columns(line), linestyle="none", **own[configuration])
    if not drawn:
        return Plot(which, title, caption, None, f"The records hold no {which.upper()} of requests (requests.jsonl).")
    _scale(axes, "y", drawn)
    axes.set_xticks(range(len(concurrencies)), [str(number) for number in concurrencies])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("concurrency (requests)")
    axes.set_ylabel(f"{which.upper()} (ms)")
    legend(figure)
    return Plot(which, title, caption, figure)


# -- acceptance -------------------------------------------------------------------------------------------------------


def _accept_lengths(points: Points, own: Looks) -> Plot:
    caption = (
        "Share of verifies that left so many tokens, bonus included, all repeats together: one panel a concurrency."
    )

    def panel(axes: Axes, place: int, count: int, counters: list[dict[str, Any]], look: dict[str, Any]) -> None:
        left = sum_lists(one["emitted_histogram"] for one in counters)
        shares = [100 * number / sum(left) for number in left[1:]]
        spots = [length + beside(place, count) for length in range(1, len(left))]
        axes.bar(spots, shares, width=ROOM / count, color=look["color"], alpha=0.45)
        axes.plot(spots, shares, linestyle="none", markersize=4, **_without(look, "markersize"))
        axes.set_ylabel("verifies (%)")

    figure = _by_concurrency(points, own, panel, "tokens left by a verify")
    return Plot("accept_length", "Accept length", caption, figure, "" if figure else _NO_DRAFTS)


def _acceptance(points: Points, own: Looks) -> Plot:
    caption = (
        "Solid: how often a draft was accepted where all before it were. Dotted: how often of all verifies that "
        "drafted it. All repeats together: one panel a concurrency."
    )

    def panel(axes: Axes, place: int, count: int, counters: list[dict[str, Any]], look: dict[str, Any]) -> None:
        names = ("drafted", "tried", "accepted")
        drafted, tried, accepted = (sum_lists(one["acceptance"][name] for one in counters) for name in names)
        spots = [
            draft + beside(place, count) / 3 for draft in range(1, len(drafted) + 1)
        ]  # equal lines show side by side
        axes.plot(spots, [_percent(*pair) for pair in zip(accepted, tried, strict=True)], **look)
        reached = [_percent(*pair) for pair in zip(accepted, drafted, strict=True)]
        axes.plot(spots, reached, linestyle=":", **_without(look, "label"))
        axes.set_ylim(-3, 103)
        axes.set_ylabel("accepted (%)")

    figure = _by_concurrency(points, own, panel, "draft (1 is the first)")
    return Plot("acceptance", "Acceptance by draft position", caption, figure, "" if figure else _NO_DRAFTS)


_NO_DRAFTS = "The records count no drafts: nothing was drafted, or they come from an engine that does not say."


def _by_concurrency(points: Points, own: Looks, draw_panel: Callable[..., None], across: str) -> Figure | None:
    """A panel for each concurrency at which anything was drafted, all with the same axis; None if there is none."""
    drafting: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for (concurrency, configuration), found in points.items():
        counters = [
            record.counters for record in found if any(record.counters.get("acceptance", {}).get("drafted", ()))
        ]
        if counters:
            drafting[concurrency, configuration] = counters
    concurrencies = list(dict.fromkeys(concurrency for concurrency, _ in drafting))
    names = [name for name in own if any(name == which for _, which in drafting)]
    if not concurrencies:
        return None
    figure, every = panels(len(concurrencies), 2.0)
    for axes, concurrency in zip(every, concurrencies, strict=True):
        for place, name in enumerate(names):
            if counters := drafting.get((concurrency, name), []):
                draw_panel(axes, place, len(names), counters, own[name])
        axes.set_title(f"concurrency {concurrency}", loc="left")
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
    every[-1].set_xlabel(across)
    legend(figure)
    return figure


# -- where time goes --------------------------------------------------------------------------------------------------


def _steps(points: Points, own: Looks) -> Plot:
    caption = (
        "Mean time of an iteration that follows another one. Full: the device works. Hatched: it waits for the next. "
        "Records do not split an iteration further; specbatch trace shows its kernels."
    )
    host = [place for place, found in points.items() if _mean(found, "device_step_s") is None]
    bars = {}
    for place, found in points.items():
        step, busy = (_mean(found, metric) for metric in ("step_time_s", "device_step_s"))
        if step is not None:
            full = step if busy is None else min(busy, step)
            bars[place] = [1000 * full, 1000 * (step - full)]
    if not bars:
        return Plot("steps", "Time of a step", caption, None, "The records hold no step times.")
    remark = ""
    if unsplit := [place for place in host if place in bars]:
        of = "all points" if len(unsplit) == len(bars) else _names(unsplit)
        remark = f"Not split, for want of device clocks (no CUDA device): the host's time to launch and wait, of {of}."
    figure = _stacked(bars, own, ("an iteration works", "the device waits"), "step (ms)")
    return Plot("steps", "Time of a step", caption, figure, remark)


def _shares(points: Points, own: Looks) -> Plot:
    title = "Where the run's time went"
    caption = (
        "Share of the measured window. Full: iterations. Hatched: the device waits between two of them. Empty: "
        "prompts, and whatever else lies between iterations."
    )
    bars = {}
    for place, found in points.items():
        shares = [share for record in found if (share := _share(record)) is not None]
        if shares:
            bars[place] = [median(column) for column in zip(*shares, strict=True)]
    if not bars:
        return Plot("shares", title, caption, None, "The records hold no times of iterations.")
    figure = _stacked(bars, own, ("iterations", "the device waits", "prompts and the rest"), "share of the run (%)")
    return Plot("shares", title, caption, figure)


def _share(record: RunRecord) -> list[float] | None:
    """Percent of the window in iterations, in gaps between them, in anything else."""
    counters, window = record.counters, record.metrics.get("duration_s")
    if not window or not counters.get("iterations"):
        return None
    if counters.get("device_steps"):
        busy, idle = counters["device_s"], counters["device_idle_s"]
    else:
        busy, idle = counters["iteration_s"], 0.0
    return [100 * part / window for part in (busy, idle, max(window - busy - idle, 0.0))]


def _stacked(bars: dict[tuple[Any, ...], list[float]], own: Looks, parts: tuple[str, ...], across: str) -> Figure:
    """A horizontal bar for each point: full, hatched, empty."""
    from matplotlib.patches import Patch

    concurrencies = _concurrencies(bars)
    figure, (axes,) = panels(1, 0.6 + 0.24 * (len(bars) + len(concurrencies)))
    rows = dict(zip(bars, _grouped(bars), strict=True))
    for (concurrency, name), values in bars.items():
        row, begin = rows[concurrency, name], 0.0
        for place, value in enumerate(values):
            if value:
                axes.barh(row, value, left=begin, height=0.8, **_face(place, own[name]["color"]))
            begin += value
        axes.plot(0, row, linestyle="none", clip_on=False, **own[name])
    middles = [median(row for place, row in rows.items() if place[0] == concurrency) for concurrency in concurrencies]
    axes.set_yticks(middles, [str(concurrency) for concurrency in concurrencies])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(across)
    axes.set_ylabel("concurrency")
    found = (place for place in range(len(parts)) if any(values[place] for values in bars.values()))
    legend(figure, *(Patch(label=parts[place], **_face(place, INK)) for place in found))
    return figure


def _grouped(places: Iterable[tuple[Any, ...]]) -> Iterator[int]:
    """A row for each, and an empty one where the concurrency changes."""
    row, before = -1, None
    for concurrency, _ in places:
        row += 1 if before in (None, concurrency) else 2
        before = concurrency
        yield row


def _face(place: int, colour: str) -> dict[str, Any]:
    """Of the parts of a bar: full, hatched, empty."""
    inside: tuple[dict[str, Any], ...] = ({"facecolor": colour}, {"fill": False, "hatch": "////"}, {"fill": False})
    return inside[place] | {"edgecolor": colour, "alpha": 0.85}


# -- small helpers ----------------------------------------------------------------------------------------------------


def _mean(records: Iterable[RunRecord], metric: str) -> float | None:
    values = [value for record in records if (value := record.metrics.get(metric)) is not None]
    return fmean(values) if values else None


def _of_requests(record: RunRecord, metric: str) -> list[float]:
    """Of each finished request that has it."""
    rows = (row for row in record.requests if row.get("finish_reason") not in INCOMPLETE)
    return [value for row in rows if (value := row.get(metric)) is not None]


def _concurrencies(points: Iterable[tuple[Any, ...]]) -> list[int]:
    return list(dict.fromkeys(concurrency for concurrency, _ in points))


def _columns(places: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    found = list(places)
    return [x for x, _ in found], [y for _, y in found]


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else float("nan")


def _without(look: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in look.items() if key != name}


def _names(places: Sequence[tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} at {concurrency}" for concurrency, name in places)


def _scale(axes: Axes, axis: str, values: Iterable[float]) -> None:
    """Logarithmic for a wide range, with plain numbers; else from zero."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    found = [value for value in values if value > 0]
    of_axis = axes.xaxis if axis == "x" else axes.yaxis
    if found and max(found) > WIDE * min(found):
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
        of_axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        of_axis.set_minor_formatter(NullFormatter())
    else:
        (axes.set_xlim if axis == "x" else axes.set_ylim)(0, 1.15 * max(found, default=1))
        of_axis.set_major_locator(MaxNLocator(5))
    of_axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
