"""The manifests for KubeRay: what can be said of them without a Kubernetes.

``RAYLOADER_KUBERAY=DIR python -m pytest tests/docs/test_kuberay.py`` checks them, field by field,
against the schemas in a clone of KubeRay's repository.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from rayloader.cli import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "kuberay"
CLONE = os.environ.get("RAYLOADER_KUBERAY")
RAY = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]


def manifests(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def clusters():
    """(file, RayCluster's specification) of both."""
    (cluster, _), (job,) = manifests("raycluster.yaml"), manifests("rayjob.yaml")
    return [
        pytest.param(cluster["spec"], id="RayCluster"),
        pytest.param(job["spec"]["rayClusterSpec"], id="RayJob"),
    ]


def pods(spec):
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [(group["rayStartParams"], group["template"]["spec"]) for group in groups]


@pytest.mark.parametrize("spec", clusters())
def test_a_cluster_asks_for_a_token_and_runs_the_ray_that_is_tested_here(spec):
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == RAY
    for start, pod in pods(spec):
        (container,) = pod["containers"]
        assert container["image"].endswith(f":{RAY}")
        assert all(isinstance(value, str) for value in start.values()), "KubeRay takes strings only"


@pytest.mark.parametrize("spec", clusters())
def test_every_pod_has_the_data_and_room_for_rays_object_store(spec):
    """Each at the same path, because a reader opens what the driver has listed."""
    for start, pod in pods(spec):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts) == set(volumes)
        assert mounts["data"]["mountPath"] == "/data"
        assert mounts["data"]["readOnly"] is True
        assert mounts["shm"]["mountPath"] == "/dev/shm"
        room = volumes["shm"]["emptyDir"]
        assert room["medium"] == "Memory"
        assert int(start["object-store-memory"]) < int(room["sizeLimit"].removesuffix("Gi")) << 30
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_jobs_command_is_one_of_rayloaders(monkeypatch):
    """Its options are understood, and it goes to the Ray that it runs in."""
    (job,) = manifests("rayjob.yaml")
    name, *words = shlex.split(job["spec"]["entrypoint"])
    assert name == "rayloader"
    assert words[words.index("--ray") + 1] == "cluster"
    ran = CliRunner().invoke(cli, [*words, "--help"])
    assert ran.exit_code == 0, ran.output
    out = words[words.index("--out") + 1]
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert any(out.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


def test_only_the_clusters_own_pods_and_kuberay_get_in():
    cluster, policy = manifests("raycluster.yaml")
    name = cluster["metadata"]["name"]
    own = {"matchLabels": {"ray.io/cluster": name}}
    assert policy["spec"]["podSelector"] == own
    (rule,) = policy["spec"]["ingress"]
    assert {"podSelector": own} in rule["from"]
    assert len(rule["from"]) == 2


@pytest.mark.skipif(CLONE is None, reason="RAYLOADER_KUBERAY names no clone of KubeRay")
@pytest.mark.parametrize(
    ("name", "crd"), [("raycluster.yaml", "rayclusters"), ("rayjob.yaml", "rayjobs")]
)
def test_kuberays_own_schema_takes_it(name, crd):
    path = Path(CLONE) / "ray-operator" / "config" / "crd" / "bases" / f"ray.io_{crd}.yaml"
    versions = {
        it["name"]: it for it in yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    }
    schema = strict(versions["v1"]["schema"]["openAPIV3Schema"])
    found = [
        error.message for error in Draft202012Validator(schema).iter_errors(manifests(name)[0])
    ]
    assert found == []


def strict(schema):
    """The schema with unknown fields as errors, which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made
