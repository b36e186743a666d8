"""A table of figures that can be shown on a terminal, in a notebook and on a page."""

from __future__ import annotations

import dataclasses
import html
import io

from rich.console import Console
from rich.table import Table

_WIDTH = 140
"""Columns of a table that goes to no terminal [characters]."""
_CELL = "padding:2px 8px;text-align:{side};white-space:nowrap"


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

    def table(self) -> Table:
        """For a terminal; without the notes."""
        table = Table(
            title=self.title or None, title_justify="left", title_style="bold", box=None,
            pad_edge=False, padding=(0, 1), collapse_padding=True,
        )  # fmt: skip
        for name in self.columns:
            text = name.startswith("<")
            table.add_column(
                name.removeprefix("<"), justify="left" if text else "right", no_wrap=True
            )
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if number in self.bold else None)
        return table

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
