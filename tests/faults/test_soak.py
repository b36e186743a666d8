"""A short soak; ``python -m tests.faults.soak --epochs 1000`` is the long one."""

from tests.faults import campaign, soak


def test_nothing_grows_over_some_epochs(tmp_path):
    campaign.make_files(tmp_path)
    looks = soak.soak(str(tmp_path), 30)
    assert {"trainer", "reader", "raylet"} <= {name.split()[0] for name, _ in looks[-1]}
    assert soak.grown(looks) == []


def test_growth_is_seen():
    looks = [{("trainer", "memory"): 100 << 20}] * 4 + [{("trainer", "memory"): 103 << 20}] * 6
    assert len(soak.grown(looks)) == 1
    assert soak.grown(looks[:4] * 2) == []
