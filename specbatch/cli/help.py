"""`--help` of a command: names of options are whole at every width.

Typer's own page gives names, negative names, types and help a column each, and cuts names that do not fit. Here a name
has its help beside it on a wide terminal, and below it on a narrow one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperArgument, TyperCommand

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

DETAILS = "\n\nDetails:"  # of a command's text, which only the whole page has
# The options of the short pages, by the names of parameters.
COMMON = (
    *("model", "device", "spec", "configs", "algorithm", "draft", "draft_tokens"),
    *("dataset", "data", "answers", "task", "input_len", "output_len", "limit", "num_fewshot"),
    *("prompt", "stream", "max_new_tokens", "temperature", "chat_template", "steps", "lr", "sections", "batch"),
    *("sampled", "concurrency", "prompts_per_concurrency", "repeats"),
    *("output", "overwrite", "skip_bad", "dry_run", "as_json"),
)
LEAST_HELP = 48  # columns of the help beside a name
_INDENT, _FRAME = 4, 4


class Command(TyperCommand):
    """A command with such a page. That of a command with `HELP_ALL` has the common options, and the names of the
    others."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page of `--help`."""
        self.page(ctx, whole=all(item.name != "help_all" for item in self.params))

    def page(self, ctx: Any, *, whole: bool) -> None:
        """Usage, the text of the command, and a box for each panel of arguments and options."""
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        text, _, details = (self.help or "").partition(DETAILS)
        console.print(Padding(Text.from_markup(text + details if whole else text), (0, 1, 1, 1)))
        panels: dict[str, list[tuple[str, Text]]] = {"Arguments": [], "Options": []}
        others: dict[str, list[str]] = {}
        for item in self._in_order(ctx, whole=whole):
            if (record := item.get_help_record(ctx)) is None:
                continue
            is_argument = isinstance(item, TyperArgument)
            panel = getattr(item, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            if whole or is_argument or item.required or item.name in (*COMMON, "help", "help_all"):
                shown = panel if whole or is_argument else "Options"
                panels.setdefault(shown, []).append((record[0], _help(item, record[1])))
            else:
                others.setdefault(panel, []).append(" / ".join([*item.opts, *item.secondary_opts]))
        if others:
            rows = [(f"{panel}:", Text("  ".join(names))) for panel, names in others.items()]
            panels["Others, which --help-all describes"] = rows
        for title, rows in panels.items():
            if rows:
                body = _body(rows, console.width - _FRAME)
                console.print(Panel(body, title=title, title_align="left", border_style="dim"))

    def _in_order(self, ctx: Any, *, whole: bool) -> list[Any]:
        """The parameters; on the short page the common ones in the order of `COMMON`."""
        every = self.get_params(ctx)
        if whole:
            return every
        return sorted(every, key=lambda item: COMMON.index(item.name) if item.name in COMMON else len(COMMON))


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        assert isinstance(ctx.command, Command)
        ctx.command.page(ctx, whole=True)
        raise typer.Exit


HELP_ALL = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options, and details.")


def _help(item: Any, text: str) -> Text:
    """The help of an option, which is markup, and after it what Typer appends: the default in brackets."""
    from rich.text import Text

    own = item.help or ""
    more = text.removeprefix(own).replace("\\[", "[").strip()
    return Text.from_markup(own).append(f" {more}" if more else "", style="dim")


def _body(rows: list[tuple[str, Text]], width: int) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    longest = max(len(name) for name, _ in rows)
    if longest + LEAST_HELP > width:
        stacked: list[RenderableType] = []
        for name, help in rows:
            stacked += [Text(name, style="bold cyan"), Padding(help, (0, 0, 0, _INDENT))]
        return Group(*stacked)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column()
    for name, help in rows:
        table.add_row(Text(name), help)
    return table
