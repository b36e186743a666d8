import dataclasses
import subprocess
import sys

import click
import pytest

from rayloader import cli
from rayloader.catalog import Catalog
from rayloader.config import Options


@pytest.fixture
def rayloader(monkeypatch, capsys):
    """Run a command line in this process: exit status, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rayloader", *map(str, arguments)])
        status = cli._run()
        return (status, *capsys.readouterr())

    return run


def job(*arguments):
    """The job that a ``read`` command line describes."""
    above = click.Context(cli.cli, info_name="rayloader", **cli.cli.context_settings)
    context = cli.read_command.make_context("read", [*map(str, arguments)], parent=above)
    given = {name: it for name, it in context.params.items() if name != "json"}
    return cli._job(cli._one_or_many(given.pop("source")), given)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("322624", 322624),
        ("8MiB", 8 << 20),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("8MB", 8_000_000),
        ("64 KiB", 64 << 10),
        ("1.5GB", 1_500_000_000),
        ("2T", 2 << 40),
        ("645,300,224", 645_300_224),
        ("1,024MiB", 1 << 30),
    ],
)
def test_sizes_are_spelled_as_gnu_tools_spell_them(text, wanted):
    assert cli.size(text) == wanted


@pytest.mark.parametrize("text", ["", "M", "-1", "8XiB", "1e6", "8 M B", "eight", "64,53", ",000"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(click.BadParameter, match="not a size") as raised:
        cli.size(text)
    assert repr(text) in str(raised.value)


def test_without_arguments_read_has_the_defaults_of_the_options():
    assert job("data").options == Options()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Options)])
def test_every_option_can_be_given_on_the_command_line(field):
    named = {parameter.name for parameter in cli.read_command.params}
    assert field in named


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--batch-size", "24"], {"batch_size": 24}),
        (["--memory-bytes", "64MiB"], {"memory_bytes": 64 << 20}),
        (["--no-shuffle", "--unordered"], {"shuffle": False, "ordered": False}),
        (["--direct"], {"direct": True}),
        (["--direct-fallback"], {"direct": "fallback"}),
        (["--no-deliver", "--drop-last", "--drop-cache"],
         {"deliver": False, "drop_last": True, "drop_cache": True}),
        (["--read-ahead-batches", "3", "--stall-seconds", "0.5"],
         {"read_ahead_batches": 3, "stall_seconds": 0.5}),
        (["--on-error", "skip", "--channel", "ray", "--cpus", "node", "--engine", "python"],
         {"on_error": "skip", "channel": "ray", "cpus": "node", "engine": "python"}),
    ],
)  # fmt: skip
def test_arguments_become_options(arguments, changes):
    assert job("data", *arguments).options == Options(**changes)


def test_options_also_come_from_the_environment_and_arguments_win(monkeypatch):
    monkeypatch.setenv("RAYLOADER_BATCH_SIZE", "7")
    monkeypatch.setenv("RAYLOADER_MEMORY_BYTES", "32M")
    monkeypatch.setenv("RAYLOADER_DELIVER", "0")
    monkeypatch.setenv("RAYLOADER_RANKS", "2")
    read = job("data", "--batch-size", 9)
    assert read.options == Options(batch_size=9, memory_bytes=32 << 20, deliver=False)
    assert read.ranks == 2


def test_a_variable_that_is_no_option_is_told(rayloader, monkeypatch, tmp_path):
    monkeypatch.setenv("RAYLOADER_BATCHSIZE", "secret")
    monkeypatch.setenv("RAYLOADER_RANKS", "2")  # of another command
    monkeypatch.setenv("RAYLOADER_READ_AHEAD_BATCHES", "2")
    monkeypatch.setenv("RAYLOADER_RUN_ID", "x")
    monkeypatch.setenv("RAYLOADER_DLIO_PYTHON", "x")
    status, out, err = rayloader("generate", tmp_path / "data", "--files", 1, "--size", 1)
    assert status == 0
    assert out.startswith("1 file, ")
    assert err == (
        "rayloader: warning: RAYLOADER_BATCHSIZE is no option; did you mean RAYLOADER_BATCH_SIZE?\n"
    )


def test_several_sources_are_a_list_of_files():
    assert job("a").source == "a"
    assert job("a", "b").source == ["a", "b"]


def test_generate_then_catalog_then_the_catalog_again(rayloader, tmp_path):
    data, saved = tmp_path / "data", tmp_path / "saved.arrow"
    status, out, _ = rayloader("generate", data, "--files", 10, "--size", "4KiB")
    assert (status, out.split(";")[0]) == (0, f"10 files, 0.00 GB in {data}")
    status, out, _ = rayloader("catalog", data, "-o", saved, "--stat")
    assert (status, out) == (0, f"10 files, 0.00 GB; catalog: {saved}\n")
    status, out, _ = rayloader("catalog", saved, "-o", tmp_path / "again.arrow")
    assert status == 0
    assert Catalog.load(tmp_path / "again.arrow").digest == Catalog.load(saved).digest
    assert Catalog.load(saved).total_bytes == 10 * 4096


def test_generate_tells_whether_it_wrote_anything(rayloader, tmp_path):
    command = ("generate", tmp_path / "data", "--files", 3, "--size", 9)
    assert "nothing was written" not in rayloader(*command)[1]
    assert rayloader(*command)[1].endswith(".arrow (complete before: nothing was written)\n")


def test_a_generate_that_is_interrupted_says_how_to_go_on(rayloader, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    data = tmp_path / "data"
    with monkeypatch.context() as patched:
        patched.setattr("rayloader.experiment.generate._flush", interrupted)
        status, out, err = rayloader("generate", data, "--files", 3, "--size", 9)
    assert (status, out) == (130, "")
    assert err == "rayloader: interrupted: the same command finishes what it began\n"
    catalog = ("catalog", data, "-o", tmp_path / "saved.arrow")
    status, _, err = rayloader(*catalog)
    assert (status, len(err.splitlines())) == (0, 1)
    assert err.startswith(f"rayloader: warning: {data}.arrow.unfinished: generate was interrupted")
    status, out, _ = rayloader("generate", data, "--files", 3, "--size", 9)
    assert (status, "nothing was written" in out) == (0, False)
    assert rayloader(*catalog)[2] == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["read", "{tmp}/nothing"], "{tmp}/nothing: no such file or directory"),
        (["read", "{tmp}/empty"], "nothing to read in {tmp}/empty"),
        (["read", "{tmp}/*.jpeg"], "nothing to read in {tmp}/*.jpeg (a glob names files"),
        (["read", "gs://bucket/train"], "no storage serves gs://"),
        (["read", "{tmp}/some", "--batch-size", "0"], "batch_size=0: must be a whole number >= 1"),
        (["read", "{tmp}/some", "--batch-size", "x"], "'--batch-size': 'x' is not a valid integer"),
        (["read", "{tmp}/some", "--memory-bytes", "8Q"], "'8Q' is not a size such as"),
        (["read", "{tmp}/some", "--channel", "tcp"], "'tcp' is not one of 'auto', 'local', 'ray'"),
        (["read", "{tmp}/some", "--concurency", "8"], "--concurrency"),
        (["read", "{tmp}/some", "--ranks", "0"], "ranks=0: must be at least 1"),
        (["read", "{tmp}/some", "--ranks", "9"], "3 entries are too few for 9 ranks"),
        (["read", "{tmp}/some", "--batch-size", "8", "--drop-last"], "leaves nothing to read"),
        (["read", "{tmp}/some", "--no-deliver", "--compare", "torch"], "compare needs the bytes"),
        (["read", "{tmp}/some", "--json", "{tmp}/no/where.json"], "where.json cannot be written"),
        (["read", "{tmp}/some", "--json", "{tmp}/empty"], "empty cannot be written"),
        (["read", "{tmp}/some", "{tmp}/empty"], "some is a directory, and only one of 2 sources"),
        (["read"], "Missing argument 'SRC...'"),
        (["generate", "{tmp}/some", "--files", "3", "--size", "9"], "not generated there"),
        (["catalog", "{tmp}/some", "-o", "{tmp}/no/where.arrow"], "cannot be saved"),
        (["fly"], "No such command 'fly'"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_precise_line_and_status_2(rayloader, tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "some").mkdir()
    for number in range(3):
        (tmp_path / "some" / str(number)).write_bytes(b"x")
    status, out, err = rayloader(*(text.format(tmp=tmp_path) for text in arguments))
    first, *rest = err.splitlines()
    assert (status, out) == (2, "")
    assert first.startswith("rayloader: ")
    assert words.format(tmp=tmp_path) in first
    assert len(rest) <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "/proc/x", "--files", "3", "--size", "9"], "/proc/x: the directory cannot"),
        (["generate", "{tmp}/0/x", "--files", "3", "--size", "9"], "created: Not a directory"),
        (["sweep", "{tmp}", "--out", "/proc/x"], "/proc/x: the directory cannot be created there"),
        (["sweep", "{tmp}", "--out", "{tmp}/0"], "{tmp}/0: File exists"),
    ],
)
def test_a_directory_that_cannot_be_made_is_an_error_at_once(rayloader, tmp_path, arguments, words):
    (tmp_path / "0").write_bytes(b"x")
    status, out, err = rayloader(*(text.format(tmp=tmp_path) for text in arguments))
    assert (status, out) == (1, "")
    assert words.format(tmp=tmp_path) in err
    assert len(err.splitlines()) == 1


def test_the_traceback_is_shown_to_those_who_ask(rayloader, monkeypatch):
    monkeypatch.setenv("RAYLOADER_DEBUG", "1")
    status, _, err = rayloader("read", "/nothing/here")
    assert status == 2
    assert "Traceback" in err
    assert err.splitlines()[-1] == "rayloader: /nothing/here: no such file or directory"


def test_a_defect_of_ours_says_that_it_is_one(rayloader, monkeypatch):
    monkeypatch.setattr(Catalog, "from_source", lambda *_, **__: 1 / 0)
    status, _, err = rayloader("catalog", "x", "-o", "y")
    assert status == 1
    assert err.startswith("rayloader: ZeroDivisionError: division by zero (a defect")


def test_the_version_names_what_figures_depend_on(rayloader):
    status, out, _ = rayloader("--version")
    assert status == 0
    assert out.startswith("rayloader 0.1.0 (python 3.")
    assert "ray 2." in out
    assert ", engine " in out


def test_the_command_line_answers_without_ray_torch_and_numpy():
    code = (
        "import sys; sys.argv = ['rayloader', 'read', '--help']\n"
        "from rayloader.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "sys.exit(str({'ray', 'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stderr.strip() == "set()"
    assert "--concurrency" in ran.stdout


def test_the_reader_of_our_output_may_leave(tmp_path):
    code = "from rayloader.cli import main; main()"
    ran = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" read --help | true; echo ${{PIPESTATUS[0]}}'],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert ran.stderr == ""
    assert ran.stdout.strip() in ("0", "1")


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("matplotlib", "sys.argv[1:] = ['sweep', '.', '--out', 'out']; cli.main()"),
        ("s3dlio", "s3dlio_client._first_import(Access.found({}))"),
        ("botocore", "bucket.s3_client('s3://b/', Access.found({}))"),
    ],
)
def test_a_package_that_is_missing_is_said_at_once_with_what_to_install(tmp_path, missing, call):
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = sys.modules['{missing}.session'] = None\n"
        "from rayloader import cli\n"
        "from rayloader.storage import bucket, s3dlio_client\n"
        "from rayloader.storage.access import Access\n"
        f"{call}"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=tmp_path
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.endswith(f"pip install {missing}"), ran.stderr
    assert not list(tmp_path.iterdir())
