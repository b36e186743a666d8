"""DLIO on object storage: what the server was asked for, epoch by epoch, by two ranks.

The witness has what DLIO assigned, the proxy before the server every request, on one clock.

DLIO 2.0.0 cannot read objects itself: it has no listing of a bucket, and drops ``storage_options``.
So the witness tells it the names, and the environment says where the objects are. The witness also
tells them to a DLIO that stores objects by their whole URI, since SeaweedFS folds the ``//`` in a
listing. All else is DLIO's own.
"""

import collections
import contextlib
import dataclasses
import json
import os
import random

import pytest

from tests.dlio.harness import NEEDS, kind_of
from tests.dlio.truth import KIND, fingerprint, in_bucket
from tests.s3.proxy import Proxy
from tests.s3.servers import ACCESS, REGION, SECRET, SeaweedFS, credentials

EPOCHS, BATCH, BATCH_EVAL = 3, 4, 2
FILES, FILES_EVAL = 28, 6
ALL_STEPS = {"train": 3, "valid": 1}
"""Of one rank in an epoch: 14 objects in batches of 4, and 3 in batches of 2."""
FOLDER, FORM = "data", "npz"
EACH = [(part, epoch, rank) for part in KIND for epoch in range(1, EPOCHS + 1) for rank in (0, 1)]
pytestmark = pytest.mark.timeout(900)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a DLIO is told of an object storage.

    Attributes:
        dlio: which one understands it.
        options: beside endpoint, region and keys, in ``storage_options``; ``None``: these stand in
            the environment.
        dataset: of the section of that name.
        uris: DLIO stores an object by its whole URI.
        told: the witness tells DLIO the names.
        total: ``total_training_steps``.
        apart: each rank asks an endpoint of its own.
    """

    dlio: str
    options: dict | None = None
    dataset: dict = dataclasses.field(default_factory=dict)
    uris: bool = False
    told: bool = False
    total: int = -1
    apart: bool = False

    @property
    def bucket(self):
        return "whole-uris" if self.uris else "plain-keys"


S3DLIO, TORCH, MINIO = (
    {"storage_library": name} for name in ("s3dlio", "s3torchconnector", "minio")
)
UNLISTED = {"skip_listing": True, "listing_validation_interval": 10}
UNSEEN = {**UNLISTED, "listing_validation_interval": 0}
WAYS = {
    "environment": Way("2.0.0", told=True, total=2),
    "environment, fork": Way("fork", dataset=UNLISTED),
    "s3dlio": Way("fork", S3DLIO),
    "s3dlio, unlisted": Way("fork", S3DLIO, UNLISTED),
    "s3torchconnector, two endpoints": Way("fork", TORCH, apart=True),
    "s3torchconnector, whole URIs": Way(
        "fork", {**TORCH, "use_full_object_uri": "true"}, UNSEEN, uris=True
    ),
    "minio": Way("fork", MINIO),
    "s3torchconnector, argonne": Way(
        "argonne", {}, {"data_folder": f"s3://whole-uris/{FOLDER}"}, uris=True, told=True
    ),
}


def ways():
    """Those of the DLIO under test, and one for each of the others, which is skipped."""
    kind = kind_of(os.environ.get("RAYLOADER_DLIO"))
    others = {way.dlio: way for way in WAYS.values() if way.dlio != kind}
    return [
        *(pytest.param(way, id=name) for name, way in WAYS.items() if way.dlio == kind),
        *(pytest.param(way, id=other, marks=pytest.mark.skip(reason=NEEDS[other]))
          for other, way in others.items()),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SeaweedFS(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def proxies(server, tmp_path_factory):
    """As many as are asked for; each is started when it is first needed."""
    with contextlib.ExitStack() as stack:
        started = []

        def give(count):
            while len(started) < count:
                log = tmp_path_factory.mktemp("proxy") / "log"
                started.append(stack.enter_context(Proxy(server.endpoint, log)))
            for proxy in started:
                proxy.forget()
            return started[:count]

        yield give


@pytest.fixture(scope="module", params=ways())
def run(request, dlio, server, proxies):
    """A finished run, with the requests that the server saw of it."""
    way = request.param
    sizes = store(server, way)
    asked = proxies(2 if way.apart else 1)
    environ = prepare(dlio, way, [proxy.endpoint for proxy in asked])
    if way.told:
        names = dlio.place / "names"
        names.write_text(json.dumps({
            part: [name for each, name in sizes if each == part] for part in KIND
        }))  # fmt: skip
        environ["DLIO_NAMES"] = str(names)
    finished = dlio.run(2, **environ)
    if way.options is MINIO and "no attribute 'bucket_exists'" in finished.said:
        pytest.skip("this DLIO cannot use its storage_library minio: its own check of the bucket "
                    "calls a method that it has not written")  # fmt: skip
    assert finished.status == 0, finished.said[-6000:]
    ranks = [(0,), (1,)] if way.apart else [(0, 1)]
    return Served(finished, zip(ranks, (proxy.seen() for proxy in asked), strict=True), way, sizes)


def store(server, way):
    """Put the objects there; (part, name) → size."""
    draw, sizes = random.Random(1), {}
    with contextlib.closing(server.client()) as s3:
        with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):
            s3.create_bucket(Bucket=way.bucket)
        for part, count in (("train", FILES), ("valid", FILES_EVAL)):
            for at in range(count):
                name = f"img_{at:0{len(str(count))}}_of_{count}.{FORM}"
                key = f"{FOLDER}/{part}/{name}"
                body = draw.randbytes(draw.randint(2_000, 6_000))
                sizes[part, name] = len(body)
                if way.uris:
                    key = f"s3://{way.bucket}/{key}"
                s3.put_object(Bucket=way.bucket, Key=key, Body=body)
    return sizes


def prepare(dlio, way, endpoints):
    """Write the workload file; the environment that belongs to it."""
    options, environ = way.options, {}
    if options is None:
        options, environ = S3DLIO, credentials(endpoints[0])
    else:
        options = {**options, "endpoint_url": endpoints[0], "region": REGION,
                   "access_key_id": ACCESS, "secret_access_key": SECRET}  # fmt: skip
    if way.apart:
        environ["S3_ENDPOINT_URIS"] = ",".join(endpoints)
    dlio.workload(
        storage={"storage_type": "s3", "storage_root": way.bucket, "storage_options": options},
        workflow={"evaluation": True},
        dataset={"format": FORM, "num_files_train": FILES, "num_files_eval": FILES_EVAL,
                 "record_length": 4000, "record_length_bytes": 4000, "data_folder": FOLDER,
                 **way.dataset},
        reader={"batch_size": BATCH, "batch_size_eval": BATCH_EVAL, "read_threads": 2,
                "prefetch_size": 2, "file_shuffle": "seed", "sample_shuffle": "seed"},
        train={"epochs": EPOCHS, "total_training_steps": way.total},
        evaluation={"eval_time": 0.001},
    )  # fmt: skip
    return environ


class Served:
    """A run, and what the server saw of it.

    Attributes:
        finished: the run.
        reads: GETs of objects, by the ranks that asked there: ``[(ranks, requests)]``.
        others: all other requests.
        steps: of one rank in an epoch, by part.
        root: what all keys of DLIO's are below, as rayloader names them.
    """

    def __init__(self, finished, seen, way, sizes):
        self.finished = finished
        self.root = f"s3://{way.bucket}/" * (2 if way.uris else 1)
        self.steps = {**ALL_STEPS, "train": way.total} if way.total > 0 else ALL_STEPS
        self._bucket = way.bucket
        self._sizes = sizes
        self.reads, self.others = [], []
        for ranks, requests in seen:
            reads = [one for one in requests if one.method == "GET" and one.path.endswith(FORM)]
            self.reads.append((ranks, reads))
            self.others += [one for one in requests if one not in reads]

    def assigned(self, part, epoch, rank):
        """What the steps of an epoch need, in DLIO's order: keys of the bucket as DLIO has them."""
        noted = self.finished.noted(rank, "assigned", epoch)[KIND[part]]
        needed = self.steps[part] * (BATCH if part == "train" else BATCH_EVAL)
        return [in_bucket(path, self._bucket) for path, _ in noted[:needed]]

    def span(self, part, epoch):
        """From the first rank's question for a batch to the last rank's last batch [s]."""
        starts, ends = (
            [self.finished.noted(rank, f"{event}_{KIND[part]}", epoch) for rank in (0, 1)]
            for event in ("start", "end")
        )
        return min(one["at"] for one in starts), max(one["last"] for one in ends)

    def asked_for(self, reads, part, epoch):
        """Of a part, within an epoch's span: (folder, name), as often as the server was asked."""
        first, last = self.span(part, epoch)
        within = (place(one.path) for one in reads if first <= one.began <= last)
        return collections.Counter(one for one in within if one[0] == part)

    def size(self, key):
        """Of an object [bytes]."""
        return self._sizes[place(key)]


def place(key):
    """An object's folder and name."""
    return tuple(key.split("/")[-2:])


@pytest.mark.parametrize("part", KIND)
def test_every_epoch_asks_once_for_each_object_that_dlio_assigned_for_it(run, part):
    for epoch in range(1, EPOCHS + 1):
        for ranks, reads in run.reads:
            wanted = [key for rank in ranks for key in run.assigned(part, epoch, rank)]
            assert run.asked_for(reads, part, epoch) == collections.Counter(map(place, wanted))


def test_nothing_is_read_outside_of_the_epochs(run):
    epochs = [(part, epoch) for part, epoch, rank in EACH if rank == 0]
    for _, reads in run.reads:
        assert len(reads) == sum(run.asked_for(reads, *which).total() for which in epochs)


def test_nothing_else_is_asked_for_once_the_first_epoch_has_begun(run):
    """DLIO itself may list the bucket before, or look at some objects."""
    first, _ = run.span("train", 1)
    assert [one for one in run.others if one.ended > first] == []


def test_the_list_moves_with_the_epochs(run):
    for rank in (0, 1):
        lists = {tuple(run.assigned("train", epoch, rank)) for epoch in range(1, EPOCHS + 1)}
        assert len(lists) == EPOCHS


def test_the_records_tell_the_same(run):
    receipts = run.finished.receipts
    assert sorted(receipts) == sorted(EACH)
    for key in EACH:
        record, wanted = receipts[key], run.assigned(*key)
        expected = fingerprint([f"{run.root}{name}" for name in wanted])
        assert record["storage"] == "s3"
        assert record["steps_yielded"] == run.steps[key[0]]
        assert record["files_read"] == len(wanted)
        assert record["read_hash"] == record["assigned_hash"] == expected.content
        assert record["order_hash"] == record["assigned_order_hash"] == expected.order
        assert record["bytes_files"] == record["bytes_delivered"] == sum(map(run.size, wanted))
        assert record["retries"] == 0
    train = [receipts[key] for key in EACH if key[0] == "train"]
    assert all(record["bytes_before_clock"] == 0 for record in train)


def test_no_secret_is_said_or_written(run):
    written = "".join(
        path.read_text(errors="replace")
        for path in run.finished.folder.glob("rayloader_receipts_*")
    )
    ours = [line for line in run.finished.said.splitlines() if line.startswith("rayloader")]
    assert ours
    assert SECRET not in written + "\n".join(ours)
    assert run.finished.gone_after is not None, run.finished.left
