"""Whole runs on object storage: data sets and commands, and what becomes of them in bad times."""

import collections
import dataclasses
import json
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import rayloader
from rayloader.catalog import Catalog
from rayloader.errors import AccessDenied, Replaced, TlsFailure
from rayloader.storage.access import Access
from rayloader.storage.object_listing import S3Lister
from rayloader.testing import content
from tests.s3.servers import credentials

RAYLOADER = "from rayloader.cli import main; main()"
COUNT, SIZE = 160, 20_000
NAMES = [f"{i // 100}/o {i:03}%" for i in range(COUNT)]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def source(s3):
    """A prefix of 240 objects on SeaweedFS."""
    s3.create_bucket(Bucket="runs")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(s3, f"train/{name}", content(name, SIZE)), NAMES))
    return "s3://runs/train"


def put(s3, key, body):
    s3.put_object(Bucket="runs", Key=key, Body=body)


@pytest.fixture
def on_rclone(proxy, rclone):
    """The proxy before rclone: its folder."""
    proxy.upstream(rclone.endpoint)
    return rclone.files


@pytest.fixture(scope="module", autouse=True)
def _no_ray_is_left():
    yield
    rayloader.shutdown()


def opened(source, **options):
    known = {"batch_size": 8, "rank": 0, "world_size": 1, "shuffle": True, **options}
    return rayloader.RankDataset(source, **known)


def checked(batches):
    """Names as delivered; every byte is that of its name."""
    seen = []
    for batch in batches:
        for key, sample in zip(batch.keys, batch, strict=True):
            assert sample.numpy().tobytes() == content(key, SIZE)
            seen.append(key)
    return seen


def asked_for(proxy):
    """What the server was asked for: GETs of objects, by name."""
    entries = [entry for entry in proxy.seen("GET") if "list-type" not in entry.query]
    return collections.Counter(entry.path.removeprefix("runs/train/") for entry in entries)


def test_every_epoch_asks_once_for_what_its_plan_says(proxy, source):
    with opened(source) as dataset:
        assert len(dataset) == COUNT // 8
        orders = []
        for epoch in range(3):
            proxy.forget()
            dataset.set_epoch(epoch)
            orders.append(checked(dataset))
            assert asked_for(proxy) == dict.fromkeys(NAMES, 1)
            assert proxy.seen("HEAD") == []
            receipt = dataset.receipt
            assert (receipt.files, receipt.bytes) == (COUNT, COUNT * SIZE)
            assert (receipt.engine, receipt.retries, receipt.metadata_ops) == ("http", 0, 0)
        assert len({tuple(order) for order in orders}) == 3


def test_two_ranks_ask_for_their_own_shares(proxy, source):
    shares = []
    for rank in range(2):
        proxy.forget()
        with opened(source, rank=rank, world_size=2, seed=3) as dataset:
            checked(dataset)
        shares.append(asked_for(proxy))
    assert shares[0] + shares[1] == dict.fromkeys(NAMES, 1)
    assert sum(shares[0].values()) == COUNT // 2


def test_an_explicit_list_is_what_is_asked_for(proxy, source):
    with opened(None) as dataset:
        for epoch in range(3):
            mine = [f"{source}/{name}" for name in NAMES[epoch::3]]
            proxy.forget()
            dataset.set_epoch(epoch, files=mine)
            keys = [key for batch in dataset for key in batch.keys]
            assert keys == mine
            assert asked_for(proxy) == dict.fromkeys(NAMES[epoch::3], 1)


def test_a_list_that_no_listing_has_told_of_costs_one_request_per_object(proxy, source):
    mine = [f"{source}/{name}" for name in NAMES[::4]]
    with opened(mine) as dataset:
        for epoch in range(2):
            proxy.forget()
            dataset.set_epoch(epoch)
            keys = [key for batch in dataset for key in batch.keys]
            assert sorted(keys) == sorted(mine)
            assert asked_for(proxy) == dict.fromkeys(NAMES[::4], 1)
            assert proxy.seen("HEAD") == []
            assert dataset.receipt.bytes == len(mine) * SIZE


@pytest.mark.parametrize("verify", [True, False])
def test_an_object_of_the_same_size_in_the_place_of_a_listed_one(proxy, s3, verify):
    """Is noticed where it is compared with the ETag that was listed, and only there."""
    for i in range(8):
        put(s3, f"same/{i}", content(str(i), SIZE))
    catalog = Catalog.from_source("s3://runs/same", etags=True)
    put(s3, "same/5", content("another", SIZE))
    with opened(catalog, verify=verify, batch_size=1, shuffle=False) as dataset:
        if verify:
            with pytest.raises(Replaced, match=r"^5: its MD5"):
                list(dataset)
        else:
            read = {batch.keys[0]: batch[0].numpy().tobytes() for batch in dataset}
            assert read["5"] == content("another", SIZE)


def test_the_server_sees_64_in_flight(proxy, source):
    with opened(source) as dataset:
        list(dataset)
        dataset.set_epoch(1)
        proxy.forget()
        proxy.latency = 0.4
        list(dataset)
        assert proxy.peak == 64
        assert dataset.receipt.peak_in_flight == 64
        assert dataset.receipt.seconds < COUNT / 64 * 0.4 * 2.5


def test_a_server_that_goes_away_in_mid_epoch_costs_no_sample(proxy, source):
    with opened(source, read_ahead_batches=4) as dataset:
        batches = iter(dataset)
        seen = checked([next(batches) for _ in range(3)])
        proxy.go_away()
        back = threading.Timer(1.0, proxy.come_back)
        back.start()
        seen += checked(batches)
        back.join()
        assert sorted(seen) == sorted(NAMES)
        assert dataset.receipt.retries > 0
        assert dataset.receipt.restarts == 0


def test_throttling_is_on_the_receipt_and_ends_nothing(proxy, source):
    proxy.trouble(method="GET", key="/train/", skip=50, times=60, status=503, code="SlowDown")
    with opened(source, concurrency=8) as dataset:  # at more, several objects are in one call
        assert sorted(checked(dataset)) == sorted(NAMES)
        assert dataset.receipt.throttled == 60
        assert dataset.receipt.retries == 60


def test_a_killed_reader_costs_no_sample(proxy, source):
    with opened(source, read_ahead_batches=4) as dataset:
        batches = iter(dataset)
        seen = checked([next(batches) for _ in range(3)])
        os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
        seen += checked(batches)
        assert sorted(seen) == sorted(NAMES)
        assert dataset.receipt.restarts == 1


def test_an_error_says_which_object_where_and_why(proxy, source):
    proxy.trouble(method="GET", key="/1/o 123%$", status=403, code="AccessDenied")
    with opened(source) as dataset, pytest.raises(AccessDenied) as caught:
        list(dataset)
    error = caught.value
    assert str(error).startswith("1/o 123%: access denied")
    assert proxy.endpoint in str(error)
    assert any("rank 0" in note and "epoch 0" in note for note in error.__notes__)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.endpoint, again.__notes__) == (
        str(error), error.endpoint, error.__notes__,
    )  # fmt: skip


def test_what_cannot_be_read_may_be_left_out(proxy, source):
    proxy.trouble(method="GET", key="/1/o 123%$", status=403, code="AccessDenied")
    with opened(source, on_error="skip") as dataset:
        assert sorted(checked(dataset)) == sorted(set(NAMES) - {"1/o 123%"})
        assert [skipped.key for skipped in dataset.receipt.skipped] == ["1/o 123%"]


def test_large_objects_stay_within_the_memory(proxy, source, s3):
    for i in range(6):
        put(s3, f"large/{i}", content(str(i), 3_000_000 + i))
    with opened(
        "s3://runs/large", batch_size=1, part_bytes=1 << 18, memory_bytes=16 << 20
    ) as dataset:
        for batch in dataset:
            assert batch[0].numpy().tobytes() == content(batch.keys[0], batch.sizes[0])
            del batch
        assert dataset.receipt.memory_bytes <= 16 << 20
    gets = proxy.seen("GET", "/large/")
    assert max(entry.bytes for entry in gets) <= 1 << 18


# Listing


def test_a_listing_streams(proxy, on_rclone):
    """What the first page has is there while the second is still being asked for."""
    folder = on_rclone / "pages"
    folder.mkdir()
    for i in range(1500):
        (folder / f"{i:04}").write_bytes(b"x")
    held = proxy.trouble(method="GET", key="^pages", skip=1, hold=True)
    entries = S3Lister(Access.found(os.environ)).list(b"s3://pages")
    first = [next(entries) for _ in range(1000)]
    proxy.wait_for(held)
    proxy.release(held)
    rest = list(entries)
    assert sorted(first + rest) == [(b"%04d" % i, 1) for i in range(1500)]


def test_folders_are_listed_side_by_side_and_a_saved_catalog_lists_nothing(
    proxy, on_rclone, tmp_path
):
    for i in range(600):
        file = on_rclone / "wide" / f"{i % 12}" / f"{i}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * (i % 5))
    proxy.latency = 0.1
    catalog = Catalog.from_source("s3://wide")
    assert proxy.peak >= 6
    assert catalog.sizes.sum() == sum(i % 5 for i in range(600))
    catalog.save(tmp_path / "saved.arrow")
    proxy.forget()
    again = Catalog.load(tmp_path / "saved.arrow")
    assert (again.digest, len(again)) == (catalog.digest, 600)
    assert proxy.seen() == []


# The command line


def command(census, endpoint, *arguments, **environ):
    names = {**credentials(endpoint), **environ}
    return census.start(RAYLOADER, *map(str, arguments), **names)


def ended(process, seconds=90):
    out, err = process.popen.communicate(timeout=seconds)
    return process.popen.returncode, out.decode(), err.decode()


def test_commands_make_list_and_read_a_prefix(census, proxy, s3, tmp_path):
    s3.create_bucket(Bucket="made")

    def run(*arguments):
        status, _, err = ended(command(census, proxy.endpoint, *arguments))
        assert status == 0, err
        return err

    saved, report = tmp_path / "saved.arrow", tmp_path / "report.json"
    run("generate", "s3://made/train", "--files", 60, "--size", 5000)
    run("catalog", "s3://made/train", "-o", saved)
    assert len(Catalog.load(saved)) == 60
    proxy.forget()
    how = ("--ranks", 2, "--epochs", 2, "--batch-size", 5, "--json", report)
    err = run("read", saved, *how)
    assert proxy.endpoint in err.splitlines()[0], "where requests go, in the first line"
    (ours,) = json.loads(report.read_text())["loaders"]
    for epoch in ours["epochs"]:
        assert [receipt["files"] for receipt in epoch["receipts"]] == [30, 30]
    gets = collections.Counter(entry.path for entry in proxy.seen("GET", "^made/"))
    assert len(gets) == 60
    assert set(gets.values()) == {2}
    assert census.left() == []


def test_ctrl_c_ends_everything_with_status_130(census, proxy, source):
    proxy.latency = 0.2
    process = command(census, proxy.endpoint, "read", source, "--epochs", 1000)
    deadline = time.monotonic() + 60
    while not asked_for(proxy):
        assert process.popen.poll() is None, ended(process)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(20) == 130
    census.gone(10)


def test_without_an_endpoint_and_a_region_the_first_line_says_that_it_is_amazon(census):
    process = command(
        census, "", "read", "s3://no-such-bucket-of-ours/x", AWS_REGION="", AWS_ENDPOINT_URL="",
        HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="",
    )  # fmt: skip
    status, _, err = ended(process)
    assert status != 0
    first = err.splitlines()[0]
    assert "amazonaws.com" in first
    assert "AWS_ENDPOINT_URL" in err


def test_a_private_authority_is_trusted_when_it_is_named(proxy, rclone_tls):
    folder = rclone_tls.files / "private"
    folder.mkdir(exist_ok=True)
    for i in range(10):
        (folder / f"{i}").write_bytes(content(str(i), SIZE))
    there = {"endpoint_url": rclone_tls.endpoint, "batch_size": 1}
    with opened("s3://private", ca_bundle=str(rclone_tls.ca), **there) as dataset:
        assert sorted(checked(dataset)) == sorted(map(str, range(10)))
    with pytest.raises(TlsFailure, match="ca_bundle"):
        Catalog.from_source("s3://private", access=stranger(rclone_tls.endpoint))
    catalog = Catalog.of_files(["0"], "s3://private")
    with opened(catalog, retry_seconds=1.0, **there) as dataset, pytest.raises(TlsFailure):
        list(dataset)


def stranger(endpoint):
    return dataclasses.replace(Access.found(os.environ), endpoint=endpoint)


SECRET, TOKEN = "secret-9f4b-which-nobody-may-see", "token-7c1d-which-nobody-may-see"


def test_credentials_appear_nowhere(census, proxy, source, tmp_path):
    """Not in output, errors, receipts, logs or command lines; with RAYLOADER_DEBUG neither."""
    environ = {
        "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN, "RAYLOADER_DEBUG": "1",
    }  # fmt: skip
    catalog = Catalog.from_source(source)
    catalog.save(tmp_path / "saved.arrow")
    proxy.trouble(method="GET", status=403, code="AccessDenied", delay=0.5, body=f"{SECRET}")
    arguments = ("read", tmp_path / "saved.arrow", "--json", tmp_path / "report.json")
    process = command(census, proxy.endpoint, *arguments, **environ)
    lines, logs = set(), set()
    while process.popen.poll() is None:
        lines |= set(census.processes().values())
        logs |= found_in(census.tmp)
        time.sleep(1)
    status, out, err = ended(process)
    assert status == 1
    assert "access denied" in err
    everything = [out, err, *lines, *(path.read_text() for path in tmp_path.glob("*.json"))]
    assert [text for text in everything if SECRET in text or TOKEN in text] == []
    assert logs == set()
    assert len(lines) > 3


def found_in(directory):
    """Files below a directory that hold one of the secrets."""
    found = set()
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and os.path.getsize(path) < 1 << 24:
                    with open(path, "rb") as file:
                        text = file.read()
                    if SECRET.encode() in text or TOKEN.encode() in text:
                        found.add(path)
            except OSError:
                continue
    return found


def test_a_data_set_gives_no_credentials_away(proxy, source, monkeypatch):
    with opened(source) as dataset:
        list(dataset)
        shown = [
            repr(dataset), str(dataset.state_dict()), str(dataclasses.asdict(dataset.receipt)),
            repr(vars(dataset)),
        ]  # fmt: skip
    assert [text for text in shown if "testsecret" in text] == []
