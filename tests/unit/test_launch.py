"""The rank is what the innermost launcher says, or an error that names the variable."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader.errors import OptionError
from rayloader.launch import SCRUBBED_NAMES, SCRUBBED_PREFIXES, Launch, detect, scrubbed

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "GROUP_RANK": "1", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-17@1", "PMIX_RANK": "3",
}  # fmt: skip
# What mpiexec of MPICH 5 (hydra) sets; Intel's adds a UUID of the run.
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "vm",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NUM_TASKS": "7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 1, 0, 1, None, "single")),
        (TORCHRUN, Launch(5, 8, 1, 4, "torch:none:node0:29500", "torchrun")),
        (OPENMPI, Launch(3, 4, 1, 2, "ompi:prterun-host-17@1", "openmpi")),
        (MPICH, Launch(1, 2, 1, 2, None, "pmi")),
        ({**MPICH, "I_MPI_HYDRA_UUID": "a1"}, Launch(1, 2, 1, 2, "pmi:a1", "pmi")),
        (SLURM, Launch(5, 7, 1, 2, "slurm:77:0", "slurm")),
    ],
    ids=["single", "torchrun", "openmpi", "mpich", "intel", "slurm"],
)
def test_each_launcher_is_understood(environ, expected):
    assert detect(environ) == expected


def test_an_older_open_mpi_names_its_run_by_the_job_id():
    environ = {**OPENMPI, "OMPI_MCA_ess_base_jobid": "4242"}
    del environ["PMIX_NAMESPACE"]
    assert detect(environ).run_id == "ompi:4242"


def test_our_own_run_id_wins():
    assert detect({**OPENMPI, "RAYLOADER_RUN_ID": "mine"}).run_id == "mine"
    assert detect({"RAYLOADER_RUN_ID": "mine"}).run_id == "mine"


def test_two_torchruns_on_one_host_are_two_runs():
    other = {**TORCHRUN, "MASTER_PORT": "29501"}
    assert detect(TORCHRUN).run_id != detect(other).run_id


def test_torchrun_inside_mpi_is_the_inner_launcher():
    assert detect({**OPENMPI, **TORCHRUN}).launcher == "torchrun"


def test_mpi_inside_a_slurm_step_is_the_inner_launcher():
    assert detect({**SLURM, **OPENMPI}).launcher == "openmpi"
    assert detect({**SLURM, **MPICH}).launcher == "pmi"


def test_a_rank_set_by_hand_that_agrees_with_mpi_takes_its_local_rank():
    found = detect({**OPENMPI, "RANK": "3", "WORLD_SIZE": "4"})
    assert (found.local_rank, found.local_world_size) == (1, 2)


def test_pmi_under_srun_takes_the_local_rank_of_the_step():
    found = detect({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"})
    assert (found.launcher, found.local_rank, found.local_world_size) == ("pmi", 1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
    ],
    ids=["batch script", "batch step", "interactive step"],
)
def test_a_slurm_job_outside_srun_is_one_process(environ):
    assert detect(environ) == Launch(0, 1, 0, 1, None, "single")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK=''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many'"),
        ({**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=3"),
        ({**MPICH, "RANK": "1", "WORLD_SIZE": "3"}, "PMI_SIZE=2"),
        ({**MPICH, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
        ({**SLURM, "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_a_contradiction_names_its_variable(environ, named):
    with pytest.raises(OptionError) as raised:
        detect(environ)
    assert named in str(raised.value)


NAMES = st.sampled_from([*TORCHRUN, *OPENMPI, *MPICH, *SLURM])
VALUES = st.one_of(st.integers(-2, 9).map(str), st.text(max_size=5), st.just("2(x3),1"))


@given(st.dictionaries(NAMES, VALUES))
def test_any_environment_gives_a_valid_rank_or_an_option_error(environ):
    try:
        found = detect(environ)
    except OptionError:
        return
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size


def test_scrubbing_removes_the_rank_and_keeps_the_rest():
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "77", "AWS_REGION": "x", "MPLBACKEND": "Agg"}
    assert scrubbed({**TORCHRUN, **OPENMPI, **MPICH, **SLURM, **kept}) == kept


def test_what_is_scrubbed_leaves_no_launcher_to_find():
    environ = {**TORCHRUN, **OPENMPI, **MPICH, **SLURM}
    assert detect(scrubbed(environ)) == Launch(0, 1, 0, 1, None, "single")


def test_the_table_of_scrubbed_names_does_not_repeat_its_prefixes():
    assert not [name for name in SCRUBBED_NAMES if name.startswith(SCRUBBED_PREFIXES)]


def test_finding_the_rank_imports_nothing_heavy():
    code = "import sys, rayloader.launch; print(*{'ray', 'torch', 'numpy'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""
