"""The page and the workload files of examples/dlio do what they say."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.dlio.harness import ROOT, WITNESS

PAGE = ROOT / "examples" / "dlio"
WORKLOADS = sorted((PAGE / "workload").glob("*.yaml"))
TEXT = (PAGE / "README.md").read_text()
FILES = 60
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READ = """
import json, sys
from hydra import compose, initialize_config_dir
from dlio_benchmark.utils.config import ConfigArguments, LoadConfig
from dlio_benchmark.utils.utility import DLIOMPI
from rayloader_dlio.settings import settings

DLIOMPI.get_instance().initialize()
for name in sys.argv[2:]:
    ConfigArguments.reset()
    args = ConfigArguments.get_instance()
    with initialize_config_dir(sys.argv[1], version_base=None):
        LoadConfig(args, compose("under", overrides=["+workload=" + name])["workload"])
    length = int(args.record_length)  # DLIO 3 overwrites it in what follows
    args.derive_configurations()
    options = settings(args, {}).options
    print(json.dumps([name, options.batch_size, options.deliver, args.data_loader_classname,
                      length, args.num_files_train]), flush=True)
"""


def commands():
    """Every ``mpirun`` of the page's section on one node, in one line each."""
    section = TEXT.split("## One node", 1)[1].split("\n## ", 1)[0]
    joined = section.replace("\\\n", " ")
    return re.findall(r"^\$ (mpirun .*)$", joined, re.M)


@pytest.fixture(scope="module")
def read(dlio, module_census, tmp_path_factory):
    """What DLIO and the adapter make of each workload file."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "under.yaml").write_text("{}\n")
    (folder / "workload").symlink_to(PAGE / "workload")
    names = [path.stem for path in WORKLOADS]
    path = [str(WITNESS), *dlio.dlio.path]
    environ = module_census.environ(PYTHONPATH=":".join(path), TF_CPP_MIN_LOG_LEVEL="3")
    ran = subprocess.run(
        [dlio.dlio.python, "-c", READ, folder, *names],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('["')]
    return {name: facts for name, *facts in lines}


@pytest.fixture(scope="module")
def page(dlio, module_census):
    """The page's commands, in their order, on one rank and fewer files; what each printed."""
    said = []
    for kind in ("train", "valid"):
        (dlio.place / "data" / "laptop" / kind).mkdir(parents=True)
    for command in commands():
        words = shlex.split(command.replace("$PWD", str(ROOT)))
        # As users have it for the run that counts; the others start quicker (see witness/).
        path = dlio.dlio.path if "results/ours" in command else [str(WITNESS), *dlio.dlio.path]
        environ = module_census.environ(PYTHONPATH=":".join(path), TF_CPP_MIN_LOG_LEVEL="3")
        ran = subprocess.run(
            [dlio.dlio.mpirun, "--allow-run-as-root", "-n", "1", dlio.dlio.python,
             *words[words.index("python") + 1:], f"++workload.dataset.num_files_train={FILES}"],
            env=environ, cwd=dlio.place, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said.append(ran.stdout + ran.stderr)
    return said


def test_the_page_names_every_workload():
    assert {path.stem for path in WORKLOADS} == {"laptop", "laptop_eval", "retinanet", "unet3d"}
    assert all(f"(workload/{path.name})" in TEXT for path in WORKLOADS)


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_a_workload_is_served(read, path):
    batch, deliver, classname, length, files = read[path.stem]
    content = yaml.safe_load(path.read_text())
    assert classname == "rayloader_dlio.RayDataLoader"
    assert batch == content["reader"]["batch_size"]
    assert length == content["dataset"]["record_length_bytes"]
    assert files == content["dataset"]["num_files_train"]
    assert deliver or path.stem == "unet3d"


def test_mlperfs_figures():
    retinanet, unet3d = (
        yaml.safe_load((PAGE / "workload" / f"{name}.yaml").read_text())
        for name in ("retinanet", "unet3d")
    )
    assert retinanet["reader"]["batch_size"] == 24
    assert retinanet["dataset"]["record_length_bytes"] == 322_957
    assert retinanet["train"]["computation_time"] == 0.04755
    assert unet3d["reader"]["batch_size"] == 7
    assert unet3d["dataset"]["record_length_bytes"] == 146_600_628
    assert unet3d["storage"]["storage_options"]["rayloader"] == {"deliver": False}


def test_the_pages_commands_run(page):
    generated, ours, own = page
    assert "Generation done" in generated
    assert "reads for DLIO" in ours
    assert "reads for DLIO" not in own


def test_the_records_that_the_page_leads_to_hold(dlio, page):
    place = dlio.place / "results" / "ours"
    code = "import sys; from rayloader.cli import main; sys.exit(main())"
    checked = subprocess.run(
        [sys.executable, "-c", code, "receipt", "check", place],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http|#)([^)#]+)", TEXT))
def test_the_pages_links_lead_somewhere(name):
    assert (PAGE / name).exists()
