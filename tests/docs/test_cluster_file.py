"""cluster.yaml and the section on clouds are what Ray's launcher takes."""

import re
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
CONFIG = yaml.safe_load((ROOT / "cluster.yaml").read_text())


def cloud():
    """The file, with the sections of the page in the place of its own."""
    (text,) = re.findall(r"<!-- cloud -->\n+```yaml\n(.*?)```", PAGE, re.S)
    sections = yaml.safe_load(text)
    assert {"provider", "auth"} <= sections.keys()
    return {**CONFIG, **sections}


@pytest.mark.parametrize("config", [CONFIG, cloud()], ids=["own machines", "cloud"])
def test_rays_launcher_takes_it(config):
    prepared = prepare_config(config)
    for kind in prepared["available_node_types"].values():
        kind.setdefault("resources", {})  # which the launcher asks of the cloud first
    validate_config(prepared)
    assert prepared["head_start_ray_commands"] == CONFIG["head_start_ray_commands"]


def test_what_it_sends_is_there_and_enough_to_install():
    mounts = {theirs: ours for theirs, ours in CONFIG["file_mounts"].items() if "token" not in ours}
    assert all(theirs == f"~/rayloader/{ours}" for theirs, ours in mounts.items())
    assert all((ROOT / ours).exists() for ours in mounts.values())
    needed = {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}
    assert needed | {"rayloader", "adapters"} == set(mounts.values())


def test_both_kinds_of_host_start_ray_with_the_same_object_store():
    sizes = [
        re.findall(r"--object-store-memory=(\d+)", " ".join(CONFIG[f"{kind}_start_ray_commands"]))
        for kind in ("head", "worker")
    ]
    assert sizes == [["1000000000"]] * 2


def test_the_page_is_linked():
    assert "(docs/cluster.md)" in (ROOT / "README.md").read_text()
