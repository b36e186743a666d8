"""Generated data: the same bytes everywhere, no byte twice, and nobody else's file harmed."""

import ctypes
import hashlib
import itertools
import mmap
import os
import pathlib
import zlib

import numpy as np
import pyarrow as pa
import pytest

from rayloader import catalog as catalog_module
from rayloader.catalog import Catalog
from rayloader.errors import (
    AccessDenied,
    CatalogError,
    ObjectNotFound,
    OptionError,
    StorageError,
    UsageError,
)
from rayloader.experiment import generate as generate_module
from rayloader.experiment import recipe as recipe_module
from rayloader.experiment.generate import generate, verify
from rayloader.experiment.recipe import Recipe, checksum


@pytest.fixture
def data(tmp_path):
    """Where the data goes, in a directory of its own."""
    return tmp_path / "data"


def contents(catalog):
    """Every file's bytes, in catalog order."""
    root = pathlib.Path(os.fsdecode(catalog.root))
    return [(root / name).read_bytes() for name in catalog.names_at(np.arange(len(catalog)))]


def state(directory):
    """Every file below, with inode and time of change: differs when a file was rewritten."""
    return {
        os.path.join(folder, name): (status.st_ino, status.st_mtime_ns, status.st_size)
        for folder, _, names in os.walk(directory)
        for name in names
        for status in [os.stat(os.path.join(folder, name))]
    }


# What is made


def test_the_same_arguments_give_the_same_bytes_anywhere(tmp_path):
    one = generate(tmp_path / "one", 5, 10_000, seed=3)
    two = generate(tmp_path / "deep" / "two", 5, 10_000, seed=3)
    assert contents(one) == contents(two)
    assert one.digest == two.digest
    assert one.checksums.equals(two.checksums)
    # Golden: this very data set, whatever the machine and the release of NumPy.
    assert hashlib.blake2b(b"".join(contents(one)), digest_size=8).hexdigest() == "57151ae614092a09"


def test_another_seed_gives_other_bytes_in_every_file(tmp_path):
    one = contents(generate(tmp_path / "one", 5, 4096, seed=3))
    two = contents(generate(tmp_path / "two", 5, 4096, seed=-4))
    assert not set(one) & set(two)


def test_no_block_of_the_data_set_is_found_twice_in_it(data):
    catalog = generate(data, 40, 70_000)
    blocks = [
        text[at : at + 512]
        for text in contents(catalog)
        for at in range(0, len(text) - 511, 512)  # deduplicating stores cut at such places
    ]
    assert len(set(blocks)) == len(blocks) == 40 * (70_000 // 512)


def test_the_data_cannot_be_compressed(data):
    for text in contents(generate(data, 3, 300_000)):
        assert len(zlib.compress(text, 9)) >= len(text)


def test_bytes_of_a_large_file_do_not_repeat_from_block_to_block(data, monkeypatch):
    whole = contents(generate(data, 1, 50_003, seed=9))[0]
    monkeypatch.setattr(recipe_module, "BLOCK", 4096)
    monkeypatch.setattr(generate_module, "BLOCK", 4096)
    in_blocks = generate(data.with_name("again"), 1, 50_003, seed=9)
    assert contents(in_blocks)[0] == whole
    verify(in_blocks)
    assert len({whole[at : at + 64] for at in range(0, 50_000, 64)}) == 50_000 // 64 + 1


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4095, 4097])
def test_every_file_has_the_size_asked_for(data, size):
    catalog = generate(data, 3, size)
    assert [len(text) for text in contents(catalog)] == [size] * 3
    assert catalog.sizes.tolist() == [size] * 3
    assert catalog.total_bytes == 3 * size


def test_sizes_are_normally_distributed_around_the_mean(data):
    catalog = generate(data, 400, 1000, size_stdev=200)
    sizes = catalog.sizes
    assert sizes.tolist() == [len(text) for text in contents(catalog)]
    assert abs(sizes.mean() - 1000) < 4 * 200 / 20
    assert 160 < sizes.std() < 240
    assert 0.6 < (np.abs(sizes - 1000) < 200).mean() < 0.76
    other = generate(data.with_name("other"), 400, 1000, size_stdev=200, seed=1)
    assert sizes.tolist() != other.sizes.tolist()


def test_a_wide_distribution_makes_no_file_empty(data):
    assert int(generate(data, 60, 3, size_stdev=50).sizes.min()) == 1


def test_files_are_spread_evenly_over_subfolders(data):
    catalog = generate(data, 7, 10, subfolders=3)
    assert catalog.names_at(np.arange(7)) == [
        "part_00/sample_000000.bin",
        "part_00/sample_000003.bin",
        "part_00/sample_000006.bin",
        "part_01/sample_000001.bin",
        "part_01/sample_000004.bin",
        "part_02/sample_000002.bin",
        "part_02/sample_000005.bin",
    ]
    verify(catalog)


def test_file_names_do_not_depend_on_subfolders_nor_bytes_on_names(tmp_path):
    flat = generate(tmp_path / "flat", 7, 500, size_stdev=100)
    spread = generate(tmp_path / "spread", 7, 500, size_stdev=100, subfolders=3)
    by_name = {
        os.path.basename(name): text
        for name, text in zip(spread.names_at(np.arange(7)), contents(spread), strict=True)
    }
    assert by_name == dict(zip(flat.names_at(np.arange(7)), contents(flat), strict=True))


# Its catalog


def test_the_catalog_lies_beside_the_directory_and_equals_its_listing(data):
    catalog = generate(os.fspath(data) + "/", 12, 100, subfolders=2)
    assert sorted(os.listdir(data.parent)) == ["data", "data.arrow"]
    listed = Catalog.from_source(data, stat=True)
    for other in (listed, Catalog.from_source(data.with_name("data.arrow"))):
        assert other.digest == catalog.digest
        assert other.root == catalog.root
        assert other.sizes.tolist() == catalog.sizes.tolist()
    assert catalog.checksums.to_pylist() == [zlib.crc32(text) for text in contents(catalog)]


def test_the_directory_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate("data", 2, 10).root == os.fsencode(tmp_path / "data")


def test_progress_counts_up_to_the_number_of_files(data, monkeypatch):
    clock = itertools.count()  # a second passes between two looks at it
    monkeypatch.setattr(catalog_module.time, "monotonic", lambda: next(clock))
    for work in (
        lambda progress: generate(data, 50, 10, progress=progress),
        lambda progress: verify(Catalog.load(data.with_name("data.arrow")), progress),
    ):
        seen = []
        work(seen.append)
        assert seen == sorted(seen)
        assert len(set(seen)) > 5
        assert seen[-1] == 50


def test_data_is_on_disk_before_the_catalog_says_so(data, monkeypatch):
    events = []
    flush, save = generate_module._flush, Catalog.save
    monkeypatch.setattr(
        generate_module, "_flush", lambda *args: (events.append(("flush", *args)), flush(*args))
    )
    monkeypatch.setattr(Catalog, "save", lambda *args: (events.append("save"), save(*args)))
    generate(data, 3, 10)
    assert events == [("flush", os.fsencode(data)), "save"]


def test_generated_data_can_be_dropped_from_the_page_cache(data):
    """Dirty pages would stay."""
    control = data.with_name("control")
    control.mkdir()
    with open(control / "file", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    _drop(control)
    if _cached(control):
        pytest.skip("this file system keeps even clean pages")
    generate(data, 4, 1 << 20)
    _drop(data)
    assert _cached(data) == 0


def _drop(directory):
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(directory):
    """Pages of the files in a directory that are in the page cache, by mincore(2)."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for path in directory.iterdir():
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            address = np.frombuffer(view, np.uint8).ctypes.data
            pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
            assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), pages) == 0
            total += sum(page & 1 for page in pages)
    return total


# Again, and interrupted


def test_complete_data_is_left_alone(data, monkeypatch):
    first = generate(data, 20, 1000, size_stdev=300, subfolders=2)
    before = state(data.parent)
    monkeypatch.setattr(generate_module, "_write_all", lambda *args: pytest.fail("rewritten"))
    again = generate(data, 20, 1000, size_stdev=300, subfolders=2)
    assert state(data.parent) == before
    assert again.digest == first.digest
    assert again.checksums.equals(first.checksums)


@pytest.mark.parametrize("harm", ["remove", "truncate", "remove all"])
def test_data_that_lost_something_is_made_again(data, harm):
    first = generate(data, 5, 1000)
    if harm == "remove":
        os.unlink(data / "sample_000002.bin")
    elif harm == "truncate":
        os.truncate(data / "sample_000002.bin", 999)
    else:
        for name in os.listdir(data):
            os.unlink(data / name)
    again = generate(data, 5, 1000)
    verify(again)
    assert again.checksums.equals(first.checksums)
    assert sorted(os.listdir(data.parent)) == ["data", "data.arrow"]


def test_an_interrupted_run_is_finished_by_the_same_arguments_only(data, monkeypatch):
    class Interrupted(BaseException):
        pass

    with monkeypatch.context() as patched:
        original, calls = generate_module._write_one, itertools.count()

        def stop_halfway(*args):
            if next(calls) == 10:
                raise Interrupted
            return original(*args)

        patched.setattr(generate_module, "_write_one", stop_halfway)
        with pytest.raises(Interrupted):
            generate(data, 20, 100)
    assert len(os.listdir(data)) >= 9
    assert not data.with_name("data.arrow").exists()
    with pytest.raises(UsageError, match=r"generated with files=20.* size=100"):
        generate(data, 20, 101)
    verify(generate(data, 20, 100))
    assert sorted(os.listdir(data.parent)) == ["data", "data.arrow"]


def test_an_emptied_directory_takes_other_data(data):
    generate(data, 3, 100)
    for name in os.listdir(data):
        os.unlink(data / name)
    verify(generate(data, 2, 50))


# Other people's files


def refused(words, data, *arguments, **options):
    before = state(data.parent)
    with pytest.raises(UsageError, match=words):
        generate(data, *arguments, **options)
    assert state(data.parent) == before


def test_a_directory_with_other_files_is_refused(data):
    data.mkdir()
    (data / "sample_000000.bin").write_bytes(b"mine")  # the very name that would be written
    refused("data holds files that were not generated there", data, 3, 10)


def test_a_file_added_to_generated_data_is_refused_and_named(data):
    generate(data, 3, 10)
    for name in ("a\nb", ".hidden", "y", "z"):
        (data / name).write_bytes(b"mine")
    refused(r"holds other files: \.hidden, a\\nb, y and 1 more$", data, 3, 10)


def test_a_renamed_file_is_noticed(data):
    generate(data, 3, 10)
    (data / "sample_000002.bin").rename(data / "zebra")
    refused(r"holds other files: zebra$", data, 3, 10)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((4, 100), {}),
        ((2, 100), {}),
        ((3, 101), {}),
        ((3, 100), {"seed": 1}),
        ((3, 100), {"size_stdev": 1}),
        ((3, 100), {"subfolders": 1}),
    ],
)
def test_data_made_with_other_arguments_is_refused_and_they_are_named(data, arguments, options):
    generate(data, 3, 100)
    words = r"generated with files=3, seed=0, size=100, size_stdev=0\.0, subfolders=0"
    refused(words, data, *arguments, **options)


def test_a_file_or_catalog_that_would_be_overwritten_is_refused(data):
    data.with_name("data.arrow").write_bytes(b"mine")
    refused(r"data\.arrow would be overwritten: .*not a catalog", data, 3, 10)
    os.unlink(data.with_name("data.arrow"))
    Catalog.of_files(["a"]).save(data.with_name("data.arrow"))
    refused(r"data\.arrow would be overwritten: .*another data set", data, 3, 10)


def test_data_that_was_moved_gets_a_catalog_of_its_new_place(data):
    generate(data, 3, 10)
    data.rename(data.with_name("moved"))
    data.with_name("data.arrow").rename(data.with_name("moved.arrow"))
    catalog = generate(data.with_name("moved"), 3, 10)
    assert catalog.root == os.fsencode(data.with_name("moved"))
    verify(catalog)


def test_a_directory_that_is_a_file_is_an_error(data):
    data.write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"data: File exists"):
        generate(data, 3, 10)
    assert data.read_bytes() == b"mine"


def test_a_directory_that_may_not_be_written_is_named(as_somebody):
    os.mkdir("closed")
    os.chmod("closed", 0o555)
    with as_somebody(), pytest.raises(AccessDenied, match="permission denied"):
        generate("closed/data", 3, 10)


def test_a_full_disk_names_the_file():
    """/dev/full takes the bytes and then says that there is no room."""
    recipe = Recipe(1, 100_000, 0, 0, 0)
    with pytest.raises(StorageError, match="/dev/full: No space left on device"):
        generate_module._write_one(recipe, 0, b"/dev/full", 100_000)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 10), {}, "files=0: must be a whole number >= 1"),
        ((1.5, 10), {}, "files=1.5"),
        ((True, 10), {}, "files=True"),
        ((1, 0), {}, "size=0"),
        ((1, "9"), {}, "size='9'"),
        ((1, 10), {"size_stdev": -1}, "size_stdev=-1: must be a number of bytes >= 0"),
        ((1, 10), {"size_stdev": float("nan")}, "size_stdev=nan"),
        ((1, 10), {"size_stdev": float("inf")}, "size_stdev=inf"),
        ((1, 10), {"size_stdev": "a"}, "size_stdev='a'"),
        ((1, 10), {"subfolders": -1}, "subfolders=-1"),
        ((1, 10), {"seed": 0.5}, "seed=0.5"),
    ],
)
def test_a_wrong_argument_is_named(data, arguments, options, words):
    with pytest.raises(OptionError, match=words):
        generate(data, *arguments, **options)
    assert not data.exists()


# Verifying


def flip(path):
    with open(path, "r+b") as file:
        file.seek(500)
        byte = file.read(1)
        file.seek(500)
        file.write(bytes([byte[0] ^ 1]))


def test_verify_finds_a_flipped_bit_a_changed_length_and_a_missing_file(data):
    catalog = generate(data, 6, 1000)
    verify(catalog)
    flip(data / "sample_000003.bin")
    with pytest.raises(StorageError, match=r"sample_000003\.bin: its CRC-32 is .* where") as caught:
        verify(catalog)
    assert not hasattr(caught.value, "__notes__")
    os.truncate(data / "sample_000001.bin", 1001)
    with pytest.raises(StorageError, match=r"000001\.bin: it holds 1001 bytes where .* has 1000\n"):
        verify(catalog)
    os.unlink(data / "sample_000000.bin")
    with pytest.raises(ObjectNotFound, match=r"sample_000000\.bin: no such file") as caught:
        verify(catalog)
    assert caught.value.__notes__ == ["and 2 more of 6 files"]


def test_verify_does_not_hang_on_a_fifo(data):
    catalog = generate(data, 2, 10)
    os.unlink(data / "sample_000000.bin")
    os.mkfifo(data / "sample_000000.bin")
    with pytest.raises(StorageError, match=r"sample_000000\.bin: it holds 0 bytes"):
        verify(catalog)


def test_verify_needs_sizes_and_checksums(data):
    catalog = generate(data, 2, 10)
    for sizes, checksums in (
        (None, catalog.checksums),
        (catalog.sizes, None),
        (catalog.sizes, pa.array(["a", "b"])),
    ):
        with pytest.raises(CatalogError, match="no sizes and checksums to verify against"):
            verify(Catalog(catalog.root, catalog.keys, sizes, checksums))


def test_a_checksum_can_be_taken_in_pieces():
    assert checksum(b"world", checksum(b"hello ")) == checksum(memoryview(b"hello world"))
