"""What a Fleet's driver and its consumers say to each other: plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from rayloader.config import Options
from rayloader.experiment.ranks import Moved
from rayloader.plan import EpochPlan, Shard


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank reads of an epoch, until it is told to stop sooner.

    Attributes:
        epoch: which.
        shard: the rank, and of how many.
        start: global position where this cut of the epoch begins [samples].
        step: first step of the cut that is not yet delivered.
        delivered: steps after it that are (``ordered=False``).
        stop: the step to end before; ``None``: read to the end.
        compute_seconds: the training step that is imitated, per batch [s].
        touch: look at every byte that is delivered.
        serial: of the pieces that this consumer gets, larger for later ones.
    """

    epoch: int
    shard: Shard
    start: int = 0
    step: int = 0
    delivered: tuple[int, ...] = ()
    stop: int | None = None
    compute_seconds: float = 0.0
    touch: bool = False
    serial: int = 0

    def plan(self, entries: int, options: Options) -> EpochPlan:
        """The cut's plan over so many entries."""
        return EpochPlan(
            entries,
            self.shard,
            options.batch_size,
            self.epoch,
            options.seed,
            options.shuffle,
            options.uneven,
            options.drop_last,
            self.start,
        )


def left_over(plan: EpochPlan) -> int:
    """Samples at the end of an epoch that divide by no number of steps [samples].

    Ranks of a training leave them out, because all must take as many steps. Those of a Fleet wait
    for nobody, so one of them reads the rest too.
    """
    if plan.uneven == "pad" or plan.drop_last:
        return 0
    return plan.entries - plan.start - plan.samples * plan.shard.world_size


@dataclasses.dataclass(frozen=True)
class Hello:
    """Who a consumer is.

    Attributes:
        pid: its process.
        node_id: the Ray node it is on, hex.
        host: that node's name.
        cpus: CPUs that it may use.
    """

    pid: int
    node_id: str
    host: str
    cpus: int


@dataclasses.dataclass(frozen=True)
class Part:
    """What a rank has read of a piece: all that it was to read, or as far as it is known.

    Times are on the monotonic clock of its node.

    Attributes:
        rank: of the piece.
        world_size: of the piece.
        hello: who read it.
        began_at: when it was told to [s].
        first_at: when it had its first batch; ``ended_at`` where there was none [s].
        ended_at: when the last batch was done [s].
        cpu_seconds: CPU time of the consumer's process meanwhile [s].
        node_busy: of its node's CPUs, what anybody used meanwhile [0..1].
        receipts: of its iterations, as dicts.
    """

    rank: int
    world_size: int
    hello: Hello
    began_at: float
    first_at: float
    ended_at: float
    cpu_seconds: float
    node_busy: float
    receipts: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a rank is: from here its piece can be gone on with, by whomever.

    Attributes:
        moved: for display.
        step: first step that is not delivered.
        delivered: steps after it that are.
        part: what it has read so far; ``None``: nothing.
    """

    moved: Moved
    step: int
    delivered: tuple[int, ...]
    part: Part | None
