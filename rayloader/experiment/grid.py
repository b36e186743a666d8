"""A table of figures that can be shown on a terminal, in a notebook and on a page."""

from __future__ import annotations

import dataclasses
import html
import io
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import TextType

_WIDTH = 140
"""Columns of a table that goes to no terminal [characters]."""
_KEYS = 2
"""First columns of a grid that say which row it is [columns]."""
_CELL = "padding:2px 8px;text-align:{side};white-space:nowrap"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A table that never cuts a figure: what does not fit beside the rest goes on below it.

    Attributes:
        table: of text, without borders, one blank between its columns.
        keys: its first columns, which stand in front of every part.
        spare: headers of columns that are left out where there is no room and they are all 0.
    """

    table: Table
    keys: int
    spare: tuple[str, ...] = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """The parts, as few as the width allows."""
        widths = [_width([column.header, *column.cells]) for column in self.table.columns]
        places: Sequence[int] = range(len(widths))
        if _beside(widths) > options.max_width:
            places = [place for place in places if not self._is_spare(place)]
        for number, part in enumerate(_parts(widths, places, self.keys, options.max_width)):
            if number:
                yield ""
            yield self._part(part, self.table.title if not number else None)

    def _is_spare(self, place: int) -> bool:
        column = self.table.columns[place]
        return str(column.header) in self.spare and {*column.cells} <= {"", "0"}

    def _part(self, places: Sequence[int], title: TextType | None) -> Table:
        columns = [self.table.columns[place] for place in places]
        part = plain_table(title)
        for column in columns:
            part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
        cells = zip(*(column.cells for column in columns), strict=True)
        for row, texts in zip(self.table.rows, cells, strict=True):
            part.add_row(*texts, style=row.style, end_section=row.end_section)
        return part


def plain_table(title: TextType | None = None) -> Table:
    """A table without borders and rows, one blank between columns."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=None,
        pad_edge=False, padding=(0, 1), collapse_padding=True,
    )  # fmt: skip


def _parts(
    widths: Sequence[int], places: Sequence[int], keys: int, width: int
) -> Iterator[list[int]]:
    """Columns side by side, those in ``keys`` first in each; one more at least, fit or not."""
    first = list(places[:keys])
    part = list(first)
    for place in places[keys:]:
        if len(part) > keys and _beside([widths[it] for it in (*part, place)]) > width:
            yield part
            part = list(first)
        part.append(place)
    yield part


def _beside(widths: Sequence[int]) -> int:
    return sum(widths) + len(widths) - 1


def _width(cells: Sequence[RenderableType]) -> int:
    return max(cell_len(line) for cell in cells for line in str(cell).split("\n"))


@dataclasses.dataclass(frozen=True)
class Grid:
    r"""Cells as text, already rounded.

    Attributes:
        title: what it shows; a line above it.
        columns: their names; ``\n`` breaks a line. Names that begin with ``<`` are of text,
            which stands to the left (the sign is not shown).
        rows: cells of each row, in the order of the columns.
        bold: the rows that stand out, by number.
        notes: lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def table(self) -> Fitted:
        """For a terminal; without the notes."""
        table = plain_table(self.title or None)
        for name in self.columns:
            text = name.startswith("<")
            table.add_column(
                name.removeprefix("<"), justify="left" if text else "right", no_wrap=True
            )
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if number in self.bold else None)
        return Fitted(table, _KEYS)

    def text(self) -> str:
        """As plain lines."""
        console = Console(file=io.StringIO(), width=_WIDTH, highlight=False)
        console.print(self.table())
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def html(self) -> str:
        """As a table with notes, which needs no style sheet."""
        heads = "".join(
            f'<th style="{_style(name)}">{_lines(name.removeprefix("<"))}</th>'
            for name in self.columns
        )
        rows = "".join(self._row(number, row) for number, row in enumerate(self.rows))
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return (
            f"<div><b>{html.escape(self.title)}</b>"
            f'<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{notes}</div>"
        )

    def _row(self, number: int, row: tuple[str, ...]) -> str:
        weight = ";font-weight:bold" if number in self.bold else ""
        cells = "".join(
            f'<td style="{_style(name)}{weight}">{_lines(cell)}</td>'
            for name, cell in zip(self.columns, row, strict=True)
        )
        return f"<tr>{cells}</tr>"


def _style(column: str) -> str:
    return _CELL.format(side="left" if column.startswith("<") else "right")


def _lines(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
