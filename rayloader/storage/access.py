"""Who asks an object storage, and where it is: endpoint, region and credentials.

Credentials come from the environment of the training process, or from wherever else botocore finds
them for it (profile, container, instance). They go to the reader over the private socket of the
local channel, and there into the environment of its process, which is where s3dlio looks. They are
in no option, no pickle, no receipt, no message and no command line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rayloader.config import Options
from rayloader.errors import ChannelError, OptionError, UsageError

DEFAULT_REGION = "us-east-1"
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_AZURE = ("AZURE_", "S3DLIO_AZURE_")
_LEAST_SECRET = 6
"""Shorter values are not blotted out of messages: they would take words with them [characters]."""


@dataclasses.dataclass(frozen=True, repr=False)
class Access:
    """Where requests go, and in whose name. Never pickled."""

    endpoint: str = ""
    """``http://host:port``; empty: Amazon's own for the region."""
    region: str = ""
    """Empty: nobody named one."""
    ca_bundle: str = ""
    """File of the certificate authorities to trust; empty: the system's."""
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Credentials, by the names of the environment variables that s3dlio reads."""

    def __repr__(self) -> str:
        return f"<Access to {self.destination}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError("credentials are not pickled: a reader is told them over its own socket")

    @property
    def destination(self) -> str:
        """Where requests go, in words; a password in it is left out."""
        said = self.endpoint or f"https://s3.{self.region_in_force}.amazonaws.com"
        return re.sub("//[^/]*@", "//", said)

    @property
    def region_in_force(self) -> str:
        """What requests are signed for."""
        return self.region or DEFAULT_REGION

    @property
    def is_guessed(self) -> bool:
        """Nobody said where requests go: neither endpoint nor region."""
        return not self.endpoint and not self.region

    @property
    def warning(self) -> str:
        """For whoever may not have meant Amazon."""
        return (
            f"S3 requests go to Amazon ({self.destination}): neither endpoint_url nor "
            "AWS_ENDPOINT_URL is set, and no region"
        )

    @property
    def has_keys(self) -> bool:
        """There is a pair of keys to sign S3 requests with."""
        return all(self.secrets.get(name) for name in AWS_KEYS[:2])

    @classmethod
    def found(cls, environ: Mapping[str, str], options: Options | None = None) -> Access:
        """What an environment says; what the options say wins over it."""
        options = options if options is not None else Options()
        endpoint = options.endpoint_url or _first(environ, *_AWS_ENDPOINTS)
        region = options.region or _first(environ, "AWS_REGION", "AWS_DEFAULT_REGION")
        secrets = {
            name: value
            for name, value in environ.items()
            if value and (name in AWS_KEYS or name.startswith(_AZURE))
        }
        bundle = options.ca_bundle or _first(environ, "AWS_CA_BUNDLE")
        return cls(endpoint.rstrip("/"), region, bundle, secrets)

    def with_keys(self) -> Access:
        """This, with what botocore finds in profiles, containers and instances if it has no keys.

        Raises:
            OptionError: botocore is told to find them somewhere, and fails.
        """
        if self.has_keys:
            return self
        secrets = {name: self.secrets[name] for name in self.secrets if name not in AWS_KEYS}
        return dataclasses.replace(self, secrets=secrets | _from_botocore())

    def environment(self) -> dict[str, str]:
        """The variables that s3dlio reads."""
        values = dict(self.secrets)
        if self.endpoint:
            values["AWS_ENDPOINT_URL"] = self.endpoint
        if self.ca_bundle:
            values["AWS_CA_BUNDLE"] = self.ca_bundle
        values["AWS_REGION"] = values["AWS_DEFAULT_REGION"] = self.region_in_force
        return values

    def blotted(self, text: str) -> str:
        """A message without the credentials that it may repeat."""
        for secret in self.secrets.values():
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text

    def dumps(self) -> bytes:
        """As bytes, for a private socket."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> Access:
        """What :meth:`dumps` gave.

        Raises:
            ChannelError: it is something else.
        """
        try:
            values: dict[str, Any] = json.loads(data)
            return cls(**values)
        except (ValueError, TypeError) as wrong:
            # The words of the error could hold what must not be repeated.
            raise ChannelError("the trainer's access to the storage makes no sense") from wrong


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The value of the first of some variables that is set and not empty."""
    return next((environ[name] for name in names if environ.get(name)), "")


def _from_botocore() -> dict[str, str]:
    """Keys from profiles, containers and instances; none where there are none, or no botocore."""
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        return {}
    try:
        credentials = botocore.session.Session().get_credentials()
        frozen = credentials.get_frozen_credentials() if credentials is not None else None
    except botocore.exceptions.BotoCoreError as error:
        raise OptionError(f"no credentials for S3: {error}") from error
    if frozen is None:
        return {}
    values = dict(zip(AWS_KEYS, (frozen.access_key, frozen.secret_key, frozen.token), strict=True))
    return {name: value for name, value in values.items() if value}
