"""The catalog: what it keeps, how it travels, what it refuses."""

import gc
import itertools
import multiprocessing
import os
import pathlib
import pickle
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader.catalog import Catalog
from rayloader.errors import CatalogError, EmptyCatalog, OptionError

names = st.binary(min_size=1, max_size=300).filter(
    lambda name: b"\0" not in name and not name.startswith(b"/")
)
name_lists = st.lists(names, max_size=40)


def everything(catalog):
    return np.arange(len(catalog))


def assert_same(one, other):
    assert one.root == other.root
    assert one.keys.equals(other.keys)
    assert one.digest == other.digest
    assert (one.sizes is None) == (other.sizes is None)
    assert one.sizes is None or np.array_equal(one.sizes, other.sizes)
    assert (one.checksums is None) == (other.checksums is None)
    assert one.checksums is None or one.checksums.equals(other.checksums)
    assert one.extra == other.extra


def through_fd(catalog):
    fd = catalog.to_fd()
    try:
        return Catalog.from_fd(fd)
    finally:
        os.close(fd)


@st.composite
def catalogs(draw):
    keys = draw(name_lists)
    sizes = draw(st.none() | st.just(np.arange(len(keys)) * 10**10 - 1))
    checksums = draw(st.sampled_from([None, pa.uint32(), pa.uint64()]))
    return Catalog(
        b"/data/\xff",
        pa.array(keys, pa.large_binary()),
        sizes,
        None if checksums is None else pa.array(range(len(keys)), checksums),
        draw(st.sampled_from([{}, {b"maker": b"\xfe"}])),
    )


# Looking up


@given(name_lists, st.data())
def test_keys_come_back_as_bytes_as_names_and_as_one_blob(keys, data):
    catalog = Catalog.of_files(keys)
    choice = st.lists(st.integers(0, len(keys) - 1), max_size=30) if keys else st.just([])
    indices = np.array(data.draw(choice), np.int64)
    expected = [keys[i] for i in indices]
    assert catalog.keys_at(indices) == expected
    assert catalog.names_at(indices) == [os.fsdecode(key) for key in expected]
    blob, offsets = catalog.blob_at(indices)
    assert isinstance(blob, bytes)
    assert (offsets.dtype, len(offsets)) == (np.int64, len(indices) + 1)
    assert [blob[a:b] for a, b in itertools.pairwise(offsets)] == expected
    assert len(blob) == offsets[-1]
    assert [catalog.key(i) for i in range(len(catalog))] == [os.fsdecode(key) for key in keys]


def test_an_index_outside_is_an_index_error():
    catalog = Catalog.of_files(["a", "b"])
    for wrong in (-1, 2):
        for look_up in (catalog.keys_at, catalog.names_at, catalog.blob_at):
            with pytest.raises(IndexError):
                look_up(np.array([0, wrong]))
        with pytest.raises(IndexError, match=f"entry {wrong} is not in a catalog of 2"):
            catalog.key(wrong)


# The digest


@given(name_lists, name_lists)
def test_catalogs_have_the_same_digest_exactly_when_their_keys_are_the_same(one, other):
    same = Catalog.of_files(one).digest == Catalog.of_files(other).digest
    assert same == (one == other)


def test_the_digest_sees_order_and_borders_and_not_the_root():
    digests = {
        Catalog.of_files(keys).digest for keys in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])
    }
    assert len(digests) == 4
    assert Catalog.of_files(["a"], "/x").digest == Catalog.of_files(["a"], "/y").digest
    assert (
        Catalog.of_files(["ab", "c"]).digest == "c6708c432fd31391f0a2b861cff9e3cc"
    )  # saved positions hold it


def test_the_digest_sees_every_border_in_a_long_list():
    def digest(*moved):
        lengths = np.full(140_000, 2)
        lengths[list(moved)] = [1, 3][: len(moved)]  # a byte changes hands; the sum stays
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"x" * lengths.sum())]
        keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)
        return Catalog(b"/", keys).digest

    pairs = [(), (0, 1), (65_535, 65_536), (65_535, 131_071), (65_536, 131_072), (1, 139_999)]
    assert len({digest(*pair) for pair in pairs}) == len(pairs)


# Saving, sharing, travelling


@given(catalog=catalogs())
def test_a_catalog_survives_every_way_to_travel(catalog, tmp_path_factory):
    path = tmp_path_factory.mktemp("catalog") / "saved.arrow"
    catalog.save(path)
    loaded = Catalog.load(path)
    assert_same(loaded, catalog)
    assert_same(Catalog.load(os.fsencode(path)), catalog)
    for each in (catalog, loaded):
        assert_same(through_fd(each), catalog)
        assert_same(through_fd(through_fd(each)), catalog)
        assert_same(pickle.loads(pickle.dumps(each)), catalog)
    loaded.save(path)  # over the file that it maps
    assert_same(Catalog.load(path), catalog)
    assert_same(loaded, catalog)
    assert os.listdir(path.parent) == ["saved.arrow"]


def test_another_process_reads_the_same_catalog_through_a_descriptor():
    catalog = Catalog(b"/data", pa.array([b"a", b"\xff\n"], pa.large_binary()), np.array([7, 8]))
    fd = catalog.to_fd()
    program = """
        import sys
        from rayloader.catalog import Catalog
        catalog = Catalog.from_fd(int(sys.argv[1]))
        print(catalog.digest, catalog.root, ascii(catalog.key(1)), catalog.sizes.tolist())
    """
    try:
        told = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(fd)],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        os.close(fd)
    assert told == f"{catalog.digest} b'/data' '\\udcff\\n' [7, 8]\n"


def test_a_shared_catalog_is_one_memory_that_nobody_can_change():
    catalog = Catalog.of_files([f"{i:06d}" for i in range(10_000)])
    one, two = catalog.to_fd(), catalog.to_fd()
    try:
        assert os.path.samestat(os.fstat(one), os.fstat(two))
        with pytest.raises(PermissionError):
            os.pwrite(one, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(one, 0)
        shared = Catalog.from_fd(one)
        address = shared.keys.buffers()[2].address
        assert any(
            int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
            and "rayloader-catalog" in line
            for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        )
        again = shared.to_fd()
        assert os.path.samestat(os.fstat(one), os.fstat(again))
        os.close(again)
    finally:
        os.close(one)
        os.close(two)
    assert shared.key(9_999) == "009999"  # the descriptors are closed, the mapping is not


def test_a_loaded_catalog_is_shared_as_the_file_itself(tmp_path):
    path = tmp_path / "saved.arrow"
    Catalog.of_files(["a", "b"]).save(path)
    fd = Catalog.load(path).to_fd()
    assert os.path.samestat(os.fstat(fd), path.stat())
    os.close(fd)


def test_a_compressed_catalog_is_unpacked_once_for_all_processes(tmp_path):
    path = tmp_path / "saved.arrow"
    catalog = Catalog.of_files(["name"] * 1000)
    catalog.save(path)
    table = pa.ipc.open_file(path).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    fd = Catalog.load(path).to_fd()
    try:
        assert not os.path.samestat(os.fstat(fd), path.stat())
        assert_same(Catalog.from_fd(fd), catalog)
    finally:
        os.close(fd)


def test_a_loaded_catalog_outlives_its_file(tmp_path):
    path = tmp_path / "saved.arrow"
    Catalog.of_files(["a", "b"]).save(path)
    loaded = Catalog.load(path)
    path.unlink()
    assert through_fd(loaded).keys_at(np.array([1])) == [b"b"]


def test_no_descriptor_is_left_open(tmp_path):
    path = tmp_path / "saved.arrow"
    catalog = Catalog.of_files(["a", "b"])
    catalog.save(path)
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        through_fd(Catalog.of_files(["c"]))
        through_fd(Catalog.load(path))
        with pytest.raises(CatalogError):
            Catalog.load("/dev/null")
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_catalog_shared_before_a_fork_serves_the_child():
    catalog = through_fd(Catalog.of_files(["a", "b"]))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(catalog.names_at(np.array([1, 0]))))
    child.start()
    assert receiver.poll(20)
    assert receiver.recv() == ["b", "a"]
    child.join(20)
    assert catalog.names_at(np.array([0])) == ["a"]
    assert through_fd(catalog).key(1) == "b"


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "saved.arrow"
    Catalog.of_files(["a"]).save(path)
    directory = tmp_path / "taken.arrow"
    directory.mkdir()
    with pytest.raises(CatalogError, match=r"taken\.arrow: cannot be saved: Is a directory"):
        Catalog.of_files(["b"]).save(directory)
    with pytest.raises(CatalogError, match=r"no/saved\.arrow: cannot be saved: No such file"):
        Catalog.of_files(["b"]).save(tmp_path / "no" / "saved.arrow")
    assert sorted(os.listdir(tmp_path)) == ["saved.arrow", "taken.arrow"]
    assert Catalog.load(path).key(0) == "a"


def test_a_saved_file_has_the_permissions_of_any_other_new_file(tmp_path):
    Catalog.of_files(["a"]).save(tmp_path / "saved.arrow")
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("saved.arrow", "other")}
    assert len(modes) == 1


def test_a_slice_travels_without_the_array_it_was_cut_from():
    array = pa.array([f"name-{i:020d}" for i in range(100_000)], pa.large_binary())
    for piece in (array.slice(0, 5), array.slice(70_000, 5), array.slice(99_995)):
        catalog = Catalog.of_files(piece)
        assert catalog.keys_at(everything(catalog)) == piece.to_pylist()
        assert len(pickle.dumps(catalog)) < 2000
        assert Catalog.of_files(piece.to_pylist()).digest == catalog.digest


# Files from elsewhere


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("form", ["parquet", "arrow", "compressed"])
def test_a_table_from_elsewhere_is_a_catalog(tmp_path, kind, chunks, form):
    keys = [f"k{i}" for i in range(9)]
    table = pa.table(
        {"other": range(9), "size": pa.array([*range(8), None], pa.int32()), "key": keys}
    )
    table = table.set_column(2, "key", table["key"].cast(kind))
    path = tmp_path / f"foreign.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=9 // chunks)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd" if form == "compressed" else None)
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=9 // chunks)
    catalog = Catalog.from_source(path)
    assert catalog.names_at(everything(catalog)) == keys
    assert catalog.sizes.tolist() == [*range(8), -1]
    assert catalog.sizes.dtype == np.int64
    assert catalog.total_bytes == 28
    assert catalog.root == os.fsencode(tmp_path)
    assert catalog.digest == Catalog.of_files(keys).digest
    assert_same(through_fd(catalog), catalog)
    assert Catalog.load(path, root="/mnt").root == b"/mnt"
    assert_same(through_fd(Catalog.load(path, root="/mnt")), Catalog.load(path, root="/mnt"))


def test_a_table_that_was_edited_elsewhere_has_its_own_digest(tmp_path):
    """Arrow keeps metadata through a sort; a digest stored there would be a lie."""
    path = tmp_path / "saved.arrow"
    catalog = Catalog.of_files(["a", "b"])
    fd = catalog.to_fd()
    os.close(fd)
    catalog.save(path)
    table = pa.ipc.open_file(path).read_all().sort_by([("key", "descending")])
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert Catalog.load(path).digest == Catalog.of_files(["b", "a"]).digest


def _write_arrow(path, columns):
    table = pa.table(columns)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def _truncate(path):
    Catalog.of_files(["a" * 100] * 100).save(path)
    os.truncate(path, 4000)


def _corrupt_offsets(path):
    catalog = Catalog.of_files(["abcdef", "ghijkl", "mnopqr"])
    catalog.save(path)
    data = path.read_bytes()
    offsets = np.array([0, 6, 12, 18], np.int64).tobytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, np.array([0, 6, 2**40, 18], np.int64).tobytes()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b""), "not a catalog: the file is empty"),
        (lambda path: path.write_bytes(b"hello"), "neither an Arrow IPC file nor Parquet"),
        (lambda path: path.write_bytes(b"ARROW1\0\0" + bytes(500)), "not a catalog: "),
        (lambda path: path.write_bytes(b"PAR1" + bytes(500)), "not a catalog: "),
        (_truncate, "not a catalog: "),
        (_corrupt_offsets, "not a catalog: .*offset"),
        (lambda path: _write_arrow(path, {"path": ["a"]}), r"no column 'key'.*\['path'\]"),
        (lambda path: _write_arrow(path, {"key": [1]}), "names of type int64"),
        (lambda path: _write_arrow(path, {"key": ["a", None]}), "1 names are null"),
        (lambda path: _write_arrow(path, {"key": ["a", ""]}), "name 1 of the list is empty"),
        (lambda path: _write_arrow(path, {"key": ["a\0b"]}), r"a\\x00b: .*cannot hold a NUL"),
        (lambda path: _write_arrow(path, {"key": ["a"], "size": ["big"]}), "not a catalog: .*big"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_catalog_is_named_with_the_cause(tmp_path, make, words):
    path = tmp_path / "wrong.arrow"
    make(path)
    with pytest.raises(CatalogError, match=rf"(?s)wrong\.arrow: .*{words}") as caught:
        Catalog.load(path)
    assert "\n" not in str(caught.value)


def test_a_catalog_that_may_not_be_read_is_named(as_somebody):
    Catalog.of_files(["a"]).save("secret.arrow")
    os.chmod("secret.arrow", 0)
    with as_somebody(), pytest.raises(CatalogError, match=r"secret\.arrow: Permission denied"):
        Catalog.load("secret.arrow")


def test_a_descriptor_that_holds_no_catalog_is_named():
    with pytest.raises(CatalogError, match="descriptor 9999: Bad file descriptor"):
        Catalog.from_fd(9999)
    reader, writer = os.pipe()
    with pytest.raises(CatalogError, match=f"descriptor {reader}: .*not a regular file"):
        Catalog.from_fd(reader)
    os.close(reader)
    os.close(writer)


# Explicit lists


class Named:
    """A path-like object other than pathlib's."""

    def __fspath__(self):
        return "z"


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        (["b", "a", "b"], [b"b", b"a", b"b"]),
        (("x/../y", "/abs", "./z"), [b"x/../y", b"/abs", b"./z"]),
        ([b"\xff", b"a"], [b"\xff", b"a"]),
        (["a\udcffb", "\u00e9"], [b"a\xffb", "\u00e9".encode()]),
        (["a", b"b", pathlib.Path("c"), Named()], [b"a", b"b", b"c", b"z"]),
        (np.array(["a", "bcd"]), [b"a", b"bcd"]),
        (pa.array(["a", "b", "c"]).slice(1), [b"b", b"c"]),
        (pa.array(["", "\0", "b", None]).slice(2, 1), [b"b"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), [b"a", b"b", b"a"]),
        (pa.array([b"\xff"], pa.binary()), [b"\xff"]),
        (pa.chunked_array([["a"], ["b", "c"], []]), [b"a", b"b", b"c"]),
        (pa.array(["long view of a name", "b"], pa.string_view()), [b"long view of a name", b"b"]),
        ([], []),
        (pa.array([], pa.string()), []),
    ],
)
def test_a_list_keeps_its_names_and_order(files, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    catalog = Catalog.of_files(files)
    assert catalog.keys_at(everything(catalog)) == keys
    assert len(catalog) == len(keys)
    assert catalog.root == os.fsencode(tmp_path)
    assert catalog.sizes is catalog.checksums is catalog.total_bytes is None


def test_the_root_of_a_list_may_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Catalog.of_files(["a"], root="/data//x/").root == b"/data/x"
    assert Catalog.of_files(["a"], root=b"sub").root == os.fsencode(tmp_path / "sub")
    assert Catalog.of_files(["a"], root="link/../x").root == os.fsencode(tmp_path) + b"/link/../x"


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ("data/train", OptionError, "list of paths, not one path"),
        (b"data/train", OptionError, "list of paths, not one path"),
        (pathlib.Path("data"), OptionError, "list of paths, not one path"),
        (["a", 3], OptionError, "not int"),
        (["a", None], OptionError, "not NoneType"),
        (["a", "b", ""], CatalogError, "name 2 of the list is empty"),
        (["a", "ok", "x\0y"], CatalogError, r"x\\x00y: a file name cannot hold a NUL"),
        ([b"\0"], CatalogError, r"\\x00: a file name"),
        (["ab", "\0x", "c"], CatalogError, r"^\\x00x: a file name"),
        (pa.array(["long", "a", "b\0"]).slice(1), CatalogError, r"^b\\x00: a file name"),
        (
            pa.array([b"long", b"a", b"b\0", b"c"], pa.large_binary()).slice(1),
            CatalogError,
            r"^b\\x00",
        ),
        (pa.array(["long", "a", ""]).slice(1), CatalogError, "name 1 of the list is empty"),
        (pa.array(["a", None, None]), CatalogError, "2 names are null"),
        (pa.array([1, 2]), CatalogError, "names of type int64"),
    ],
)
def test_a_list_that_cannot_be_file_names_is_refused(files, error, words):
    with pytest.raises(error, match=words):
        Catalog.of_files(files)


def test_columns_of_another_length_are_refused():
    keys = pa.array(["a", "b"])
    with pytest.raises(CatalogError, match="2 keys and 3 values in 'size'"):
        Catalog(b"/", keys, np.zeros(3, np.int64))
    with pytest.raises(CatalogError, match="2 keys and 1 values in 'checksum'"):
        Catalog(b"/", keys, None, pa.array([1]))


# A million


def test_a_million_names_cost_a_process_that_maps_them_nearly_nothing(tmp_path):
    """Private memory, in a fresh process, before and after loading and looking up."""
    path = tmp_path / "million.arrow"
    numbers = np.char.zfill(np.arange(10**6).astype("U7"), 40)
    Catalog(b"/data", pa.array(numbers), np.arange(10**6)).save(path)
    program = """
        import sys, os, time
        import numpy as np
        from rayloader.catalog import Catalog

        def private():
            with open("/proc/self/smaps_rollup") as lines:
                return sum(int(line.split()[1]) for line in lines if "Private_Dirty" in line)

        warm = Catalog.of_files(["a"])
        warm.save(sys.argv[1] + ".small")
        Catalog.load(sys.argv[1] + ".small").blob_at(np.array([0]))
        before = private()
        catalog = Catalog.load(sys.argv[1])
        times = []
        for _ in range(200):
            indices = np.random.default_rng(0).integers(0, 10**6, 256)
            began = time.perf_counter()
            catalog.blob_at(indices)
            times.append(time.perf_counter() - began)
        assert catalog.key(999_999).endswith("999999") and catalog.sizes[-1] == 999_999
        print(private() - before, min(times) * 1e6)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    private_kib, microseconds = map(float, told.split())
    assert private_kib < 4096
    assert microseconds < 100


def test_an_empty_catalog_can_be_kept_but_not_read_from(tmp_path):
    path = tmp_path / "empty.arrow"
    Catalog.of_files([]).save(path)
    assert len(through_fd(Catalog.load(path))) == 0
    with pytest.raises(EmptyCatalog, match=r"nothing to read in .*empty\.arrow"):
        Catalog.from_source(path)
