"""Progress for people: moving lines on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rayloader.errors import counted
from rayloader.experiment.ranks import Loader, Moved
from rayloader.experiment.read import EpochResult, ReadJob
from rayloader.experiment.report import GB, epoch_line, title
from rayloader.experiment.sweep import Trial

_DRAWN_EVERY = 0.4
"""Time between two pictures in a notebook [s]."""
_PAGE_WIDTH = 110
"""Of progress in a notebook [characters]."""


class Counting:
    """How many have been done so far, and how fast; a context."""

    def __init__(self, console: Console, what: str, total: int | None = None) -> None:
        """Count ``what`` (such as "files written"), of a known total or not."""
        bar = BarColumn() if total is not None else SpinnerColumn()
        self._progress = Progress(
            bar, TextColumn("{task.description}"), console=console, transient=True
        )
        self._what = what
        self._total = total
        self.done = 0
        self._began = time.monotonic()
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Counting:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _stop(self._progress)

    def __call__(self, done: int) -> None:
        """So many are done."""
        self.done = done
        rate = done / max(time.monotonic() - self._began, 1e-3)
        of = f" of {self._total:,}" if self._total is not None else ""
        text = f"{done:,}{of} {self._what}, {rate:,.0f}/s"
        self._progress.update(self._task, completed=done, description=text)


class LiveWatch:
    """Shows how a read job goes on; a context, and a ``Watch``."""

    def __init__(self, console: Console, job: ReadJob) -> None:
        """Write to ``console``, which is best not the one that the result goes to."""
        self._console = console
        self._job = job
        self._progress = Progress(
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
        )
        self._lines: list[TaskID] = []
        self._speeds: list[_Speed] = []

    def __enter__(self) -> LiveWatch:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _stop(self._progress)

    def listed(self, entries: int) -> None:
        """See ``Watch``."""
        if not self._lines:
            self._lines = [self._progress.add_task("", total=None, name="listing", text="")]
        self._progress.update(self._lines[0], text=counted(entries, "file"))

    def starting(self, loader: Loader) -> None:
        """See ``Watch``."""
        for line in self._lines:
            self._progress.remove_task(line)
        self._speeds = [_Speed() for _ in range(self._job.ranks)]
        self._lines = [
            self._progress.add_task("", total=None, name=f"rank {rank}", text="starting")
            for rank in range(self._job.ranks)
        ]
        if loader != "rayloader" or self._job.compare:
            self._print(Text(f"{title(loader, self._job)}:", style="bold"))

    def moved(self, rank: int, moved: Moved) -> None:
        """See ``Watch``."""
        self._progress.update(
            self._lines[rank],
            total=moved.steps_expected,
            completed=moved.steps,
            name=f"rank {rank}, epoch {moved.epoch}",
            text=self._speeds[rank].text(moved),
        )

    def epoch_done(self, loader: Loader, result: EpochResult) -> None:
        """See ``Watch``."""
        self._print(Text(f"  {epoch_line(result)}"))
        for line in self._lines:
            self._progress.update(line, completed=0, text="")

    def said(self, rank: int, text: str) -> None:
        """See ``Watch``."""
        self._print(Text(f"rank {rank}: {text}", style="yellow"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)


class FleetWatch:
    """Shows how an epoch of a Fleet goes on: a line per rank. A context.

    On a terminal the lines move; in a notebook they are one display that is replaced (no widgets);
    elsewhere only what was not expected is said, to ``console``.
    """

    def __init__(self, console: Console, shown: bool | None = None) -> None:
        """Write to ``console``; ``shown``: progress too; ``None``: where somebody looks on."""
        self._console = console
        self._page = _notebook_page() if shown is not False else None
        self._moving = shown is not False and console.is_terminal and self._page is None
        self._progress = Progress(
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
        )
        self._lines: list[TaskID] = []
        self._speeds: list[_Speed] = []
        self._drawn_at = 0.0

    def __enter__(self) -> FleetWatch:
        if self._moving:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._moving:
            self._progress.stop()
        if self._page is not None:
            self._page("")

    def ranks_changed(self, ranks: int) -> None:
        """So many ranks read now."""
        for line in self._lines:
            self._progress.remove_task(line)
        self._speeds = [_Speed() for _ in range(ranks)]
        self._lines = [
            self._progress.add_task("", total=None, name=f"rank {rank}", text="starting")
            for rank in range(ranks)
        ]

    def moved(self, rank: int, moved: Moved) -> None:
        """A rank is so far."""
        if rank >= len(self._lines):
            return
        self._progress.update(
            self._lines[rank],
            total=moved.steps_expected or None,
            completed=moved.steps,
            name=f"rank {rank}, epoch {moved.epoch}",
            text=self._speeds[rank].text(moved),
        )
        if self._page is not None and time.monotonic() > self._drawn_at + _DRAWN_EVERY:
            self._drawn_at = time.monotonic()
            self._page(_as_html(self._progress))

    def said(self, text: str) -> None:
        """Something happened that was not expected."""
        self._console.print(Text(text, style="yellow"), soft_wrap=not self._console.is_terminal)


def console_of_progress() -> Console:
    """Where progress goes: beside the result on a terminal, and into the page of a notebook."""
    return Console(stderr=not _notebook(), highlight=False)


class SweepWatch:
    """Shows how a sweep goes on: a bar of the trials, and a line for each. A context."""

    def __init__(self, console: Console, shown: bool | None = None) -> None:
        """Write to ``console``; ``shown``: progress too; ``None``: where somebody looks on."""
        self._console = console
        self._lines = shown is not False
        self._moving = shown is not False and console.is_terminal and not _notebook()
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("trials", total=None)

    def __enter__(self) -> SweepWatch:
        if self._moving:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._moving:
            self._progress.stop()

    def trials(self, done: int, total: int) -> None:
        """So many trials are recorded."""
        text = f"{done} of {counted(total, 'trial')}"
        self._progress.update(self._task, completed=done, total=total, description=text)

    def trial_done(self, trial: Trial, bytes_per_second: float, limit: str) -> None:
        """A trial has been measured."""
        if self._lines:
            self._console.print(
                f"{counted(trial.ranks, 'rank')} x {trial.concurrency} in flight: "
                f"{bytes_per_second / GB:.3f} GB/s, limit: {limit}"
            )


def _notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def _notebook_page() -> Callable[[str], None] | None:
    """What shows HTML in the notebook that this runs in, in place of what it showed before."""
    if not _notebook():
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda page: handle.update(HTML(page))


def _as_html(progress: Progress) -> str:
    console = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, force_jupyter=False)
    console.print(progress.get_renderable())
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


class _Speed:
    """What a rank did between two reports."""

    def __init__(self) -> None:
        self._last: tuple[float, Moved] | None = None

    def text(self, moved: Moved) -> str:
        now, last = time.monotonic(), self._last
        self._last = now, moved
        if last is None or last[1].epoch != moved.epoch or now == last[0]:
            return ""
        seconds = now - last[0]
        gigabytes = (moved.bytes - last[1].bytes) / GB / seconds
        files = (moved.files - last[1].files) / seconds
        # Less than before after a restart, whose reader counts anew.
        in_flight = max(0.0, (moved.read_seconds - last[1].read_seconds) / seconds)
        reading = f", {in_flight:.0f} in flight" if moved.read_seconds else ""
        return f"{gigabytes:.2f} GB/s, {files:,.0f} files/s{reading}"


def _stop(progress: Progress) -> None:
    """Stop it if it was started; otherwise rich would write an empty line."""
    if progress.console.is_terminal:
        progress.stop()
