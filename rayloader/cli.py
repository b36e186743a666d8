"""The ``rayloader`` command: arguments, messages, and one call each."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_type_hints

import click

from rayloader.config import MIB, Options
from rayloader.errors import (
    CatalogError,
    OptionError,
    RayloaderError,
    ReceiptError,
    StateMismatch,
    UsageError,
    counted,
    printable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rayloader.experiment.doctor import Finding
    from rayloader.experiment.read import ReadJob, ReadResult
    from rayloader.storage.access import Access

FAILED, MISUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit statuses: something failed; the options or the source are wrong; Ctrl-C; SIGTERM."""
PREFIX = "RAYLOADER"
"""Of options in the environment."""
DEBUG = "RAYLOADER_DEBUG"
"""Set to 1, errors come with their tracebacks."""
NOT_OPTIONS = (DEBUG, "RAYLOADER_RUN_ID", "RAYLOADER_DLIO", "RAYLOADER_KUBERAY")
"""How variables begin that are no options: rayloader's own, DLIO's adapter's, the tests'."""
_USERS_OWN = (OptionError, CatalogError, StateMismatch, ReceiptError, UsageError)
_NOTES = 10
"""Lines of notes shown with an error [lines]."""
WIDTH = 100
"""Columns of help, and of a table that goes to a file or a pipe [characters]."""
SWEEP_WIDTH = 140
"""The same of a sweep's table [characters]."""
_SIZE = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*([kmgt]?)(i?b|)", re.IGNORECASE)

Command = TypeVar("Command", bound=Callable[..., Any])


def size(text: str | int) -> int:
    """Bytes, spelled as GNU tools spell them: 8MiB = 8M = 8388608, 8MB = 8000000 [bytes].

    Raises:
        click.BadParameter: it is none.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 322624, 8MiB, 512M or 1.5GB")
    number, prefix, unit = match.groups()
    base = 1000 if unit.lower() == "b" else 1024
    return int(float(number.replace(",", "")) * base ** " kmgt".index(prefix.lower() or " "))


class Sections(click.Command):
    """A command whose help shows its options under headings: ``heading=`` of :func:`option`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those of a heading together, in the order they were declared."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            # An argument is told about in the text.
            if record is not None and record[1]:
                heading = getattr(parameter, "heading", "Help")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Option(click.Option):
    """An option that knows its heading."""

    def __init__(self, *names: Any, heading: str = "Options", **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading


def option(*names: str, heading: str = "Options", **more: Any) -> Callable[[Command], Command]:
    """``click.option`` under a heading, with its default shown."""
    more.setdefault("show_default", True)
    return click.option(*names, cls=Option, heading=heading, **more)


def of_reader(
    name: str, heading: str, text: str, flag: str | None = None, **more: Any
) -> Callable[[Command], Command]:
    """The command-line option of a field of ``Options``, with its default and its choices."""
    default, words = getattr(Options, name), get_args(get_type_hints(Options)[name])
    dashed = name.replace("_", "-")
    if isinstance(default, bool):
        flag = flag or f"--{dashed}/--no-{dashed}"
    elif name.endswith("_bytes"):
        more |= {"type": size, "metavar": "SIZE"}
        default = f"{default // MIB}MiB"
    elif isinstance(default, str) and words:
        more |= {"type": click.Choice(words)}
    return option(flag or f"--{dashed}", name, heading=heading, default=default, help=text, **more)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Options that several commands have, as one decorator."""

    def decorate(command: Command) -> Command:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A subcommand whose options may also come from ``RAYLOADER_<OPTION>`` in the environment."""
    return cli.command(
        name,
        cls=Sections,
        context_settings={"auto_envvar_prefix": PREFIX},
        epilog="Sizes are bytes, or such as 8MiB = 8M (powers of 1024) and 8MB (powers of 1000). "
        "Every option may also be given in the environment: --batch-size as RAYLOADER_BATCH_SIZE.",
    )


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from rayloader.experiment.report import environment

    found = environment()
    parts = [f"{name} {found[name]}" for name in ("python", "ray", "torch", "pyarrow", "numpy")]
    click.echo(f"rayloader {found['rayloader']} ({', '.join(parts)}, engine {found['engine']})")
    context.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    epilog="Exit status: 0 done; 1 something failed; 2 the options or the source are wrong; "
    "130 interrupted. RAYLOADER_DEBUG=1 shows tracebacks.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions and the engine that reads files here, and exit.",
)
def cli() -> None:
    """Read many files with persistent Ray readers: make test data, list it, read it, measure."""
    for name in sorted(_unknown_variables()):
        near = difflib.get_close_matches(name, _known_variables(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        click.echo(f"rayloader: warning: {printable(name)} is no option{hint}", err=True)


def _known_variables() -> set[str]:
    """Options in the environment: of any command, and of a reader."""
    names = {field.name for field in dataclasses.fields(Options)}
    for command in cli.commands.values():
        names.update(parameter.name or "" for parameter in command.params)
    return {f"{PREFIX}_{name.upper()}" for name in names}


def _unknown_variables() -> set[str]:
    """Variables of the environment that look like options and are none."""
    ours = {name for name in os.environ if name.startswith(f"{PREFIX}_")}
    return {name for name in ours - _known_variables() if not name.startswith(NOT_OPTIONS)}


ORDER = "What, and in which order"
BOUNDS = "How much at once"
WAY = "From where to where"
FAULTS = "When things fail"
TRAINING = "The training that is imitated"
RESULT = "Result and comparison"
OBJECTS = "Object storage (credentials come from the environment)"

_of_bucket = _together(
    of_reader(
        "endpoint_url",
        OBJECTS,
        "Where S3 requests go; not given: AWS_ENDPOINT_URL, else Amazon.",
        type=str,
        metavar="URL",
    ),
    of_reader(
        "region",
        OBJECTS,
        "That S3 requests are signed for; not given: AWS_REGION.",
        type=str,
        metavar="NAME",
    ),
    of_reader(
        "ca_bundle",
        OBJECTS,
        "Certificate authorities to trust; not given: AWS_CA_BUNDLE, else the system's.",
        type=str,
        metavar="FILE",
    ),
)
_of_training = _together(
    option(
        "--compute-seconds",
        heading=TRAINING,
        type=float,
        default=0.0,
        help="Sleep so long after each batch, as a training step would take [s].",
    ),
    option("--touch", heading=TRAINING, is_flag=True, help="Look at every byte that is delivered."),
)


@_command("generate")
@click.argument("directory", metavar="DIR")
@option("--files", type=int, required=True, help="How many files.")
@option("--size", type=size, metavar="SIZE", required=True, help="Of each file, or the mean.")
@option(
    "--size-stdev",
    type=size,
    metavar="SIZE",
    default=0,
    help="Sizes are normally distributed around --size with this standard deviation.",
)
@option("--subfolders", type=int, default=0, help="Spread the files over so many folders.")
@option("--seed", type=int, default=0, help="Another seed gives other bytes.")
@_of_bucket
def generate_command(
    directory: str,
    files: int,
    endpoint_url: str | None,
    region: str | None,
    ca_bundle: str | None,
    **recipe: int,
) -> None:
    """Fill DIR with test files.

    DIR is a directory or s3://BUCKET/PREFIX. The files' catalog, with sizes and checksums, is saved
    beside it as DIR.arrow. The bytes cannot be compressed, each file is unique, and the same
    arguments give the same bytes on any machine. Repeated, it finishes what was interrupted and
    does nothing when all is there.
    """
    from rayloader.experiment.generate import generate
    from rayloader.experiment.live import Counting

    options = Options(endpoint_url=endpoint_url, region=region, ca_bundle=ca_bundle)
    access = _access(directory, options)
    try:
        with Counting(_console(stderr=True), "files written", files) as counting:
            catalog = generate(directory, files, progress=counting, access=access, **recipe)
    except KeyboardInterrupt:
        raise click.Abort("the same command finishes what it began") from None
    before = "" if counting.done else " (complete before: nothing was written)"
    click.echo(
        f"{counted(len(catalog), 'file')}, {(catalog.total_bytes or 0) / 1e9:.2f} GB in "
        f"{printable(directory)}; catalog: {printable(directory.rstrip('/'))}.arrow{before}"
    )


@_command("catalog")
@click.argument("source", metavar="SRC...", nargs=-1, required=True)
@option("-o", "--output", metavar="FILE.arrow", required=True, help="The catalog to write.")
@option("--stat/--no-stat", default=False, help="Look up the files' sizes too, 64 at a time.")
@option("--etags/--no-etags", default=False, help="Keep a bucket's ETags, for read --verify.")
@_of_bucket
def catalog_command(
    source: tuple[str, ...], output: str, stat: bool, etags: bool, **where: Any
) -> None:
    """List SRC and save what exists.

    SRC is a directory (all files below it), s3://BUCKET/PREFIX (all objects), a quoted glob (** is
    any depth), another catalog (.arrow or .parquet), or files. A bucket's catalog has the sizes.
    """
    from rayloader.catalog import Catalog
    from rayloader.experiment.live import Counting

    one_or_many = _one_or_many(source)
    _warn_of_half(one_or_many)
    access = _access(one_or_many, Options.of(where))
    with Counting(_console(stderr=True), "files found") as counting:
        catalog = Catalog.from_source(
            one_or_many, stat=stat, progress=counting, access=access, etags=etags
        )
    catalog.save(output)
    size_ = f", {catalog.total_bytes / 1e9:.2f} GB" if catalog.total_bytes is not None else ""
    click.echo(f"{counted(len(catalog), 'file')}{size_}; catalog: {printable(output)}")


@_command("read")
@click.argument("source", metavar="SRC...", nargs=-1, required=True)
@option("--ranks", heading=TRAINING, type=int, default=1, help="Training processes, all here.")
@option("--epochs", heading=TRAINING, type=int, default=1, help="How many.")
@_of_training
@of_reader("batch_size", ORDER, "Samples per batch and rank.")
@of_reader("shuffle", ORDER, "Permute the files anew each epoch.")
@of_reader("seed", ORDER, "Of the permutation.")
@of_reader("uneven", ORDER, "Samples that do not divide by the ranks: leave out, or read twice.")
@of_reader("drop_last", ORDER, "Leave out the short last batch.")
@of_reader(
    "ordered", ORDER, "In the plan's order, or batches as they complete.", "--ordered/--unordered"
)
@of_reader("concurrency", BOUNDS, "Ceiling on reads in flight per rank.")
@of_reader("memory_bytes", BOUNDS, "Bound on batches in memory per rank.")
@of_reader("part_bytes", BOUNDS, "A larger file is read as parallel ranges of this length.")
@of_reader(
    "read_ahead_batches",
    BOUNDS,
    "Batches read ahead at most; not given: as memory allows.",
    type=int,
)
@of_reader("deliver", WAY, "Bring the bytes to the training process, or drop them in the reader.")
@option("--direct", heading=WAY, is_flag=True, help="O_DIRECT; an error where it is refused.")
@option(
    "--direct-fallback",
    heading=WAY,
    is_flag=True,
    help="O_DIRECT; where it is refused, through the page cache, and counted.",
)
@of_reader("drop_cache", WAY, "Drop each file from the page cache before it is read.")
@of_reader("engine", WAY, "What reads files: the C extension, or the same in Python.")
@of_reader("channel", WAY, "To the training process: shared memory, or Ray's object store.")
@of_reader("ray", WAY, "Which Ray: auto, private, cluster, or HOST:PORT.")
@of_reader("cpus", WAY, "CPUs of a reader: those of its rank, or all of the node.")
@_of_bucket
@of_reader("client", OBJECTS, "What reads S3 objects and ranges.")
@of_reader("request_timeout", OBJECTS, "A request that takes longer is sent again [s].")
@of_reader("retry_seconds", OBJECTS, "How long one object is asked for again [s].")
@of_reader("verify", FAULTS, "Compare every file with its checksum in the catalog.")
@of_reader("on_error", FAULTS, "A file that cannot be read ends the run, or is left out.")
@of_reader("skip_budget_files", FAULTS, "With skip: files per epoch and rank that may fail.")
@of_reader("skip_budget_share", FAULTS, "With skip: share of the files that may fail [0..1].")
@of_reader("max_restarts", FAULTS, "Restarts of a reader in a row without a batch.")
@of_reader("start_timeout", FAULTS, "Ray and the readers must be up within this [s].")
@of_reader("stall_seconds", FAULTS, "No batch for this long: a warning [s].")
@of_reader("read_timeout", FAULTS, "No progress of any read for this long: an error [s].")
@option(
    "--json",
    heading=RESULT,
    metavar="FILE",
    help="Write environment, options and all receipts to FILE; -: to standard output.",
)
@option(
    "--compare",
    heading=RESULT,
    type=click.Choice(["torch"]),
    help="Then read the same with torch's DataLoader, and show both.",
)
@option("--workers", heading=RESULT, type=int, default=2, help="Of torch's DataLoader, per rank.")
@option(
    "--worker-start",
    heading=RESULT,
    type=click.Choice(["fork", "spawn", "forkserver"]),
    help="How torch's workers are started; not given: as this Python does it.",
)
def read_command(source: tuple[str, ...], json: str | None, **given: Any) -> None:
    """Read SRC on one or several ranks, and show what it took.

    SRC is a directory (all files below it), s3://BUCKET/PREFIX (all objects), a quoted glob (** is
    any depth), a catalog (.arrow or .parquet), or files. Each rank is a process with a RankDataset;
    a private Ray is started for them and ended with them.
    """
    from rayloader.experiment.live import LiveWatch
    from rayloader.experiment.read import read

    job = _job(_one_or_many(source), given)
    if json is not None:
        _require_writable(json)
    _warn_of_half(job.source)
    _access(job.source, job.options)
    results: list[ReadResult] = []
    try:
        with LiveWatch(_console(stderr=True), job) as watch:
            results.append(read(job, watch, cut_short=results.append))
    finally:
        for result in results:
            _show(result, json)


def _job(source: str | list[str], given: dict[str, Any]) -> ReadJob:
    """The job that the command line describes."""
    from rayloader.experiment.read import ReadJob
    from rayloader.storage.uri import wants_direct

    fallback = given.pop("direct_fallback")
    given["direct"] = "fallback" if fallback else given["direct"] or wants_direct(source)
    given["compare"] = given["compare"] is not None
    own = {field.name for field in dataclasses.fields(ReadJob)}
    options = Options.of({name: value for name, value in given.items() if name not in own})
    return ReadJob(
        source, options=options, **{name: value for name, value in given.items() if name in own}
    )


def _show(result: ReadResult, json_file: str | None) -> None:
    """Print the tables; write the document."""
    from rayloader.experiment import report

    console = _console(stderr=json_file == "-")
    for part in report.parts(result):
        console.print(part)
    if json_file is None:
        return
    text = json.dumps(report.document(result, ["rayloader", *sys.argv[1:]]), indent=1) + "\n"
    if json_file == "-":
        click.echo(text, nl=False)
    else:
        with open(json_file, "w") as file:
            file.write(text)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them, or sizes."""

    name = "numbers"

    def __init__(self, each: Callable[[str], int] = int) -> None:
        self._each = each

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers, as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._each(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not like 1,2,4", parameter, context)


@_command("sweep")
@click.argument("source", metavar="SRC...", nargs=-1, required=True)
@option("--out", metavar="DIR", required=True, help="For the records, the table and the report.")
@option("--ranks", type=Numbers(), metavar="N,…", default="1,2", help="Numbers of ranks.")
@option(
    "--concurrency",
    type=Numbers(),
    metavar="N,…",
    default="1,8,64",
    help="Ceilings on reads in flight per rank.",
)
@option(
    "--size",
    "sizes",
    type=Numbers(size),
    metavar="SIZE,…",
    help="Make files of each size below SRC first, and measure each.",
)
@option("--files", type=int, default=1000, help="With --size: how many of each.")
@option("--epochs", type=int, default=2, help="Measured in each trial, after one of warm-up.")
@option("--repeats", type=int, default=3, help="Trials of each point.")
@option(
    "--cache",
    type=click.Choice(["any", "hot", "cold"]),
    default="any",
    help="What the page cache must hold before each epoch: anything, all files, or none.",
)
@option("--order-seed", type=int, default=0, help="Of the order of the trials.")
@_of_training
@of_reader("batch_size", ORDER, "Samples per batch and rank.")
@of_reader("memory_bytes", BOUNDS, "Bound on batches in memory per rank.")
@of_reader("part_bytes", BOUNDS, "A larger file is read as parallel ranges of this length.")
@of_reader("deliver", WAY, "Bring the bytes to the consumers, or drop them in the readers.")
@option("--direct", heading=WAY, is_flag=True, help="O_DIRECT; an error where it is refused.")
@of_reader("engine", WAY, "What reads files: the C extension, or the same in Python.")
@of_reader("ray", WAY, "Which Ray: auto, private, cluster, or HOST:PORT.")
@_of_bucket
def sweep_command(
    source: tuple[str, ...],
    out: str,
    ranks: tuple[int, ...],
    concurrency: tuple[int, ...],
    sizes: tuple[int, ...] | None,
    order_seed: int,
    compute_seconds: float,
    touch: bool,
    **given: Any,
) -> None:
    """Measure how reading SRC scales with ranks and concurrency.

    Every number of ranks is tried with every concurrency, in random order. DIR gets every receipt
    (records.jsonl), results.parquet, a picture, and report.html, which needs no network. The same
    command goes on with a sweep that was interrupted. Ranks are spread over the nodes of the Ray.
    """
    from rayloader.experiment import page, plot
    from rayloader.experiment.recipe import make_directory
    from rayloader.fleet.fleet import Fleet

    plot.require_matplotlib()  # before hours of measuring, not after them
    how = {name: given.pop(name) for name in ("epochs", "repeats", "cache")}
    files, options = given.pop("files"), Options.of(given)
    one_or_many = _one_or_many(source)
    make_directory(out)
    _warn_of_half(one_or_many)
    access = _access(one_or_many, options)

    def measure(what: Any, place: str) -> Any:
        with Fleet(
            what, min(ranks), compute_seconds=compute_seconds, touch=touch, options=options
        ) as fleet:
            return fleet.sweep(ranks, concurrency, seed=order_seed, out=place, **how)

    if sizes is None:
        table = measure(one_or_many, out)
        _show_sweep(table, page.write(table, out))
        return
    if len(source) > 1:
        raise OptionError("--size makes files below one directory, and several sources are given")
    tables = []
    for size_ in sorted(sizes):
        place = os.path.join(out, str(size_))
        tables.append(
            measure(_made(f"{source[0].rstrip('/')}/{size_}", files, size_, access), place)
        )
        _show_sweep(tables[-1], page.write(tables[-1], place))
    for path in page.write_sizes(tables, out):
        click.echo(printable(path))


def _made(directory: str, files: int, size_: int, access: Access) -> Any:
    """Test files of one size, and their catalog; those that are there already are left."""
    from rayloader.experiment.generate import generate
    from rayloader.experiment.live import Counting

    with Counting(_console(stderr=True), "files written", files) as counting:
        return generate(directory, files, size_, progress=counting, access=access)


@_command("report")
@click.argument("directory", metavar="DIR")
@option("--baseline", metavar="DIR", help="Records of another sweep, to compare with.")
def report_command(directory: str, baseline: str | None) -> None:
    """Draw the report of a sweep again, from the records in DIR, or compare two sweeps."""
    from rayloader.experiment import page, sweep

    if several := sweep.load_sizes(directory):
        if baseline is not None:
            raise OptionError("--baseline compares two sweeps: give a directory of one size")
        tables = [sweep.table_of(records) for records in several]
        for path in page.write_sizes(tables, directory):
            click.echo(printable(path))
        return
    table = sweep.table_of(sweep.load(directory))
    other = sweep.table_of(sweep.load(baseline)) if baseline is not None else None
    sweep.save_table(table, directory)
    _show_sweep(table, page.write(table, directory, other, baseline), other)


@_command("doctor")
@click.argument("source", metavar="[SRC...]", nargs=-1)
@option("--ranks", type=int, default=1, help="That each node is to run.")
@option("--out", metavar="DIR", help="Where results are to be written.")
@option(
    "--read/--no-read", "trial", default=True, help="Have a rank read a few files of SRC, twice."
)
@option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@of_reader("concurrency", BOUNDS, "Ceiling on reads in flight per rank.")
@of_reader("memory_bytes", BOUNDS, "Bound on batches in memory per rank.")
@of_reader("ray", WAY, "Which Ray: auto, private, cluster, or HOST:PORT.")
@_of_bucket
def doctor_command(
    source: tuple[str, ...],
    ranks: int,
    out: str | None,
    trial: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Is this machine ready, and the Ray, and SRC? What will limit me?

    Every finding that is not well comes with its cure. The exit status is 1 when something would
    not work. No secret is printed.
    """
    from rayloader.fleet.doctor import examine

    if ranks < 1:
        raise OptionError(f"ranks={ranks}: must be at least 1")
    options = Options.of(given)
    found = examine(_one_or_many(source) if source else None, options, ranks, out, trial)
    if as_json:
        click.echo(json.dumps({name: [it.asdict() for it in its] for name, its in found.items()}))
    else:
        _show_findings(found)
    if any(finding.state == "bad" for findings in found.values() for finding in findings):
        raise click.exceptions.Exit(FAILED)


def _show_findings(found: dict[str, list[Finding]]) -> None:
    """Print what doctor has found, and what it comes to."""
    colours = {"ok": "green", "warning": "yellow", "bad": "red", "unknown": "cyan"}
    counts = dict.fromkeys(colours, 0)
    for name, findings in found.items():
        click.secho(name, bold=True)
        for finding in findings:
            counts[finding.state] += 1
            click.secho(f"  {finding.state:8}", fg=colours[finding.state], nl=False)
            click.echo(f" {finding.check}: {printable(finding.says)}")
            if finding.cure and finding.state != "ok":
                click.echo(f"           → {printable(finding.cure)}")
    verdict = "not ready: mend what is bad" if counts["bad"] else "ready"
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    click.secho(f"{verdict} ({told})", bold=True)


def _show_sweep(table: Any, written: list[str], baseline: Any = None) -> None:
    """Print a sweep's points and where its files are."""
    from rayloader.experiment import page, plot

    console = _console(stderr=False)
    if not console.is_terminal:
        console.width = SWEEP_WIDTH
    found = page.measured(table)
    shown = page.grid(found, page.measured(baseline) if baseline is not None else [])
    console.print(plot.headline(found), style="bold", soft_wrap=True)
    console.print(shown.table())
    for line in shown.notes:
        console.print(line, markup=False, soft_wrap=True)
    for warning in page.warnings(table, baseline):
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    for path in written:
        console.print(printable(path), markup=False, soft_wrap=True)


def _require_writable(path: str) -> None:
    """Find out before the work, not after it.

    Raises:
        click.BadParameter: the file cannot be written.
    """
    if path == "-":
        return
    fits = os.path.isfile(path) or not os.path.lexists(path)
    place = path if os.path.lexists(path) else os.path.dirname(path) or "."
    if not fits or not os.access(place, os.W_OK):
        raise click.BadParameter(f"{printable(path)} cannot be written", param_hint="'--json'")


@cli.group("receipt")
def receipt_group() -> None:
    """Look at the receipts of runs of DLIO."""


@receipt_group.command("check")
@click.argument("directory", metavar="DIR")
def check_command(directory: str) -> None:
    """Recompute what the receipts in DIR claim.

    DIR is the output folder of a DLIO run that read through rayloader_dlio. Each claim is shown
    with where it does not hold; then follows what such records cannot show. The exit status is 1
    when a claim does not hold.
    """
    from rayloader.experiment.audit import audit

    found = audit(directory)
    click.echo(
        f"{counted(found.records, 'receipt')}: {counted(found.ranks, 'rank')}, "
        f"{counted(found.epochs, 'epoch')} of training"
    )
    for finding in found.findings:
        click.echo(f"{'holds ' if finding.holds else 'FAILS '} {finding.claim}")
        for problem in finding.problems[:_NOTES]:
            click.echo(f"         {printable(problem)}")
        if len(finding.problems) > _NOTES:
            click.echo(f"         and {len(finding.problems) - _NOTES} more")
    click.echo("cannot be known from receipts:")
    for unknown in found.unknown:
        click.echo(f"         {printable(unknown)}")
    if not found.holds:
        raise click.exceptions.Exit(FAILED)


def _one_or_many(source: tuple[str, ...]) -> str | list[str]:
    """One name may be anything; several, as a shell makes of a glob, are files.

    Raises:
        OptionError: one of several is a directory.
    """
    if len(source) == 1:
        return source[0]
    for name in source:
        if os.path.isdir(name):
            raise OptionError(
                f"{printable(name)} is a directory, and only one of {len(source)} sources: give "
                "one directory, a quoted glob, or files"
            )
    return list(source)


def _warn_of_half(source: Any) -> None:
    """Say that a directory holds only a part of what ``generate`` was to make there."""
    from rayloader.experiment.generate import unfinished

    mark = unfinished(source) if isinstance(source, str) else None
    if mark is not None:
        click.echo(
            f"rayloader: warning: {printable(mark)}: generate was interrupted, so "
            f"{printable(str(source))} may hold only a part; the same generate finishes it",
            err=True,
        )


def _access(source: Any, options: Options) -> Access:
    """Where objects are and who asks; for a source of objects, said in the first line."""
    from rayloader.catalog import root_of_source
    from rayloader.storage.access import Access
    from rayloader.storage.uri import is_object

    access = Access.found(os.environ, options)
    root = root_of_source(source)
    if is_object(root):
        text = f"S3 requests go to {access.destination}, region {access.region_in_force}"
        if root.startswith(b"s3:"):
            click.echo(access.warning if access.is_guessed else text, err=True)
    return access


def _console(stderr: bool) -> Console:
    """A console that is wide enough where nobody's terminal says how wide it is."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def main() -> None:
    """Run the command line and exit: the ``rayloader`` script."""
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    sys.exit(_run())


def _run() -> int:
    """Run the command line; the exit status."""
    try:
        status = cli.main(prog_name="rayloader", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort) as error:
        return _complain(": ".join(filter(None, ("interrupted", str(error)))), INTERRUPTED)
    except click.ClickException as error:
        return _misused(error)
    except RayloaderError as error:
        return _failed(error)
    except BrokenPipeError:
        # Whoever read our output has gone, as ``| head`` does: that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _failed(error)
    return status if isinstance(status, int) else 0  # of an Exit, which click turns into it


def _terminated(*_: object) -> NoReturn:
    sys.exit(TERMINATED)


def _misused(error: click.ClickException) -> int:
    """Say what is wrong with the arguments, and where help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "rayloader"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return MISUSED
    return _complain(f"{error.format_message()}\n  see {command} --help", MISUSED)


def _failed(error: Exception) -> int:
    """Say what failed: the first line complete in itself, the notes below it."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(error)
    text = str(error)
    if not isinstance(error, RayloaderError | OSError):
        text = f"{type(error).__name__}: {error} (a defect; {DEBUG}=1 says more)"
    notes = "\n".join(getattr(error, "__notes__", [])).splitlines()
    lines = [text, *(f"  {line}" for line in notes[:_NOTES])]
    return _complain("\n".join(lines), MISUSED if isinstance(error, _USERS_OWN) else FAILED)


def _complain(text: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"rayloader: {text}", err=True)
    return status


if __name__ == "__main__":
    main()
