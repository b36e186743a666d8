"""What cannot be served is refused by its name, on every rank, before anybody waits or reads."""

import pytest

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def refused(dlio):
    dlio.files("train", 8, "npy")
    dlio.workload(
        dataset={"format": "npy", "num_files_train": 8},
        reader={"batch_size": 2, "read_threads": 1},
    )
    return dlio.run(2, RAYLOADER_CONCURENCY="32")


def test_an_unknown_option_ends_every_rank_with_its_name(refused):
    assert refused.status != 0
    assert refused.said.count("OptionError: ") >= 2
    assert "concurency" in refused.said
    assert "concurrency" in refused.said


def test_no_rank_waited_for_another_or_read_anything(refused):
    for rank in (0, 1):
        assert [note["event"] for note in refused.witness[rank]] == ["assigned"]
    assert refused.opened("train") == []


def test_no_ray_was_started(refused):
    assert [one for one in refused.made if "gcs_server" in one["what"]] == []
    assert refused.gone_after is not None, refused.left
