"""Which rank this process is, as its launcher says it in the environment.

A pure function of a mapping: nothing here reads ``os.environ`` or imports anything heavy. The
innermost launcher wins: torchrun, then Open MPI, then MPICH and Intel MPI (PMI), then a Slurm step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rayloader.errors import OptionError

RUN_ID = "RAYLOADER_RUN_ID"
"""This variable, when set, is the run's name whatever the launcher says."""

SCRUBBED_PREFIXES = (
    "OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "PMIXP_",  # Open MPI and its daemons
    "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "I_MPI_HYDRA_",  # MPICH and Intel MPI
    "TORCHELASTIC_", "GROUP_", "ROLE_",  # torchrun
    "SLURM_STEP", "SLURM_SRUN_", "SLURM_CPU_BIND", "SLURM_PMI",  # the Slurm step, not the job
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_",  # threads
)  # fmt: skip
"""Variables with these prefixes belong to one rank and must not reach Ray or a reader."""

SCRUBBED_NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID",
    "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_LAUNCH_NODE_IPADDR", "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE",
})  # fmt: skip
"""… and so must these."""

_SLURM_RESERVED_STEPS = 0xFFFFFFF0
"""Step ids from here on are Slurm's own (batch script, interactive shell, extern), not srun's."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One rank's place in its run.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: ranks in the run, > 0.
        local_rank: 0 <= local_rank < local_world_size, on this node.
        local_world_size: ranks of the run on this node, > 0.
        run_id: the same for this run's ranks on a node and no others; ``None`` if nobody says.
        launcher: ``torchrun``, ``openmpi``, ``pmi``, ``slurm``, ``single``, or the name that a
            caller gives who knows better.
        node_cpus: all CPUs that this node's ranks may use together; empty: nobody has asked.
        run_name: the run's name in metrics, where not everybody may know ``run_id``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_id: str | None
    launcher: str
    node_cpus: tuple[int, ...] = ()
    run_name: str | None = None

    def __post_init__(self) -> None:
        _within("rank", self.rank, self.world_size)
        _within("local_rank", self.local_rank, self.local_world_size)


def detect(environ: Mapping[str, str]) -> Launch:
    """This process's rank as its launcher states it; 0 of 1 where there is no launcher.

    Raises:
        OptionError: for a value that is no whole number, out of range, missing its partner, or at
            odds with another launcher's; the message names the variable.
    """
    launch = (
        _torchrun(environ)
        or _openmpi(environ)
        or _pmi(environ)
        or _slurm(environ)
        or Launch(0, 1, 0, 1, None, "single")
    )
    named = environ.get(RUN_ID)
    return dataclasses.replace(launch, run_id=named) if named else launch


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to one rank: for Ray and readers to inherit.

    Removed are the variables of :data:`SCRUBBED_PREFIXES` and :data:`SCRUBBED_NAMES`: rank, MPI,
    PMI, Slurm step and thread counts. The Slurm *job* stays (``SLURM_JOB_ID``).
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in SCRUBBED_NAMES and not name.startswith(SCRUBBED_PREFIXES)
    }


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, size = _pair(environ, "RANK", "WORLD_SIZE")
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    if elastic is None:
        _same_as(environ, "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        _same_as(environ, "RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE")
    local = _local(environ, size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if local is None:
        local = _foreign_local(environ, rank, size) or (0, 1)
    parts = [elastic, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")]
    return Launch(rank, size, *local, _run_id("torch", parts), "torchrun")


def _openmpi(environ: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, size = _pair(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = _local(environ, size, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return Launch(rank, size, *(local or (0, 1)), _run_id("ompi", [name]), "openmpi")


def _pmi(environ: Mapping[str, str]) -> Launch | None:
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    rank, size = _pair(environ, "PMI_RANK", "PMI_SIZE")
    local = _local(environ, size, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if local is None:
        step = _slurm(environ)
        same = step is not None and (step.rank, step.world_size) == (rank, size)
        local = (step.local_rank, step.local_world_size) if step and same else (0, 1)
    # Not PMI_ID: it is the rank. MPICH's hydra says none of these; the node's ranks then find each
    # other by their parent (rayloader.node.parent_run_id).
    names = ("PMI_JOBID", "I_MPI_HYDRA_UUID", "PMI_PORT")
    parts = [environ.get(name) for name in names]
    return Launch(rank, size, *local, _run_id("pmi", parts), "pmi")


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if not step or "SLURM_PROCID" not in environ:
        return None
    if _whole("SLURM_STEP_ID", step) >= _SLURM_RESERVED_STEPS:
        return None
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _pair(environ, "SLURM_PROCID", total)
    local_rank = _whole("SLURM_LOCALID", environ.get("SLURM_LOCALID", "0"))
    local_size = min(_slurm_tasks_here(environ) or local_rank + 1, size)
    _within("SLURM_LOCALID", local_rank, local_size)
    parts = [environ.get("SLURM_JOB_ID"), step]
    return Launch(rank, size, local_rank, local_size, _run_id("slurm", parts), "slurm")


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """The step's tasks on this node, from a list such as ``2(x3),1`` and the node's place in it."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not listed:
        return None
    counts: list[int] = []
    for item in listed.split(","):
        tasks, _, times = item.partition("(x")
        name = "SLURM_STEP_TASKS_PER_NODE"
        repeat = min(_whole(name, times.rstrip(")") or "1"), 1_000_000)
        counts += [_whole(name, tasks)] * repeat
    node = _whole("SLURM_NODEID", environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _foreign_local(environ: Mapping[str, str], rank: int, size: int) -> tuple[int, int] | None:
    """The local rank of another launcher that agrees on rank and size (RANK set by a script)."""
    for other in (_openmpi(environ), _pmi(environ), _slurm(environ)):
        if other is not None and (other.rank, other.world_size) == (rank, size):
            return other.local_rank, other.local_world_size
    return None


def _pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """A rank and its world size, which must both be there and fit."""
    for there, missing in ((rank_name, size_name), (size_name, rank_name)):
        if missing not in environ:
            raise OptionError(
                f"{there}={environ[there]!r} is in the environment but {missing} is not: "
                "set both, unset both, or pass rank= and world_size="
            )
    size = _whole(size_name, environ[size_name])
    if size < 1:
        raise OptionError(f"{size_name}={size}: must be at least 1")
    rank = _whole(rank_name, environ[rank_name])
    _within(rank_name, rank, size)
    return rank, size


def _local(
    environ: Mapping[str, str], world_size: int, rank_name: str, size_name: str
) -> tuple[int, int] | None:
    """The rank on this node and how many there are; ``None`` when the launcher is silent."""
    if rank_name not in environ:
        return None
    rank = _whole(rank_name, environ[rank_name])
    size = _whole(size_name, environ[size_name]) if size_name in environ else rank + 1
    _within(rank_name, rank, size)
    if size > world_size:
        raise OptionError(f"{size_name}={size}: more ranks on this node than in the run's world")
    return rank, size


def _same_as(
    environ: Mapping[str, str], rank_name: str, size_name: str, rank_other: str, size_other: str
) -> None:
    """Refuse two launchers that disagree when nothing says which of them is the inner one."""
    for mine, other in ((rank_name, rank_other), (size_name, size_other)):
        if other in environ and _whole(mine, environ[mine]) != _whole(other, environ[other]):
            raise OptionError(
                f"{mine}={environ[mine]} contradicts {other}={environ[other]}: "
                f"unset {mine}, or pass rank= and world_size="
            )


def _run_id(kind: str, parts: list[str | None]) -> str | None:
    said = [part for part in parts if part]
    return ":".join([kind, *said]) if said else None


def _within(name: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise OptionError(f"{name}={rank}: must be from 0 to {size - 1}")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name}={text!r}: must be a whole number") from None
