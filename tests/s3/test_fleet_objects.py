"""A Fleet and the doctor on object storage."""

import rayloader
from rayloader import cluster
from rayloader.experiment import doctor
from rayloader.storage.access import Access
from tests.s3.servers import credentials

KNOWN = credentials("")


def test_a_fleet_reads_objects_and_changes_its_ranks(folder, proxy):
    cluster.shutdown()  # the environment of a private Ray is that of its first process
    for number in range(40):
        folder.put(f"{number:02}", b"%d" % number * 1000)
    source = f"s3://{folder}"
    try:
        with rayloader.Fleet(source, ranks=1, batch_size=4, progress=False) as fleet:
            one = fleet.run_epoch()
            fleet.scale(2)
            two = fleet.run_epoch()
        assert (one.files, two.files) == (40, 40)
        assert one.read_hash == two.read_hash
        assert two.ranks[1].receipts[0]["engine"] == "http"
    finally:
        cluster.shutdown()


def test_the_doctor_finds_the_endpoint_the_keys_and_the_objects(folder, proxy):
    folder.put("a", b"x")
    access = Access.found({**KNOWN, "AWS_ENDPOINT_URL": proxy.endpoint})
    states = {finding.check: finding.state for finding in doctor.endpoint(access)}
    assert states["endpoint"] == states["credentials"] == "ok"
    sample, finding = doctor.listed(f"s3://{folder}", access)
    assert (len(sample), finding.state) == (1, "ok")


def test_the_doctor_names_a_wrong_key_and_a_bucket_that_is_not_there(folder, proxy):
    known = {**KNOWN, "AWS_ENDPOINT_URL": proxy.endpoint}
    wrong = Access.found({**known, "AWS_SECRET_ACCESS_KEY": "wrong"})
    _, finding = doctor.listed(f"s3://{folder}", wrong)
    assert finding.says.startswith("CredentialsRejected: ")
    _, finding = doctor.listed("s3://not-there/x", Access.found(known))
    assert finding.says.startswith("BucketNotFound: ")


def test_the_doctor_looks_at_the_servers_certificate(rclone_tls):
    """Trusted by the bundle that is given, and by nobody else; this one is for a day only."""
    there = {**KNOWN, "AWS_ENDPOINT_URL": rclone_tls.endpoint}
    trusting = Access.found({**there, "AWS_CA_BUNDLE": str(rclone_tls.ca)})
    found = {finding.check: finding for finding in doctor.endpoint(trusting)}
    assert found["TLS"].says == "its certificate ends in 1.0 days"
    assert found["TLS"].state == "warning"
    assert found["clock"].state == "ok"
    found = {finding.check: finding for finding in doctor.endpoint(Access.found(there))}
    assert found["TLS"].state == "bad"
    assert found["TLS"].says.startswith("its certificate is refused: ")
    assert "ca_bundle" in found["TLS"].cure
