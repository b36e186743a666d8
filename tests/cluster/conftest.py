"""Two hosts, a desk, and the Ray that ``ray up cluster.yaml`` makes of them."""

import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from rayloader.experiment.generate import generate
from tests.hosts import ADDRESSES, HOME, HOSTS, KEY, ROOT, Site

FILES = 203
ENVIRONMENT = f"{HOME}/rayloader-env"
PYTHON = f"{ENVIRONMENT}/bin/python"
RAY = str(Path(sys.executable).parent / "ray")
CONFIG = f"{HOME}/cluster.yaml"
"""The file of the repository with these hosts, this user and this key filled in."""
GONE_SECONDS = 150.0
"""After ``ray down``, all of Ray is gone from every host within this [s]."""
SSH_CONFIG = """\
Host *
  IdentityFile ~/ray_bootstrap_key.pem
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@pytest.fixture(scope="package")
def shared(tmp_path_factory):
    """A folder that all hosts see, with a data set in it."""
    folder = tmp_path_factory.mktemp("shared")
    generate(folder / "train", FILES, 5000)
    return folder


@pytest.fixture(scope="package")
def site(tmp_path_factory, shared):
    """Hosts before ``ray up``."""
    one = Site(tmp_path_factory.mktemp("site"), [shared])
    yield one
    one.close()


@pytest.fixture(scope="package")
def cluster(site):
    """The site after ``ray up``; it is taken down again, by the last test or at the end."""
    for host in site.hosts:
        have_packages_at_hand(host)
        (host.home / ".ssh" / "config").write_text(SSH_CONFIG)
    config = filled_in((ROOT / "cluster.yaml").read_text())
    (site.desk.home / "cluster.yaml").write_text(config)
    site.desk.run(RAY, "get-auth-token", "--generate")
    ray(site, "up", "--yes")
    until_both_are_in(site)
    return site


def filled_in(text):
    """The file with the places of users changed, and nothing else."""
    places = {
        "head_ip: 192.168.1.10 ": f"head_ip: {ADDRESSES[HOSTS[0]]} ",
        "worker_ips: [192.168.1.11] ": f"worker_ips: [{ADDRESSES[HOSTS[1]]}] ",
        "ssh_user: me ": "ssh_user: root ",
        "ssh_private_key: ~/.ssh/id_ed25519\n": f"ssh_private_key: {KEY}\n",
    }
    for theirs, ours in places.items():
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    return text


def have_packages_at_hand(host):
    """Have pip find what it would download, for which there is neither network nor time.

    The virtual environment is made by the file's own command, beforehand, without a pip. That, Ray,
    torch and the others are those of the environment that runs the tests; rayloader itself is built
    and installed.
    """
    commands = yaml.safe_load((ROOT / "cluster.yaml").read_text())["setup_commands"]
    (make,) = [command for command in commands if "venv" in command and "test -x" in command]
    host.run("bash", "-c", f"{make} --without-pip")
    environment = host.home / "rayloader-env"
    (packages,) = environment.glob("lib/python3*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    command = environment / "bin" / "ray"
    command.write_text(f"#!{PYTHON}\nfrom ray.scripts.scripts import main\nmain()\n")
    command.chmod(0o755)
    pip = host.home / ".config" / "pip" / "pip.conf"
    pip.parent.mkdir(parents=True)
    # "no" here is how a file of pip says --no-build-isolation.
    pip.write_text("[global]\nno-index = true\n[install]\nno-build-isolation = no\n")


def ray(site, command, *words, timeout=280):
    """A command of Ray's on the file, as its users type it, from a clone on their desk."""
    return site.desk.run("env", "-C", str(ROOT), RAY, command, CONFIG, *words, timeout=timeout)


def until_both_are_in(site, seconds=120):
    """Wait until Ray has both hosts."""
    deadline = time.monotonic() + seconds
    while len(alive := hosts_of_ray(site)) < len(site.hosts):
        told = site.one.run("sh", "-c", "tail -n 40 /tmp/ray/session_latest/logs/monitor.*")
        assert time.monotonic() < deadline, f"only {alive}: {told}"
        time.sleep(1)


def hosts_of_ray(site):
    """Address and size of the object store of every host that is in, as its head says."""
    return sorted(site.one.run(PYTHON, "-c", NODES).splitlines())


NODES = """
import os
os.environ["RAY_AUTH_MODE"] = "token"
import ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
for node in ray.nodes():
    if node["Alive"]:
        print(node["NodeManagerAddress"], int(node["Resources"]["object_store_memory"]))
"""
