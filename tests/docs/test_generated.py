"""What the documentation takes from the code is what the code says.

``python -m tests.docs.test_generated`` (``make docs``) writes it anew.
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import report
from rayloader import cli, errors, metrics
from rayloader.config import Options
from rayloader.receipt import Receipt

ROOT = Path(__file__).resolve().parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
DLIO = ROOT / "examples" / "dlio" / "README.md"
WIDTH = 92


def fields(kind):
    """(name, type as written, default as written, docstring) of every field of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = " ".join(after.value.value.split()) if documented else ""
            yield node.target.id, ast.unparse(node.annotation), ast.unparse(node.value), text


def plain(text):
    """A docstring's markup as Markdown's, safe in a table."""
    text = re.sub(r"``(.*?)``", r"`\1`", text)
    return text.replace("|", "\\|")


def type_in_words(text):
    return plain(
        re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or "), text)
    ).replace("'", "`")


def options_table():
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for name, kind, default, text in fields(Options):
        default = default.replace(" * MIB", " << 20")
        kind = type_in_words(kind).replace(" \\| ", " or ")
        lines.append(f"| `{name}` | {kind} | `{default}` | {plain(text)} |")
    return "\n".join(lines)


def receipt_table():
    lines = ["| field | |", "|---|---|"]
    lines += [f"| `{name}` | {plain(text)} |" for name, _, _, text in fields(Receipt)]
    return "\n".join(lines)


def metrics_table():
    """As Ray exports them."""
    kinds = (
        ("counter", metrics.COUNTERS),
        ("counter, label `le`", {metrics.LATENCY: metrics.LATENCY_TEXT}),
        ("gauge", metrics.GAUGES),
    )
    rows = [
        f"| `ray_{name}` | {kind} | {text} |" for kind, all_ in kinds for name, text in all_.items()
    ]
    return "\n".join(["| metric | type | |", "|---|---|---|", *rows])


def help_of(*names):
    """What ``rayloader NAMES --help`` prints in a terminal of ``WIDTH`` columns."""
    ran = CliRunner().invoke(
        cli.cli, [*names, "--help"], prog_name="rayloader", terminal_width=WIDTH
    )
    return "\n".join(line.rstrip() for line in ran.output.splitlines())


def console(*names):
    line = " ".join(["rayloader", *names, "--help"])
    return f"```console\n$ {line}\n{help_of(*names)}\n```"


def subcommands(group, above=()):
    """The names of every command below a group, those of a group within it included."""
    for name, command in group.commands.items():
        yield (*above, name)
        yield from subcommands(command, (*above, name)) if hasattr(command, "commands") else ()


def all_help():
    return "\n\n".join(
        f"## {' '.join(['rayloader', *names])}\n\n{console(*names)}"
        for names in [(), *subcommands(cli.cli)]
    )


def errors_table():
    lines = ["| error | what happened | cure |", "|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        happened = plain(inspect.getdoc(kind).splitlines()[0].rstrip("."))
        lines.append(f"| `{name}` | {happened} | {plain(kind.cure)} |")
    return "\n".join(lines)


def record(name):
    """The last full run of a benchmark."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def results(name):
    """The table of the last full run of a benchmark."""
    return report.markdown(record(name))


MAIN = (
    ("dlio", "500 steps, samples/s", "own loader, . worker", "DLIO, 500 steps: samples/s"),
    ("dlio", "500 steps, samples/s", "own loader, in-process", "DLIO, 500 steps: samples/s"),
    ("dlio", "500 steps, gap", "own loader, . worker", "DLIO: shorter gap between epochs"),
    ("dlio", "20 ms per step, hot: AU", "", "DLIO, 20 ms per step: AU"),
    ("posix", "one rank", "torch, . workers, plain", "one rank: files/s"),
    ("posix", "one rank", "torch, in-process, list", "one rank: files/s"),
    ("posix", "one rank", "SPDL, . threads, a task per batch", "one rank: files/s"),
    ("posix", "one rank", "C, .*", "one rank: files/s"),
    ("posix", "cold, 64 in flight", "C, .*", "one rank, page cache empty: files/s"),
    ("posix", "reads/s at 5 ms latency, 64 in flight", "1 in flight", "5 ms per read: reads/s"),
    ("objects", "nginx, objects/s", "torch .*", "S3 from nginx: objects/s"),
    ("objects", "nginx, objects/s", "s3dlio.*", "S3 from nginx: objects/s"),
    ("scale", "objects/s at 5 ms, 8 ranks", "1 rank", "8 ranks of a Fleet: objects/s"),
)
"""The README's rows: benchmark, measure, pattern of whom it is against, and what it is called."""


def main_results():
    """A few rows of each benchmark; of those that match, the first."""
    return report.markdown_table(
        next(
            row | {"measure": called}
            for row in report.rows_of(record(name))
            if row["measure"] == measure and re.fullmatch(against, row["against"])
        )
        for name, measure, against, called in MAIN
    )


PARTS = {
    "main-results": (README, main_results),
    "options": (DOCS / "reference.md", options_table),
    "receipt": (DOCS / "reference.md", receipt_table),
    "errors": (DOCS / "reference.md", errors_table),
    "results": (DOCS / "results.md", lambda: results("posix")),
    "object-results": (DOCS / "results.md", lambda: results("objects")),
    "scale-results": (DOCS / "results.md", lambda: results("scale")),
    "dlio-results": (DLIO, lambda: results("dlio")),
    "help": (DOCS / "cli.md", all_help),
    "metrics": (DOCS / "metrics.md", metrics_table),
}


def split(part):
    """A file's text before, in and after a part."""
    text = PARTS[part][0].read_text()
    before, rest = text.split(f"<!-- {part} -->\n")
    found, after = rest.split(f"<!-- /{part} -->")
    return f"{before}<!-- {part} -->\n", found, f"<!-- /{part} -->{after}"


def write():
    """Write every part anew: ``make docs``."""
    for part, (file, make) in PARTS.items():
        before, _, after = split(part)
        file.write_text(f"{before}\n{make()}\n\n{after}")


@pytest.mark.parametrize("part", PARTS)
def test_what_comes_from_the_code_is_as_the_code_has_it(part):
    _, found, _ = split(part)
    assert found.strip() == PARTS[part][1]().strip(), "run 'make docs'"


def test_every_option_and_every_field_of_the_receipt_says_what_it_is():
    assert [name for name, *_, text in [*fields(Options), *fields(Receipt)] if not text] == []


def test_the_tables_leave_nothing_out():
    assert [name for name, *_ in fields(Options)] == [it.name for it in dataclasses.fields(Options)]
    assert [name for name, *_ in fields(Receipt)] == [it.name for it in dataclasses.fields(Receipt)]


def test_help_gives_units_and_fits():
    for names in [(), *((name,) for name in cli.cli.commands)]:
        assert max(map(len, help_of(*names).splitlines())) <= WIDTH
    for name in ("start-timeout", "stall-seconds", "read-timeout", "compute-seconds"):
        described = re.search(rf"--{name}.*?(?=\n  --|\n\n)", help_of("read"), flags=re.S)
        assert "[s]" in described[0], name


if __name__ == "__main__":
    write()
