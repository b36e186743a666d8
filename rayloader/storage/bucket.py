"""A bucket off the path of training: single objects read and written through botocore.

For what is done once: saved catalogs, test data. It has its own repetitions, of which there are no
others here.
"""

from __future__ import annotations

from typing import Any

from rayloader.config import (
    BUCKET_ANSWER_SECONDS,
    BUCKET_ATTEMPTS,
    BUCKET_CONNECT_SECONDS,
    LISTINGS_AT_ONCE,
)
from rayloader.errors import ObjectNotFound, OptionError
from rayloader.storage.access import Access
from rayloader.storage.object_errors import no_credentials, of_botocore
from rayloader.storage.uri import location, root_of, shown


class Bucket:
    """Objects by their names below an S3 root. Any thread may call it.

    Raises:
        OptionError: the scheme is not S3's, or botocore is not installed.
        CredentialsRejected: there are no credentials.
    """

    def __init__(self, root: bytes, access: Access) -> None:
        """``root`` is ``s3://bucket`` or ``s3://bucket/prefix``."""
        self._place = location(root)
        if self._place.scheme != b"s3":
            raise OptionError(f"{shown(root)}: only s3:// can be written to")
        self._root = root_of(self._place)
        self._access = access
        self._client = s3_client(shown(self._root), access)

    def get(self, key: str) -> bytes | None:
        """All of an object; ``None`` where there is none.

        Raises:
            StorageError: it cannot be read; the class says why.
        """
        try:
            answer = self._client.get_object(**self._named(key))
            data: bytes = answer["Body"].read()
        except Exception as error:
            failure = of_botocore(self._shown(key), error, self._access)
            if type(failure) is ObjectNotFound:
                return None
            raise failure from None
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Create an object, or replace it.

        Raises:
            StorageError: it cannot be written; the class says why.
        """
        try:
            self._client.put_object(**self._named(key), Body=bytes(data))
        except Exception as error:
            raise of_botocore(self._shown(key), error, self._access) from None

    def remove(self, key: str) -> None:
        """Delete an object, if there is one.

        Raises:
            StorageError: it cannot be deleted; the class says why.
        """
        try:
            self._client.delete_object(**self._named(key))
        except Exception as error:
            raise of_botocore(self._shown(key), error, self._access) from None

    def _named(self, key: str) -> dict[str, str]:
        return {
            "Bucket": self._place.bucket.decode(),
            "Key": self._place.prefix.decode() + key,
        }

    def _shown(self, key: str) -> str:
        return f"{shown(self._root)}/{key}"


def s3_client(root: str, access: Access) -> Any:
    """A client of botocore for this endpoint: path style, as s3dlio has it.

    Raises:
        OptionError: botocore is not installed.
        StorageError: there are no credentials.
    """
    try:
        import botocore.session
        from botocore.config import Config
    except ImportError as error:
        raise OptionError(
            "listing and writing buckets needs botocore: pip install botocore"
        ) from error
    access = access.with_keys()
    if not access.has_keys:
        raise no_credentials(root, access)
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=access.endpoint or None,
        region_name=access.region_in_force,
        aws_access_key_id=access.secrets["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=access.secrets["AWS_SECRET_ACCESS_KEY"],
        aws_session_token=access.secrets.get("AWS_SESSION_TOKEN"),
        verify=access.ca_bundle or None,
        config=Config(
            s3={"addressing_style": "path"},
            connect_timeout=BUCKET_CONNECT_SECONDS,
            read_timeout=BUCKET_ANSWER_SECONDS,
            max_pool_connections=LISTINGS_AT_ONCE,
            retries={"mode": "standard", "total_max_attempts": BUCKET_ATTEMPTS},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
