"""What bounds a run is named from its figures alone."""

import dataclasses

import pytest

from rayloader.experiment.limit import Evidence, limit_of

IDLE = Evidence(
    wait_share=0.95,
    compute_share=0.0,
    cpu_share=0.1,
    node_busy=0.1,
    reader_cores=0.1,
    python_engine=False,
    occupancy=0.2,
    concurrency=64,
    latency=0.005,
    latency_alone=None,
    read_bytes=1e5,
    memory_bytes=512 << 20,
    in_flight=13.0,
    read_ahead=None,
    throttled_share=0.0,
    files_per_rank=10_000,
)


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({}, "unclear"),
        ({"wait_share": 0.1, "cpu_share": 0.9, "occupancy": 1.0}, "consumer"),
        ({"throttled_share": 0.1, "occupancy": 1.0}, "storage throttles"),
        ({"cpu_share": 0.8, "occupancy": 1.0}, "client CPU"),
        ({"cpu_share": 0.4, "node_busy": 0.95}, "client CPU"),
        ({"cpu_share": 0.1, "node_busy": 1.0}, "client CPU"),
        ({"cpu_share": 0.1, "node_busy": 1.0, "occupancy": 0.9, "in_flight": 58}, "storage"),
        ({"cpu_share": 0.5, "reader_cores": 0.95, "python_engine": True}, "GIL"),
        ({"cpu_share": 0.5, "reader_cores": 0.95}, "unclear"),
        ({"occupancy": 0.9, "in_flight": 58}, "storage"),
        ({"occupancy": 0.9, "in_flight": 58, "latency_alone": 0.004}, "storage latency"),
        ({"occupancy": 0.9, "in_flight": 58, "latency_alone": 0.0005}, "storage bandwidth"),
        ({"occupancy": 0.9, "in_flight": 58, "latency_alone": 0.19}, "unclear"),
        ({"in_flight": 13, "read_bytes": 8e6, "memory_bytes": 128 << 20}, "memory bound"),
        ({"in_flight": 6, "occupancy": 0.1, "read_ahead": 8}, "read-ahead bound"),
    ],
)
def test_the_limit_is_named(figures, name):
    limit = limit_of(dataclasses.replace(IDLE, **figures))
    assert limit.name == name
    assert str(limit).startswith(f"limit: {name}: ")
    assert limit.advice


def test_other_programs_that_have_the_cpus_are_told():
    crowded = limit_of(dataclasses.replace(IDLE, node_busy=0.97))
    assert "used 10% of the CPUs, which other programs kept 97% busy" in crowded.because
    assert crowded.advice.startswith("Stop the other programs")


def test_durations_that_are_compared_are_both_called_medians():
    waiting = dataclasses.replace(IDLE, occupancy=0.9, in_flight=58, latency_alone=0.004)
    because = limit_of(waiting).because
    assert "taking 5.00 ms (median); alone a read takes 4.00 ms (median)" in because


def test_only_where_the_storage_is_waited_for_a_read_alone_tells_more():
    assert not IDLE.waits_for_storage
    assert dataclasses.replace(IDLE, occupancy=0.9).waits_for_storage
    assert not dataclasses.replace(IDLE, occupancy=0.9, cpu_share=0.9).waits_for_storage
