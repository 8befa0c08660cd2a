"""`--help` of a command: names of options are whole at every width.

Typer's own page gives names, negative names, types and help a column each, and cuts names that do not fit. Here a name
has its help beside it on a wide terminal, and below it on a narrow one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LEAST_HELP = 48  # columns of the help beside a name
_INDENT, _FRAME = 4, 4


class Command(TyperCommand):
    """A command with such a page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page: usage, the text of the command, and a box for each panel of arguments and options."""
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        console.print(Padding(Text.from_markup(self.help or ""), (0, 1, 1, 1)))
        panels: dict[str, list[tuple[str, Text]]] = {"Arguments": [], "Options": []}
        for item in self.get_params(ctx):
            if (record := item.get_help_record(ctx)) is not None:
                usual = "Arguments" if isinstance(item, TyperArgument) else "Options"
                panel = getattr(item, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).append((record[0], _help(item, record[1])))
        for title, rows in panels.items():
            if rows:
                body = _body(rows, console.width - _FRAME)
                console.print(Panel(body, title=title, title_align="left", border_style="dim"))


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
