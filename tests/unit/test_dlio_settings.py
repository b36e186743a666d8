"""What DLIO's arguments mean for rayloader."""

import pytest
from rayloader_dlio.settings import largest_batch_bytes, located, read_ahead, settings

from rayloader import OptionError
from tests.unit.dlio_arguments import arguments


def chosen(environ=None, **changes):
    return settings(arguments(**changes), environ or {})


def test_a_plain_workload_reads_as_dlio_would_and_through_a_ray_of_its_own():
    found = chosen(batch_size=24, prefetch_size=4, read_threads=2)
    options = found.options
    assert (options.batch_size, options.concurrency, options.read_ahead_batches) == (24, 64, 4)
    assert (options.ray, options.shuffle, options.drop_last) == ("private", False, True)
    assert (found.storage, found.told, found.deeper) == ("file", {}, False)


@pytest.mark.parametrize(
    ("threads", "prefetch", "batches"),
    [(1, 2, 2), (4, 2, 4), (4, 6, 8), (2, 0, 4), (4, None, 8), (0, 2, 0)],
)
def test_the_read_ahead_is_what_dlios_own_loader_holds(threads, prefetch, batches):
    assert read_ahead(arguments(read_threads=threads, prefetch_size=prefetch)) == batches


@pytest.mark.parametrize("name", ["jpeg", "png", "npy", "npz", "csv", "hdf5"])
def test_formats_that_dlio_reads_as_whole_files_are_served(name):
    assert chosen(format=name).storage == "file"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "tfrecord"}, "tfrecord"),
        ({"format": "parquet"}, "parquet.*row group"),
        ({"format": "indexed_binary"}, "indexed_binary"),
        ({"format": "synthetic"}, "synthetic"),
        ({"format": "hdf5", "num_samples_per_file": 4}, "hdf5 with num_samples_per_file"),
        ({"storage_type": "aistore"}, "aistore is not served"),
        ({"storage_type": "parallel_fs"}, "parallel_fs"),
        ({"framework": "tensorflow"}, "framework: tensorflow"),
        ({"data_loader": "dali"}, "data_loader: dali"),
        ({"data_loader_sampler": "none"}, "data_loader_sampler: none"),
        ({"reader_classname": "a.Reader"}, "reader_classname"),
        ({"preprocess_time": {"mean": 0.1}}, "preprocess_time"),
        ({"preprocess_time": 0.1}, "preprocess_time"),
        ({"read_type": "memory"}, "read_type"),
        ({"file_access": "shared"}, "file_access: shared"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, named):
    with pytest.raises(OptionError, match=named):
        chosen(**changes)


def test_records_of_an_hdf5_file_are_served_where_dlio_itself_reads_whole_files():
    assert chosen(format="hdf5", num_samples_per_file=4, files_pre_sharded=True)


@pytest.mark.parametrize(
    ("changes", "direct"),
    [
        ({}, False),
        ({"odirect": True}, True),
        ({"storage_options": {"uri_scheme": "direct"}}, True),
        ({"storage_options": {"storage_library": "direct"}}, True),
        ({"storage_type": "direct_fs", "storage_options": {"storage_library": "s3dlio"}}, True),
    ],
)
def test_every_way_in_which_dlio_asks_for_o_direct_is_heard(changes, direct):
    assert chosen(**changes).options.direct is direct


def test_options_come_from_the_workload_file_and_the_environment_wins():
    found = chosen(
        {"RAYLOADER_CONCURRENCY": "32", "RAYLOADER_DELIVER": "false", "RAYLOADER_DEBUG": "1"},
        storage_options={"rayloader": {"concurrency": 16, "memory_bytes": 1 << 30}},
    )
    options = found.options
    assert (options.concurrency, options.deliver, options.memory_bytes) == (32, False, 1 << 30)
    assert found.told == {
        "concurrency": "RAYLOADER_CONCURRENCY",
        "deliver": "RAYLOADER_DELIVER",
        "memory_bytes": "storage_options.rayloader.memory_bytes",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("512M", 512 << 20), ("1GiB", 1 << 30), ("2GB", 2_000_000_000), ("4194304", 4 << 20)],
)
def test_sizes_in_the_environment_are_spelled_as_on_the_command_line(text, value):
    assert chosen({"RAYLOADER_MEMORY_BYTES": text}).options.memory_bytes == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("read_ahead_batches", "none", None),
        ("read_ahead_batches", "12", 12),
        ("direct", "fallback", "fallback"),
        ("direct", "1", True),
        ("stall_seconds", "2.5", 2.5),
        ("ray", "cluster", "cluster"),
        ("ray", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("cpus", "node", "node"),
    ],
)
def test_text_is_read_as_its_option_has_it(name, text, value):
    found = chosen({f"RAYLOADER_{name.upper()}": text}).options
    assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RAYLOADER_CONCURENCY": "3"}, "concurency.*did you mean 'concurrency'"),
        ({"RAYLOADER_CONCURRENCY": "many"}, "RAYLOADER_CONCURRENCY='many'"),
        ({"RAYLOADER_DELIVER": "perhaps"}, "RAYLOADER_DELIVER='perhaps'"),
        ({"RAYLOADER_STALL_SECONDS": "soon"}, "RAYLOADER_STALL_SECONDS"),
        ({"RAYLOADER_BATCH_SIZE": "3"}, r"RAYLOADER_BATCH_SIZE.*reader\.batch_size"),
        ({"RAYLOADER_SHUFFLE": "true"}, "RAYLOADER_SHUFFLE.*file_shuffle"),
        ({"RAYLOADER_ON_ERROR": "skip"}, "RAYLOADER_ON_ERROR"),
    ],
)
def test_unknown_wrong_and_foreign_options_are_errors(environ, named):
    with pytest.raises(OptionError, match=named):
        chosen(environ)


def test_a_section_that_is_none_is_an_error():
    with pytest.raises(OptionError, match="must be a section"):
        chosen(storage_options={"rayloader": 64})


def test_deeper_read_ahead_than_dlios_is_known_as_such():
    assert chosen({"RAYLOADER_READ_AHEAD_BATCHES": "64"}).deeper
    assert chosen({"RAYLOADER_READ_AHEAD_BATCHES": "none"}).deeper


def test_memory_has_room_for_two_of_the_largest_batches():
    unet = {"record_length": 146_600_628, "record_length_stdev": 68_341_808, "batch_size": 7}
    largest = largest_batch_bytes(arguments(**unet))
    assert 7 * 146_600_628 < largest < 3 << 30
    assert chosen(**unet).options.memory_bytes == 2 * largest + (64 << 20)
    assert chosen({"RAYLOADER_DELIVER": "no"}, **unet).options.memory_bytes == 512 << 20
    assert chosen(record_length=1000).options.memory_bytes == 512 << 20


def test_the_largest_batch_is_reckoned_from_eval_and_from_what_dlio_draws_too():
    small = largest_batch_bytes(arguments(record_length=10_000, batch_size=4))
    assert small < largest_batch_bytes(
        arguments(record_length=10_000, batch_size=4, do_eval=True, batch_size_eval=16)
    )
    assert small <= largest_batch_bytes(arguments(record_length=1, dimension=100, batch_size=4))


@pytest.mark.parametrize(
    ("path", "changes", "wanted"),
    [
        ("/d/train/a:b/img", {}, "/d/train/a:b/img"),
        ("direct:///d/train/img", {"storage_type": "direct_fs"}, "/d/train/img"),
        ("/cwd/direct:/d/train/img", {"storage_type": "direct_fs"}, "/d/train/img"),
        ("/cwd/file:/d/train/img", {"storage_type": "s3"}, "/d/train/img"),
        ("/d/train/img", {"storage_type": "direct_fs"}, "/d/train/img"),
    ],
)
def test_paths_that_dlio_has_mangled_are_put_right(path, changes, wanted):
    assert located(path, arguments(**changes), "file") == wanted


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("s3://bucket/data/train/img", "s3://bucket/data/train/img"),
        ("/cwd/s3:/bucket/data/train/img", "s3://bucket/data/train/img"),
        ("/cwd/data/train/img", "s3://bucket/data/train/img"),
        ("data/train/img", "s3://bucket/data/train/img"),
    ],
)
def test_objects_are_named_by_bucket_and_key(path, wanted):
    given = arguments(
        storage_type="s3", storage_root="bucket", data_folder="data", files_pre_sharded=True
    )
    assert located(path, given, "s3") == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {
            "files_pre_sharded": True,
            "storage_options": {"storage_library": "minio", "use_full_object_uri": "true"},
        },
        {},  # argonne-lcf's DLIO 3
    ],
)
def test_objects_are_named_by_their_uri_within_the_bucket_where_dlio_stores_them_so(changes):
    given = arguments(storage_type="s3", storage_root="bucket", data_folder="data", **changes)
    for path in ("s3://bucket/data/img", "/cwd/s3:/bucket/data/img", "data/img"):
        assert located(path, given, "s3") == "s3://bucket/s3://bucket/data/img"


@pytest.mark.parametrize("library", ["s3dlio", "s3torchconnector", "minio"])
def test_object_storage_is_found_where_dlio_has_it(library):
    found = chosen(
        storage_type="s3",
        storage_options={
            "storage_library": library,
            "endpoint_url": "http://127.0.0.1:9000",
            "region": "here",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "prefetch_window": "32",
        },
    )
    options = found.options
    assert found.storage == "s3"
    assert (options.endpoint_url, options.region) == ("http://127.0.0.1:9000", "here")
    assert options.concurrency == 32
    assert found.credentials == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert "secret" not in repr(found)


def test_the_workload_file_wins_over_the_environment_as_it_does_in_dlio():
    found = chosen(
        {"AWS_ENDPOINT_URL": "http://another", "AWS_REGION": "away", "AWS_ACCESS_KEY_ID": "mine"},
        storage_type="s3",
        storage_options={"endpoint_url": "http://all", "region": "here", "access_key_id": "key"},
    )
    assert (found.options.endpoint_url, found.options.region) == ("http://all", "here")
    assert found.credentials == {"AWS_ACCESS_KEY_ID": "key"}


def test_what_the_workload_file_does_not_say_the_environment_says():
    found = chosen({"AWS_ENDPOINT_URL": "http://there"}, storage_type="s3", storage_options={})
    assert (found.options.endpoint_url, found.options.region) == (None, None)
    assert found.credentials == {}


@pytest.mark.parametrize(("rank", "endpoint"), [(0, "http://a"), (1, "http://b"), (2, "http://a")])
def test_a_rank_of_the_fork_asks_the_endpoint_that_is_dealt_out_to_it(rank, endpoint):
    found = chosen(
        {"S3_ENDPOINT_URIS": "http://a, http://b"},
        files_pre_sharded=True,
        my_rank=rank,
        storage_type="s3",
        storage_options={"storage_library": "minio", "endpoint_url": "http://all"},
    )
    assert found.options.endpoint_url == endpoint


def test_an_endpoint_without_a_scheme_is_what_minios_library_takes_it_for():
    options = {"storage_library": "minio", "endpoint_url": "10.0.0.1:9000"}
    found = chosen(storage_type="s3", storage_options=options)
    assert found.options.endpoint_url == "http://10.0.0.1:9000"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"storage_library": "boto3"}, "storage_library: boto3"),
        ({"storage_library": "s3torchconnector", "s3_profile": "mine"}, "s3_profile"),
    ],
)
def test_libraries_that_would_read_otherwise_are_refused_by_name(options, named):
    with pytest.raises(OptionError, match=named):
        chosen(storage_type="s3", storage_options=options)


@pytest.mark.parametrize("scheme", ["gs", "ftp"])
def test_object_storage_that_rayloader_does_not_read_is_refused(scheme):
    with pytest.raises(OptionError, match=rf"s3 \({scheme}\) is not served"):
        chosen(storage_type="s3", storage_options={"uri_scheme": scheme})


@pytest.mark.parametrize("scheme", ["file", "direct"])
def test_files_behind_the_object_interface_are_read_as_files(scheme):
    found = chosen(storage_type="s3", storage_options={"uri_scheme": scheme})
    assert found.storage == "file"
    assert found.options.direct is (scheme == "direct")
