"""What a process may have, as control groups and its user's limits say it."""

import pytest

from rayloader import arena, limits
from rayloader.config import PAGE, READER_BYTES
from rayloader.errors import OptionError

MIB = 1 << 20


def tree(root, version, path, groups):
    """A cgroup mount and a membership file; ``groups``: (where, limit, used, cache)."""
    membership = root / "membership"
    lines = {1: f"9:pids:/\n4:cpu,memory:/{path}\n", 2: f"0::/{path}\n"}
    membership.write_text(lines[version])
    for below, limit, used, cache in groups:
        group = root / "memory" / below if version == 1 else root / below
        group.mkdir(parents=True, exist_ok=True)
        names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
                 2: ("memory.max", "memory.current", "")}[version]  # fmt: skip
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used}\n")
        stat = f"anon 1\n{names[2]}active_file {cache // 2}\n{names[2]}inactive_file {cache // 2}\n"
        (group / "memory.stat").write_text(stat)
    return str(root), str(membership)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_on_the_way_up_decides(tmp_path, version):
    groups = [
        ("", "max" if version == 2 else 1 << 63, 9, 0),
        ("a", 500, 100, 0),
        ("a/b", 300, 50, 0),
    ]
    assert limits.memory_free(*tree(tmp_path, version, "a/b", groups)) == 250


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_is_free_memory(tmp_path, version):
    groups = [("job", 1000, 990, 800)]
    assert limits.memory_free(*tree(tmp_path, version, "job", groups)) == 810


@pytest.mark.parametrize("version", [1, 2])
def test_a_full_group_has_nothing_free(tmp_path, version):
    assert limits.memory_free(*tree(tmp_path, version, "job", [("job", 1000, 1200, 0)])) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path, version):
    where = tree(tmp_path, version, "docker/0123", [("", 1000, 400, 0)])
    assert limits.memory_free(*where) == 600


@pytest.mark.parametrize(("version", "file"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_a_kill_for_want_of_memory_is_seen_in_the_processs_own_group(tmp_path, version, file):
    mount, membership = tree(tmp_path, version, "a/b", [("a", 9, 9, 0), ("a/b", 9, 9, 0)])
    for name, count in (("a", 7), ("a/b", 2)):
        place = tmp_path / ("memory" if version == 1 else "") / name / file
        place.write_text(f"under_oom 0\noom_kill {count}\n")
    kills = limits.OomKills(0, mount, membership)
    assert not kills.risen
    place.write_text("under_oom 0\noom_kill 3\n")
    assert kills.risen
    place.unlink()
    assert not kills.risen


def test_where_nobody_counts_no_kill_is_seen(tmp_path):
    assert not limits.OomKills(0, str(tmp_path), str(tmp_path / "none")).risen


def test_without_control_groups_nothing_limits(tmp_path):
    assert limits.memory_free(str(tmp_path), str(tmp_path / "none")) >= 1 << 60


def test_the_ranks_of_a_node_divide_what_is_free(monkeypatch):
    monkeypatch.setattr(limits, "memory_free", lambda: 1000 * MIB)
    assert arena.affordable(800 * MIB, 1) == 800 * MIB
    assert arena.affordable(800 * MIB, 4) == 250 * MIB - READER_BYTES
    monkeypatch.setattr(limits, "memory_free", lambda: 0)
    assert arena.affordable(80 * MIB, 4) == 2 * PAGE


def test_what_cannot_be_mapped_names_the_limit_and_the_option(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena.mmap, "mmap", refuse)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    fd = arena.create_memory(PAGE)
    with pytest.raises(OptionError, match=r"4,096 bytes .* 1,024 KiB \(ulimit -v\).*memory_b"):
        arena.map_memory(fd)
    arena.os.close(fd)


def test_few_processes_are_told_only_where_a_limit_is_known(monkeypatch):
    monkeypatch.setattr(limits, "groups", lambda *_: iter(()))
    monkeypatch.setattr(limits, "_above_limits", lambda: False)
    monkeypatch.setattr(limits, "_threads_of", lambda _: 30)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (100, 100))
    assert limits.too_few_processes(70) == ""
    told = limits.too_few_processes(80)
    assert told == (
        "this user may run 100 processes and threads (ulimit -u) and runs 30: allow at least 110"
    )
    monkeypatch.setattr(limits, "_above_limits", lambda: True)
    assert limits.too_few_processes(80) == ""


def test_a_groups_number_of_processes_is_known_too(monkeypatch, tmp_path):
    (tmp_path / "pids.max").write_text("50\n")
    (tmp_path / "pids.current").write_text("20\n")
    monkeypatch.setattr(limits, "groups", lambda *_: iter([(str(tmp_path), 2)]))
    assert "may run 50 processes and threads (pids.max)" in limits.too_few_processes(80)
    assert limits.too_few_processes(30) == ""
    (tmp_path / "pids.max").write_text("max\n")
    assert limits.too_few_processes(80) == ""
