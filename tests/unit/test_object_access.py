"""Who asks and where: from the environment, never anywhere else than to the reader."""

import copy
import dataclasses
import pickle
import socket

import pytest

from rayloader.channel import wire
from rayloader.config import Options
from rayloader.errors import ChannelError, OptionError, StorageError, UsageError
from rayloader.storage import StorageSpec
from rayloader.storage.access import Access
from rayloader.storage.object_errors import of_s3dlio

SECRET, TOKEN, KEY = "very-secret-value", "session-token-value", "AKIAKEYVALUE"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": TOKEN,
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9000/",
    "AWS_REGION": "eu-west-1",
    "AWS_CA_BUNDLE": "/etc/ca.pem",
    "AZURE_CLIENT_SECRET": "azure-secret-value",
    "HOME": "/root",
}
SECRETS = (SECRET, TOKEN, KEY, "azure-secret-value")


def no_secret_in(text):
    assert not [secret for secret in SECRETS if secret in text]


def test_the_environment_says_who_and_where():
    access = Access.found(ENVIRONMENT)
    assert access.endpoint == access.destination == "http://127.0.0.1:9000"
    assert (access.region, access.ca_bundle) == ("eu-west-1", "/etc/ca.pem")
    assert access.has_keys
    assert not access.is_guessed
    assert set(access.secrets) == {*list(ENVIRONMENT)[:3], "AZURE_CLIENT_SECRET"}


def test_options_win_over_the_environment():
    options = Options(endpoint_url="https://s3.here:9000", region="here", ca_bundle="/ca")
    access = Access.found(ENVIRONMENT, options)
    assert (access.endpoint, access.region, access.ca_bundle) == (
        "https://s3.here:9000", "here", "/ca",
    )  # fmt: skip


def test_the_endpoint_of_s3_wins_over_that_of_all_services():
    access = Access.found({**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": "http://s3only:1"})
    assert access.endpoint == "http://s3only:1"


@pytest.mark.parametrize(
    ("environment", "guessed", "destination"),
    [
        ({}, True, "https://s3.us-east-1.amazonaws.com"),
        ({"AWS_REGION": ""}, True, "https://s3.us-east-1.amazonaws.com"),
        ({"AWS_DEFAULT_REGION": "eu-west-3"}, False, "https://s3.eu-west-3.amazonaws.com"),
        ({"AWS_ENDPOINT_URL": "http://h:1"}, False, "http://h:1"),
    ],
)
def test_where_requests_go_is_clear(environment, guessed, destination):
    access = Access.found(environment)
    assert access.is_guessed is guessed
    assert access.destination == destination
    assert destination in access.warning


def test_credentials_are_in_no_text():
    access = Access.found(ENVIRONMENT)
    spec = StorageSpec(scheme="s3", access=access)
    for text in (repr(access), str(access), f"{access}", repr(spec), access.warning):
        no_secret_in(text)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_credentials_are_in_no_pickle(protocol):
    access = Access.found(ENVIRONMENT)
    for value in (access, StorageSpec(access=access), {"access": access}):
        with pytest.raises(UsageError, match="credentials are not pickled"):
            pickle.dumps(value, protocol)
    with pytest.raises(UsageError):
        copy.deepcopy(access)
    no_secret_in(repr(pickle.dumps(Options(endpoint_url="http://h:1", region="r"))))


def test_they_travel_over_the_socket_and_arrive_as_they_were():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    access = Access.found(ENVIRONMENT)
    with ours, theirs:
        ours.send(wire.pack(wire.Kind.HELLO, wire.PROTOCOL_VERSION, payload=access.dumps()))
        _, _, payload = wire.unpack(theirs.recv(wire.PACKET_BYTES))
    assert Access.loads(payload) == access


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"endpoint": 1, "more": 2}', b'"secret"'])
def test_what_is_no_access_is_refused_without_repeating_it(data):
    with pytest.raises(ChannelError, match="makes no sense") as refused:
        Access.loads(data)
    assert data.decode() not in str(refused.value) or not data


def test_a_message_of_the_storage_that_repeats_a_secret_loses_it():
    access = Access.found(ENVIRONMENT)
    said = RuntimeError(f"something odd about {SECRET} and {TOKEN}")
    error, _ = of_s3dlio("k", "s3://b/k", said, access)
    assert isinstance(error, StorageError)
    no_secret_in(str(error))
    no_secret_in(repr(pickle.dumps(error)))


def test_short_values_are_not_blotted_out_of_words():
    access = dataclasses.replace(Access(), secrets={"AWS_ACCESS_KEY_ID": "it"})
    assert access.blotted("it is written") == "it is written"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9000",
        "ftp://h",
        "http://",
        "http://user:password@h",
        "http://h?x=1",
        "http://h:x",
    ],
)
def test_an_endpoint_that_is_none_is_refused_without_repeating_it(url):
    with pytest.raises(OptionError, match=r"^endpoint_url: must be http://HOST:PORT") as refused:
        Options(endpoint_url=url)
    assert "password" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:9000", "http://[::1]:9000", "http://h:80/s3"]
)
def test_an_endpoint_may_be_any_host_with_port_and_path(url):
    assert Options(endpoint_url=url).endpoint_url == url


@pytest.mark.parametrize("name", ["endpoint_url", "region", "ca_bundle"])
def test_an_empty_place_is_refused(name):
    with pytest.raises(OptionError, match=f"^{name}"):
        Options(**{name: ""})
