"""What a user names, and which entries that is."""

import itertools
import os
import re
import socket
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloader import catalog as catalog_module
from rayloader.catalog import Catalog
from rayloader.errors import CatalogError, EmptyCatalog, OptionError
from rayloader.storage.listing import PosixLister, split_glob


def keys(source, **options):
    catalog = Catalog.from_source(source, **options)
    return catalog.keys_at(np.arange(len(catalog)))


def make(root, *files):
    """Files below a directory; every name as bytes, content its own name."""
    for name in files:
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name)
    return root


ODD = [
    b"new\nline",
    b"semi;colon",
    b"per%20cent",
    b"hash#tag",
    b"question?",
    b"star*",
    b"[class]",
    b" space ",
    b".hidden",
    b"-dash",
    b"_underscore",
    b"back\\slash",
    b"quote'\"",
    b"not-utf8-\xff\xfe",
    "\u00e9\u4e2d\U0001f600".encode(),
    b"s3:colon",
    b"~tilde",
    b"$HOME",
    b"x" * 255,
    b"\x01\x7f",
]


# Directories


def test_every_odd_name_is_listed_and_leads_back_to_its_file(tmp_path):
    make(tmp_path, *ODD)
    catalog = Catalog.from_source(tmp_path)
    listed = catalog.keys_at(np.arange(len(catalog)))
    assert listed == sorted(ODD)
    for index, key in enumerate(listed):
        with open(os.path.join(catalog.root, key), "rb") as file:
            assert file.read() == key
        assert os.fsencode(catalog.key(index)) == key


@pytest.mark.parametrize("name", [name for name in ODD if name != b"x" * 255])
def test_a_directory_of_any_name_is_taken_literally(tmp_path, name, monkeypatch):
    make(tmp_path, name + b"/" + b"file", b"other/file", b"questionx/file", b"c/file")
    assert keys(os.path.join(os.fsencode(tmp_path), name)) == [b"file"]
    monkeypatch.chdir(tmp_path)
    for source in (name, os.fsdecode(name), os.fsdecode(name) + "/"):
        assert keys(source) == [b"file"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=st.sets(
        st.lists(
            st.binary(min_size=1, max_size=4).filter(
                lambda part: not set(part) & {0, ord("/")} and part not in (b".", b"..")
            ),
            min_size=1,
            max_size=4,
        ).map(tuple),
        max_size=12,
    )
)
def test_a_listing_is_all_files_sorted_bytewise(tree, tmp_path_factory):
    files = {
        path for path in tree if not any(path == other[: len(path)] != other for other in tree)
    }
    root = make(tmp_path_factory.mktemp("tree"), *(b"/".join(path) for path in files))
    expected = sorted(b"/".join(path) for path in files)
    if expected:
        assert keys(root) == expected
        assert keys(os.path.join(root, "**")) == expected
    else:
        with pytest.raises(EmptyCatalog):
            keys(root)


def test_links_are_followed_and_loops_left_out(tmp_path):
    make(tmp_path, b"data/a/one", b"data/b/two", b"elsewhere/three")
    os.symlink("../elsewhere", tmp_path / "data/away")
    os.symlink("a/one", tmp_path / "data/link")
    os.symlink("..", tmp_path / "data/a/up")
    os.symlink(".", tmp_path / "data/b/here")
    os.symlink(tmp_path / "data", tmp_path / "elsewhere/back")
    assert keys(tmp_path / "data") == [b"a/one", b"away/three", b"b/two", b"link"]
    assert keys(tmp_path / "elsewhere") == [
        b"back/a/one",
        b"back/b/two",
        b"back/link",
        b"three",
    ]


def test_two_directories_that_link_to_each_other_are_listed_under_both_names(tmp_path):
    make(tmp_path, b"a/one", b"b/two")
    os.symlink("../b", tmp_path / "a/b")
    os.symlink("../a", tmp_path / "b/a")
    assert keys(tmp_path) == [b"a/b/two", b"a/one", b"b/a/one", b"b/two"]


def test_a_root_that_is_itself_a_link_is_followed(tmp_path):
    make(tmp_path, b"real/one")
    os.symlink("real", tmp_path / "link")
    assert keys(tmp_path / "link") == [b"one"]


def test_what_is_no_file_is_listed_so_that_reading_it_can_say_so(tmp_path):
    make(tmp_path, b"file")
    os.symlink("nowhere", tmp_path / "dangling")
    os.symlink("itself", tmp_path / "itself")
    os.symlink("file/below", tmp_path / "through-a-file")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.fspath(tmp_path / "socket"))
        catalog = Catalog.from_source(tmp_path, stat=True)
    sizes = dict(zip(catalog.names_at(np.arange(6)), catalog.sizes.tolist(), strict=True))
    assert sizes == {
        "dangling": -1,
        "fifo": -1,
        "file": 4,
        "itself": -1,
        "socket": -1,
        "through-a-file": -1,
    }


def test_empty_directories_add_nothing(tmp_path):
    make(tmp_path, b"a/one")
    (tmp_path / "empty" / "below").mkdir(parents=True)
    assert keys(tmp_path) == [b"a/one"]


def test_a_directory_that_cannot_be_listed_is_named(as_somebody):
    make(".", b"data/open/one", b"data/closed/two")
    os.chmod("data/closed", 0)
    try:
        with as_somebody(), pytest.raises(CatalogError, match=r"data/closed.*: .*Permission"):
            Catalog.from_source("data")
    finally:
        os.chmod("data/closed", 0o700)


def test_a_directory_removed_while_listing_is_named(tmp_path):
    make(tmp_path, b"a/one", b"b/two")
    listing = PosixLister().list(os.fsencode(tmp_path))
    first, _ = next(listing)
    gone = "b" if first == b"a/one" else "a"
    for name in os.listdir(tmp_path / gone):
        os.unlink(tmp_path / gone / name)
    os.rmdir(tmp_path / gone)
    with pytest.raises(CatalogError, match=rf"/{gone}/: .*cannot be listed: No such"):
        list(listing)


def test_the_root_is_absolute_for_processes_that_run_elsewhere(tmp_path, monkeypatch):
    make(tmp_path, b"data/one")
    monkeypatch.chdir(tmp_path)
    for source in ("data", "data/", "./data", "data/*", "data/**"):
        assert Catalog.from_source(source).root == os.fsencode(tmp_path / "data")
    os.symlink(tmp_path / "data", tmp_path / "link")
    (tmp_path / "data" / "sub").mkdir()
    os.symlink(tmp_path / "data" / "sub", tmp_path / "deep")
    catalog = Catalog.from_source("deep/..")  # the parent of the target, not of the link
    assert os.path.samefile(catalog.root, tmp_path / "data")


def test_hundreds_of_levels_are_no_recursion(tmp_path):
    depth = 900
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        here, old = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(old)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    assert keys(tmp_path) == [b"d/" * depth + b"file"]


# Globs


TREE = [
    b"a.bin",
    b".b.bin",
    b"c.txt",
    b"p1/a.bin",
    b"p1/c.txt",
    b"p2/d.bin",
    b"p2/deep/a.bin",
    b"p2/deep/deep/.x",
    b"q/\xff.bin",
    "q/\u00e9.bin".encode(),
    b"q/[z].bin",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.bin", [b".b.bin", b"a.bin"]),
        ("*", [b".b.bin", b"a.bin", b"c.txt"]),
        ("?.txt", [b"c.txt"]),
        ("[ac].*", [b"a.bin", b"c.txt"]),
        ("[!a].*", [b"c.txt"]),
        ("p*/*.bin", [b"p1/a.bin", b"p2/d.bin"]),
        ("p?/*", [b"p1/a.bin", b"p1/c.txt", b"p2/d.bin"]),
        ("**", sorted(TREE)),
        ("**/*", sorted(TREE)),
        ("**/**", sorted(TREE)),
        ("**/a.bin", [b"a.bin", b"p1/a.bin", b"p2/deep/a.bin"]),
        ("p[2]/**", [b"p2/d.bin", b"p2/deep/a.bin", b"p2/deep/deep/.x"]),
        ("**/deep/*", [b"p2/deep/a.bin", b"p2/deep/deep/.x"]),
        ("**/deep/**/.x", [b"p2/deep/deep/.x"]),
        ("**/deep/**/deep/**/.x", [b"p2/deep/deep/.x"]),
        ("./*.txt", [b"c.txt"]),
        ("[q]/./?.bin", ["q/\u00e9.bin".encode(), b"q/\xff.bin"]),
        ("[q]/[[]z].bin", [b"q/[z].bin"]),
        (b"[q]/\xff*", [b"q/\xff.bin"]),
    ],
)
def test_a_glob_names_files(tmp_path, monkeypatch, pattern, expected):
    monkeypatch.chdir(make(tmp_path, *TREE))
    assert keys(pattern) == sorted(expected)
    assert Catalog.from_source(pattern).root == os.fsencode(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "root", "rest"),
    [
        (b"data/x*/y", b"data/", b"x*/y"),
        (b"data/*", b"data/", b"*"),
        (b"*", b".", b"*"),
        (b"/*", b"/", b"*"),
        (b"/a/b?/c", b"/a/", b"b?/c"),
        (b"a/b[0]", b"a/", b"b[0]"),
        (b"**", b".", b"**"),
    ],
)
def test_the_root_of_a_glob_is_its_literal_beginning(pattern, root, rest):
    assert split_glob(pattern) == (root, rest)


def test_a_glob_visits_only_directories_that_can_match(as_somebody):
    make(".", b"data/open/one.bin", b"data/closed.bin/two.bin")
    os.chmod("data/closed.bin", 0)
    try:
        with as_somebody():
            assert keys("data/o*/*.bin") == [b"open/one.bin"]
            assert list(PosixLister(b"*.bin").list(b"data")) == []
    finally:
        os.chmod("data/closed.bin", 0o700)


def test_a_glob_follows_links_without_looping(tmp_path):
    make(tmp_path, b"a/one.bin")
    os.symlink("..", tmp_path / "a/up")
    assert keys(tmp_path / "**" / "*.bin") == [b"a/one.bin"]


def test_a_name_with_glob_characters_that_exists_is_no_glob(tmp_path):
    make(tmp_path, b"d[1]/one", b"d1/two")
    assert keys(tmp_path / "d[1]") == [b"one"]
    os.rename(tmp_path / "d[1]", tmp_path / "gone")
    with pytest.raises(EmptyCatalog, match="a glob names files"):
        keys(tmp_path / "d[1]")
    assert keys(tmp_path / "d[1]" / "*") == [b"d1/two"]


# Other sources


def test_a_catalog_is_returned_as_it_is():
    catalog = Catalog.of_files(["a"])
    assert Catalog.from_source(catalog) is catalog


def test_a_saved_catalog_is_found_by_its_contents(tmp_path):
    make(tmp_path, b"data/one", b"data/two")
    Catalog.from_source(tmp_path / "data").save(tmp_path / "saved.anything")
    loaded = Catalog.from_source(os.fspath(tmp_path / "saved.anything"), stat=True)
    assert loaded.names_at(np.arange(2)) == ["one", "two"]
    assert loaded.root == os.fsencode(tmp_path / "data")
    assert loaded.sizes.tolist() == [8, 8]


ACCEPTED = r"give a directory, a glob, a list of paths, a Catalog or a saved catalog"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("nope", CatalogError, "^nope: no such file or directory$"),
        ("file/below", CatalogError, "^file/below: no such file or directory$"),
        ("odd\nname", CatalogError, r"^odd\\nname: no such file or directory$"),
        ("", CatalogError, "no such file or directory"),
        ("file", CatalogError, f"^file: not a catalog: neither .*; {ACCEPTED}"),
        ("fifo", CatalogError, f"^fifo: a special file; {ACCEPTED}"),
        ("dangling", CatalogError, "^dangling: no such file or directory$"),
        ("itself", CatalogError, "^itself: Too many levels of symbolic links$"),
        ("a\0b", CatalogError, r"^a\\x00b: .*null"),
        ("x" * 300, CatalogError, "File name too long"),
        ("nope/*.bin", CatalogError, "^nope/: the directory cannot be listed: No such file"),
        ("*.nope", EmptyCatalog, r"nothing to read in \*\.nope"),
        ("empty", EmptyCatalog, "nothing to read in empty"),
        ([], EmptyCatalog, "an empty list"),
        (np.array([], str), EmptyCatalog, "an empty list"),
        (Catalog.of_files([]), EmptyCatalog, "an empty catalog"),
        (
            "gs://bucket/key",
            CatalogError,
            "^gs://bucket/key: no storage serves gs://: .*s3://BUCKET",
        ),
        (7, OptionError, "type int: must be a directory"),
        (None, OptionError, "type NoneType: must be a directory"),
        ({"a": 1}, OptionError, "type dict"),
        (["a", 7], OptionError, "not int"),
    ],
    ids=lambda value: None if isinstance(value, type) else re.sub(r"\W+", " ", str(value))[:40],
)
def test_a_source_that_is_nothing_to_read_is_named(tmp_path, monkeypatch, source, error, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, b"file")
    os.mkfifo("fifo")
    os.mkdir("empty")
    os.symlink("nowhere", "dangling")
    os.symlink("itself", "itself")
    with pytest.raises(error, match=words) as caught:
        Catalog.from_source(source)
    assert type(caught.value) is error


# Sizes


def test_sizes_are_looked_up_only_when_asked_for(tmp_path):
    make(tmp_path, b"a", b"bbb", b"sub/cc")
    assert Catalog.from_source(tmp_path).sizes is None
    catalog = Catalog.from_source(tmp_path, stat=True)
    assert catalog.sizes.tolist() == [1, 3, 6]
    assert catalog.sizes.dtype == np.int64
    assert catalog.total_bytes == 10
    files = [tmp_path / "bbb", os.fspath(tmp_path / "a"), "missing"]
    assert Catalog.from_source(files, stat=True).sizes.tolist() == [3, 1, -1]
    assert Catalog.from_source(files, stat=True).total_bytes == 4


def test_known_sizes_are_not_looked_up_again(tmp_path):
    make(tmp_path, b"a")
    catalog = Catalog(os.fsencode(tmp_path), Catalog.of_files(["a"]).keys, np.array([77]))
    assert Catalog.from_source(catalog, stat=True).sizes.tolist() == [77]


def test_looking_up_sizes_keeps_everything_else(tmp_path):
    make(tmp_path, b"a")
    names = Catalog.of_files(["a"]).keys
    catalog = Catalog(os.fsencode(tmp_path), names, None, pa.array([5]), {b"maker": b"me"})
    sized = Catalog.from_source(catalog, stat=True)
    assert sized.sizes.tolist() == [1]
    assert (sized.root, sized.digest) == (catalog.root, catalog.digest)
    assert (sized.checksums.to_pylist(), sized.extra) == ([5], {b"maker": b"me"})


def test_every_one_of_many_sizes_lands_at_its_key(tmp_path):
    count = 7001
    for index in range(count):
        with open(tmp_path / f"{index:05d}", "wb") as file:
            file.truncate(index)
    assert Catalog.from_source(tmp_path, stat=True).sizes.tolist() == list(range(count))


def test_sizes_are_looked_up_sixty_four_at_a_time(tmp_path, monkeypatch):
    make(tmp_path, *(b"%04d" % index for index in range(512)))
    catalog = Catalog.from_source(tmp_path)
    look_up, lock = os.stat, threading.Lock()
    all_inside = threading.Barrier(64, action=lambda: time.sleep(0.05))  # would one more come in?
    calls, inside, most = itertools.count(), 0, 0

    def together(*arguments, **options):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if next(calls) < 64:
            all_inside.wait(timeout=20)
        with lock:
            inside -= 1
        return look_up(*arguments, **options)

    monkeypatch.setattr(catalog_module.os, "stat", together)
    assert catalog.with_sizes().sizes.tolist() == [4] * 512
    assert most == 64


def test_sizes_below_a_root_that_is_gone_are_an_error(tmp_path):
    catalog = Catalog.of_files(["a"], tmp_path / "gone")
    with pytest.raises(CatalogError, match=r"gone: No such file or directory"):
        catalog.with_sizes()


# Progress


def test_progress_counts_up_and_ends_with_the_total(tmp_path, monkeypatch):
    make(tmp_path, *(b"%04d" % index for index in range(1000)))
    clock = itertools.count(0, 0.06)  # seconds between two looks at the clock
    monkeypatch.setattr(catalog_module.time, "monotonic", lambda: next(clock))
    seen = []
    Catalog.from_source(tmp_path, progress=seen.append)
    assert seen[-1] == 1000
    assert seen == sorted(seen)
    assert 4 < len(seen) < 1000 / 64
    Catalog.from_source(tmp_path / "*", progress=seen.append, stat=True)
    assert seen[-1] == 1000


def test_progress_is_told_at_most_ten_times_a_second(tmp_path):
    make(tmp_path, *(b"%04d" % index for index in range(2000)))
    seen = []
    began = time.monotonic()
    Catalog.from_source(tmp_path, progress=seen.append)
    assert len(seen) <= 2 + (time.monotonic() - began) * 10


# A million


class Million:
    """A lister of a million names in a mixed-up order, as large directories give them."""

    metadata_ops = 0

    def list(self, root):
        for index in range(10**6):
            scrambled = index * 387_420_489 % 10**6  # coprime to a million: a bijection
            yield b"part_%02d/sample_%08d" % (scrambled % 100, scrambled), -1


def test_a_million_names_are_sorted_within_seconds_and_a_quarter_gigabyte(monkeypatch):
    monkeypatch.setattr(catalog_module, "PosixLister", lambda pattern: Million())
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # forget the peak so far
    before = _peak()
    began = time.process_time()
    catalog = Catalog.from_source("/")
    assert time.process_time() - began < 15
    assert _peak() - before < 256 << 20
    assert len(catalog) == 10**6
    assert catalog.key(0) == "part_00/sample_00000000"
    assert catalog.key(10**6 - 1) == "part_99/sample_00999999"
    ends = catalog.keys_at(np.arange(0, 10**6, 1000))
    assert ends == sorted(ends)


def _peak():
    """The most memory resident in this process since the peak was forgotten [bytes]."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
