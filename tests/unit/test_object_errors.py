"""What s3dlio, obstore and botocore say, as typed errors. The words are from real calls."""

import pickle

import botocore.exceptions
import pytest

from rayloader import errors
from rayloader.storage.access import Access
from rayloader.storage.object_errors import of_botocore, of_obstore, of_s3dlio

ACCESS = Access("http://127.0.0.1:9000", "us-east-1")
URI = "s3://b/k"
CONNECT = (
    f"s3 transport failure: no HTTP response: S3 GET for {URI} failed: dispatch failure "
    "(connection timeout: timeout: error sending request for url "
    "(http://127.0.0.1:9000/b/k?x-id=GetObject): client error (Connect): %s) — %s"
)
SEND = (
    f"S3 GET for {URI} failed: dispatch failure (I/O error: io error: error sending request for "
    "url (http://127.0.0.1:9000/b/k?x-id=GetObject): client error (SendRequest): %s) — check "
    "AWS_ENDPOINT_URL, network connectivity, and that the server is running"
)
BODY = "S3 GET body stream failed: streaming error: %s"
CUT = (
    "error decoding response body: error reading a body from connection: end of file before "
    "message length reached"
)
TLS_ADVICE = "TLS/certificate error — set AWS_CA_BUNDLE to your CA cert"

SAID = [
    (f"s3 not found: status 404, code NoSuchKey: S3 GET for {URI} failed: service error: NoSuchKey "
     "(no message) — object key does not exist", errors.ObjectNotFound, False),
    (f"GET range for {URI} failed: service error: NoSuchKey (m) — object key does not exist",
     errors.ObjectNotFound, False),
    (f"s3 error: status 404, code NoSuchBucket: S3 GET for {URI} failed: service error: "
     "NoSuchBucket (The specified bucket does not exist) — check the bucket name in the URI",
     errors.BucketNotFound, False),
    (f"s3 forbidden: status 403, code AccessDenied: S3 GET for {URI} failed: service error: "
     "AccessDenied (m) — check AWS_ACCESS_KEY_ID", errors.AccessDenied, False),
    (f"s3 forbidden: status 403: S3 HEAD for {URI} failed: service error: unknown (no message) — "
     "HTTP 403 Forbidden", errors.AccessDenied, False),
    (f"s3 forbidden: status 403, code InvalidAccessKeyId: S3 GET for {URI} failed: service error: "
     "InvalidAccessKeyId (m)", errors.CredentialsRejected, False),
    (f"s3 forbidden: status 403, code SignatureDoesNotMatch: S3 GET for {URI} failed: service "
     "error: SignatureDoesNotMatch (m)", errors.CredentialsRejected, False),
    (f"s3 forbidden: status 403, code RequestTimeTooSkewed: S3 GET for {URI} failed: service "
     "error: RequestTimeTooSkewed (m)", errors.CredentialsRejected, False),
    ("Missing AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY", errors.CredentialsRejected, False),
    (f"s3 server failure: status 400, code ExpiredToken: S3 GET for {URI} failed: service error: "
     "ExpiredToken (m)", errors.CredentialsExpired, False),
    (f"s3 throttled: status 503, code SlowDown: S3 GET for {URI} failed: service error: SlowDown "
     "(m)", errors.Throttled, True),
    (f"S3 GET for {URI} failed: service error: unknown (no message) — HTTP 503 Service Unavailable",
     errors.Throttled, True),
    (f"s3 throttled: status 429, code TooManyRequests: S3 GET for {URI} failed: service error: "
     "TooManyRequests (m)", errors.Throttled, True),
    (f"s3 server failure: status 500, code InternalError: S3 GET for {URI} failed: service error: "
     "InternalError (m)", errors.ServerFailure, True),
    (f"s3 server failure: status 503, code ServiceUnavailable: S3 GET for {URI} failed: service "
     "error: ServiceUnavailable (m)", errors.ServerFailure, True),
    (f"s3 server failure: status 502: S3 GET for {URI} failed: service error: unknown (no message)"
     " — HTTP 502 Bad Gateway", errors.ServerFailure, True),
    (f"s3 error: status 400, code BadRequest: S3 GET for {URI} failed: service error: BadRequest "
     "(m)", errors.StorageError, False),
    (f"s3 error: status 301, code PermanentRedirect: S3 GET for {URI} failed: service error: "
     "PermanentRedirect (m)", errors.StorageError, False),
    (f"s3 version changed: status 412, code PreconditionFailed: S3 GET for {URI} failed",
     errors.Replaced, False),
    (f"GET range for {URI} failed: service error: InvalidRange (m)", errors.Truncated, False),
    (CONNECT % ("tcp connect error: Connection refused (os error 111)", "the server is not "
     "listening on that address/port"), errors.Unreachable, True),
    (CONNECT % ("dns error: error resolving DNS: failed to lookup address information: Name or "
     "service not known", "check the hostname"), errors.Unreachable, True),
    (CONNECT % ("operation timed out", TLS_ADVICE), errors.TimedOut, True),
    (CONNECT % ("invalid peer certificate: UnknownIssuer", TLS_ADVICE), errors.TlsFailure, False),
    (CONNECT % ("received corrupt message of type InvalidContentType", TLS_ADVICE),
     errors.TlsFailure, False),
    ("Failed to read CA bundle '/nowhere': No such file or directory (os error 2)",
     errors.TlsFailure, False),
    (SEND % "connection closed before message completed", errors.Unreachable, True),
    (SEND % "connection error: Connection reset by peer (os error 104)", errors.Unreachable, True),
    (f"s3 transport failure: no HTTP response: {BODY % CUT}", errors.Truncated, True),
    (f"collect range body: read response body chunk: streaming error: {CUT}", errors.Truncated,
     True),
    ("a partially received response with no usable ETag is not retried: s3 transport failure: no "
     f"HTTP response: {BODY % CUT}", errors.Truncated, True),
    (BODY % "minimum throughput was specified at 1 B/s, but throughput of 0 B/s was observed",
     errors.TimedOut, True),
    (f"s3 transport failure: no HTTP response: S3 GET for {URI} failed: request timed out after 3s"
     " — check network connectivity", errors.TimedOut, True),
    ("something that nobody has seen before", errors.StorageError, False),
]  # fmt: skip


@pytest.mark.parametrize(("words", "kind", "passes"), SAID)
def test_words_of_s3dlio_become_one_class(words, kind, passes):
    error, may_pass = of_s3dlio("k", URI, RuntimeError(words), ACCESS)
    assert (type(error), may_pass) == (kind, passes)
    assert error.key == "k"
    assert error.endpoint == "http://127.0.0.1:9000"
    assert str(error).startswith("k: ")
    assert str(error).endswith("(http://127.0.0.1:9000)")
    assert "\n" not in str(error)
    assert "AWS_CA_BUNDLE" not in str(error), "advice is rayloader's own"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.endpoint) == (kind, str(error), error.endpoint)


def shown(inner, name="k"):
    """How obstore shows what a request met."""
    return (
        f"Generic S3 error: Error performing GET http://127.0.0.1:9000/b/{name} in 1.1ms - words"
        "\n\n"
        'Debug source:\nGeneric {\n    store: "S3",\n    source: RetryError(\n'
        "        RetryErrorImpl {\n            method: GET,\n            uri: Some(\n"
        f"                http://127.0.0.1:9000/b/{name},\n            ),\n"
        "            retries: 0,\n            max_retries: 0,\n            elapsed: 1.1ms,\n"
        f"            retry_timeout: 86400s,\n            inner: {inner},\n        }},\n    ),\n}}"
    )


def status(number, code=""):
    body = f"<Error><Code>{code}</Code><Key>k</Key></Error>" if code else ""
    return (
        f"Status {{\n                status: {number},\n                body: Some(\n"
        f'                    "<?xml version=\\"1.0\\"?>\\n{body}",\n'
        "                ),\n            }"
    )


def connect(*words):
    return (
        "Http(\n                HttpError {\n                    kind: Connect,\n"
        "                    source: reqwest::Error {\n                        kind: Request,\n"
        "                        source: hyper_util::client::legacy::Error(\n"
        + "".join(f"                            {word}\n" for word in words)
        + "                        ),\n                    },\n                },\n            )"
    )


def broken_body(*words):
    return (
        "Generic S3 error: HTTP error: request or response body error\n\nDebug source:\n"
        'Generic {\n    store: "S3",\n    source: HttpError {\n        kind: Interrupted,\n'
        "        source: reqwest::Error {\n            kind: Body,\n"
        "            source: hyper::Error(\n                Body,\n"
        + "".join(f"                {word}\n" for word in words)
        + "            ),\n        },\n    },\n}"
    )


SAID_BY_OBSTORE = [
    (shown(status(404, "NoSuchKey")), errors.ObjectNotFound, False),
    (shown(status(404, "NoSuchBucket")), errors.BucketNotFound, False),
    (shown(status(404)), errors.ObjectNotFound, False),
    (shown(status(403, "AccessDenied")), errors.AccessDenied, False),
    (shown(status(403, "SignatureDoesNotMatch")), errors.CredentialsRejected, False),
    (shown(status(400, "ExpiredToken")), errors.CredentialsExpired, False),
    (shown(status(416, "InvalidRange")), errors.Truncated, False),
    (shown(status(503, "SlowDown")), errors.Throttled, True),
    (shown(status(503)), errors.Throttled, True),
    (shown(status(500, "InternalError")), errors.ServerFailure, True),
    (shown(status(502)), errors.ServerFailure, True),
    (shown(status(400, "SomethingNew")), errors.StorageError, False),
    (shown("BareRedirect"), errors.StorageError, False),
    (shown(connect("Connect,", '"tcp connect error",', "kind: ConnectionRefused,",
                   'message: "Connection refused",')), errors.Unreachable, True),
    (shown(connect("Connect,", '"dns error",', 'error: "failed to lookup address information"')),
     errors.Unreachable, True),
    (shown(connect("SendRequest,", "Io,", 'message: "Connection reset by peer",')),
     errors.Unreachable, True),
    (shown(connect("Connect,", "error: InvalidCertificate(", "    UnknownIssuer,", "),")),
     errors.TlsFailure, False),
    (shown("Http(\n HttpError {\n kind: Timeout,\n source: TimedOut,\n },\n)"), errors.TimedOut,
     True),
    (broken_body("kind: UnexpectedEof,", "error: IncompleteBody,"), errors.Truncated, True),
    (broken_body("kind: ConnectionReset,"), errors.Truncated, True),
    ('Generic S3 error: Received non-partial response when range requested\n\nDebug source:\n'
     'Generic {\n    store: "S3",\n    source: NotPartial,\n}', errors.RangeIgnored, False),
    ("something that nobody has seen before", errors.StorageError, False),
]  # fmt: skip


@pytest.mark.parametrize(("words", "kind", "passes"), SAID_BY_OBSTORE)
def test_words_of_obstore_become_one_class(words, kind, passes):
    error, may_pass = of_obstore("k", RuntimeError(words), ACCESS)
    assert type(error) is kind
    assert may_pass == passes
    assert error.endpoint == "http://127.0.0.1:9000"
    assert str(error).startswith("k: ")
    assert str(error).endswith("(http://127.0.0.1:9000)")
    assert "\n" not in str(error)


@pytest.mark.parametrize("key", ["SlowDown", "certificate.pem", "status: 503", "<Code>SlowDown"])
def test_what_an_object_is_called_decides_nothing_of_obstores_words(key):
    for inner, kind in ((status(500), errors.ServerFailure), ("BareRedirect", errors.StorageError)):
        assert type(of_obstore(key, RuntimeError(shown(inner, key)), ACCESS).error) is kind


def test_what_obstore_was_told_is_shown_with_its_status_and_code():
    error, _ = of_obstore("k", RuntimeError(shown(status(503, "SlowDown"))), ACCESS)
    assert str(error) == "k: throttled: 503 SlowDown (http://127.0.0.1:9000)"
    words = shown(connect("Connect,", "error: InvalidCertificate(", "    UnknownIssuer,", "),"))
    error, _ = of_obstore("k", RuntimeError(words), ACCESS)
    assert "InvalidCertificate UnknownIssuer" in str(error)


@pytest.mark.parametrize(
    "key",
    ["SlowDown", "certificate.pem", "status 503", "a — b", "service error: NoSuchKey (m)",
     "Connection refused", "code AccessDenied"],
)  # fmt: skip
def test_what_an_object_is_called_decides_nothing(key):
    uri = f"s3://b/{key}"
    said = f"s3 server failure: status 500, code InternalError: S3 GET for {uri} failed: service "
    error, _ = of_s3dlio(key, uri, RuntimeError(f"{said}error: InternalError (m)"), ACCESS)
    assert type(error) is errors.ServerFailure
    refused = (CONNECT % ("tcp connect error: Connection refused (os error 111)", "x")).replace(
        URI, uri
    )
    assert type(of_s3dlio(key, uri, RuntimeError(refused), ACCESS).error) is errors.Unreachable


def test_what_was_said_is_shown_with_its_status_and_code():
    said = SAID[10][0]
    error, _ = of_s3dlio("k", URI, RuntimeError(said), ACCESS)
    assert str(error) == "k: throttled: 503 SlowDown (http://127.0.0.1:9000)"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchBucket", 404, errors.BucketNotFound),
        ("NoSuchKey", 404, errors.ObjectNotFound),
        ("AccessDenied", 403, errors.AccessDenied),
        ("InvalidAccessKeyId", 403, errors.CredentialsRejected),
        ("ExpiredToken", 400, errors.CredentialsExpired),
        ("SlowDown", 503, errors.Throttled),
        ("InternalError", 500, errors.ServerFailure),
        ("404", 404, errors.ObjectNotFound),
        ("403", 403, errors.AccessDenied),
        ("Odd", 400, errors.StorageError),
    ],
)
def test_codes_of_botocore_become_the_same_classes(code, status, kind):
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = of_botocore(
        "s3://b", botocore.exceptions.ClientError(response, "ListObjectsV2"), ACCESS
    )
    assert type(error) is kind
    assert error.endpoint == ACCESS.destination


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="u"), errors.Unreachable),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="u"), errors.Unreachable),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="u"), errors.TimedOut),
        (botocore.exceptions.SSLError(endpoint_url="u", error="e"), errors.TlsFailure),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="u"), errors.Unreachable),
        (botocore.exceptions.ParamValidationError(report="r"), errors.StorageError),
    ],
)
def test_what_happens_to_botocore_on_the_way_has_its_class(raised, kind):
    assert type(of_botocore("s3://b", raised, ACCESS)) is kind
