"""Loaders that deliver the same objects as tensors to a training loop, one process each.

Method: as peers.py, whose training loop and orders they share. The endpoint and the credentials
come from the environment; ``uris`` is a text file with one URI per line.

Command: ``python -m benchmarks.object_peers NAME uris=LISTING batch_size=24 …``.

Peers, each in the quickest form found; all shuffle every epoch:

- torch ``DataLoader`` over s3torchconnector's ``S3MapDataset``, with persistent workers; its client
  is the AWS CRT's, one for each worker.
- boto3: one client with 64 connections, 64 threads that stay 64 objects ahead of the batch.
- obstore (Rust's object_store): the same threads with its blocking ``get``, whose bytes are not
  copied. For information.
- rayloader: ``RankDataset``.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks import peers
from benchmarks.peers import COLLATE, Peer, Samples

IN_FLIGHT = 64
"""Threads, and objects that are asked for ahead of the batch being made [objects]."""


@contextlib.contextmanager
def s3_torch(uris: str, batch_size: int) -> Iterator[Peer]:
    """``DataLoader`` over s3torchconnector; the loaders of one process are kept."""
    from s3torchconnector import S3ClientConfig, S3MapDataset

    dataset = S3MapDataset.from_objects(
        _lines(uris),
        region=os.environ["AWS_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        transform=_read,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    loaders: dict[tuple[int, str], DataLoader[Any]] = {}

    def epoch(number: int, *, workers: int, collate: str) -> Iterator[Samples]:
        if (workers, collate) not in loaders:
            loaders[workers, collate] = DataLoader(
                dataset,
                batch_size=batch_size,
                shuffle=True,
                num_workers=workers,
                collate_fn=COLLATE[collate][0],
                persistent_workers=bool(workers),
                multiprocessing_context="fork" if workers else None,
            )
        return map(COLLATE[collate][1], loaders[workers, collate])

    yield Peer(epoch)
    loaders.clear()


def _read(reader: Any) -> torch.Tensor:
    return _tensor(reader.read())


@contextlib.contextmanager
def boto3_threads(uris: str, batch_size: int) -> Iterator[Peer]:
    """boto3 with 64 threads."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=IN_FLIGHT))

    def get(uri: str) -> torch.Tensor:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return _tensor(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    with _ahead(get, _lines(uris), batch_size) as epoch:
        yield Peer(epoch)


@contextlib.contextmanager
def obstore_threads(uris: str, batch_size: int) -> Iterator[Peer]:
    """Obstore with 64 threads."""
    import obstore
    from obstore.store import S3Store

    listed = _lines(uris)
    bucket = listed[0].removeprefix("s3://").partition("/")[0]
    prefix = f"s3://{bucket}/"
    store = S3Store(bucket, client_options={"allow_http": True}, virtual_hosted_style_request=False)

    def get(uri: str) -> torch.Tensor:
        return _tensor(obstore.get(store, uri.removeprefix(prefix)).bytes())

    with _ahead(get, listed, batch_size) as epoch:
        yield Peer(epoch)


@contextlib.contextmanager
def _ahead(
    get: Callable[[str], torch.Tensor], uris: list[str], batch_size: int
) -> Iterator[Callable[..., Iterator[Samples]]]:
    """Batches in order, from threads that are always 64 objects ahead."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:

        def epoch(number: int) -> Iterator[Samples]:
            order = iter(random.Random(number).sample(uris, len(uris)))
            window: collections.deque[Future[torch.Tensor]] = collections.deque()
            batch: list[torch.Tensor] = []
            while True:
                while len(window) < IN_FLIGHT + batch_size and (uri := next(order, None)):
                    window.append(pool.submit(get, uri))
                if not window:
                    break
                batch.append(window.popleft().result())
                if len(batch) == batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch

        yield epoch


def _tensor(body: Any) -> torch.Tensor:
    """A view of bytes that nobody writes to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is read-only
        return torch.from_numpy(np.frombuffer(body, np.uint8))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


PEERS = {
    "s3-torch": s3_torch,
    "boto3": boto3_threads,
    "obstore": obstore_threads,
    "rayloader": peers.rayloader,
}

if __name__ == "__main__":
    peers.main(PEERS)
