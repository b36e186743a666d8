"""Where a rank stands in its epochs: what its next iteration reads, and how that is saved.

A position is a value. What it means for a catalog, a shard and options is a plan; what of it
outlives the process is a state: a dict of plain values (StatefulDataLoader's convention).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rayloader.catalog import Catalog
from rayloader.config import Options
from rayloader.errors import OptionError, StateMismatch, UsageError
from rayloader.plan import EpochPlan, ListPlan, Shard

STATE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Position:
    """What the next iteration reads."""

    epoch: int = 0
    files: Catalog | None = None
    """The caller's own list, or ``None``: the catalog, sharded by the plan."""
    fixed_steps: int | None = None
    batch_size: int | None = None
    """Of the caller's own list, where it is not the option's [samples]."""
    start: int = 0
    """Global position where this cut of the epoch begins [samples]."""
    step: int = 0
    """First step of this cut that has not been delivered."""
    delivered: frozenset[int] = frozenset()
    """Steps after it that have (``ordered=False``)."""
    list_digest: str | None = None
    """Of the list that a loaded state was saved with, and that it waits for."""

    @property
    def inside(self) -> bool:
        """True when a part of the epoch has been delivered."""
        return bool(self.step or self.start or self.delivered)

    @property
    def awaits_list(self) -> bool:
        """True when the epoch's list has yet to be given."""
        return self.list_digest is not None and self.files is None

    def anew(self) -> Position:
        """The same epoch from its start."""
        return Position(self.epoch, self.files, self.fixed_steps, self.batch_size)


@dataclasses.dataclass(frozen=True)
class Share:
    """What turns a position into a plan: the catalog, this rank's shard of it, the options."""

    catalog: Catalog | None
    shard: Shard
    options: Options

    def plan(self, at: Position) -> EpochPlan | ListPlan:
        """The plan of the cut that ``at`` lies in.

        Raises:
            UsageError: there is neither a catalog nor a list.
        """
        options = self.options
        if at.files is not None:
            return ListPlan(
                len(at.files),
                self._batch_size(at),
                at.fixed_steps,
                options.uneven,
                options.drop_last,
            )
        if self.catalog is None:
            raise UsageError("no source and no list: call set_epoch(epoch, files=[...]) first")
        return EpochPlan(
            len(self.catalog),
            self.shard,
            options.batch_size,
            at.epoch,
            options.seed,
            options.shuffle,
            options.uneven,
            options.drop_last,
            at.start,
        )

    def moved(
        self,
        loaded: Position,
        epoch: int,
        files: Catalog | None,
        steps: int | None,
        batch_size: int | None = None,
    ) -> Position:
        """The position after ``set_epoch``: the loaded one's epoch keeps its place.

        Raises:
            StateMismatch: another list than the loaded state was saved with, a list where it had
                none, or none where it had one.
        """
        if epoch != loaded.epoch or not loaded.inside:
            at = Position(epoch, files, steps, batch_size)
        else:
            _require_same_list(loaded, files)
            at = dataclasses.replace(loaded, files=files, fixed_steps=steps, batch_size=batch_size)
        self.require_inside(at)
        return at

    def state(self, at: Position) -> dict[str, Any]:
        """``at`` as plain values."""
        if at.awaits_list:
            digest, position = str(at.list_digest), at.step * self._batch_size(at)
        elif at.files is None and self.catalog is None:
            digest, position = "", 0  # between two epochs that bring their own lists
        else:
            listed = at.files if at.files is not None else self.catalog
            digest = listed.digest if listed is not None else ""
            position = self.plan(at).position(at.step)
        return {
            "version": STATE_VERSION,
            "epoch": at.epoch,
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "catalog": digest,
            "explicit": at.files is not None or at.list_digest is not None,
            "step": at.step,
            "start": at.start,
            "position": position,
            "delivered": sorted(at.delivered),
            **self._cut(),
            "batch_size": self._batch_size(at),
        }

    def position(self, state: dict[str, Any]) -> Position:
        """The position that a state says, in this share's own cut.

        Raises:
            StateMismatch: it belongs to another catalog, seed, order or version, and says which;
                or it is no state at all.
        """
        _require_known(state)
        self._require_same("shuffle", state, self.options.shuffle)
        if state["shuffle"]:
            self._require_same("seed", state, self.options.seed)
        delivered = frozenset(state["delivered"])
        same_cut = all(state[name] == value for name, value in self._cut().items())
        if state["explicit"]:
            for name in (
                "world_size",
                "batch_size",
                *(("uneven", "drop_last") if delivered else ()),
            ):
                self._require_same(name, state, self._cut()[name])
            return Position(
                state["epoch"],
                step=state["step"],
                delivered=delivered,
                list_digest=state["catalog"],
            )
        self._require_same(
            "catalog", state, self.catalog.digest if self.catalog is not None else ""
        )
        if same_cut or delivered:
            for name, mine in self._cut().items():
                self._require_same(name, state, mine)
            at = Position(
                state["epoch"], start=state["start"], step=state["step"], delivered=delivered
            )
        else:
            at = Position(state["epoch"], start=state["position"])
        if self.catalog is not None or at.inside:
            self.require_inside(at)
        return at

    def require_inside(self, at: Position) -> None:
        """A position must lie in its epoch.

        Raises:
            StateMismatch: it does not.
            OptionError: there is no such plan.
        """
        try:
            steps = self.plan(at).steps
        except OptionError as outside:
            if at.start:
                raise StateMismatch(f"the state does not fit this data set: {outside}") from outside
            raise
        last = max({at.step, *(step + 1 for step in at.delivered)})
        if last > steps:
            raise StateMismatch(
                f"the state is at step {last}, and epoch {at.epoch} has only {steps} here"
            )

    def _batch_size(self, at: Position) -> int:
        return self.options.batch_size if at.batch_size is None else at.batch_size

    def _cut(self) -> dict[str, Any]:
        """What decides which step holds which samples."""
        return {
            "world_size": self.shard.world_size,
            "batch_size": self.options.batch_size,
            "uneven": self.options.uneven,
            "drop_last": self.options.drop_last,
        }

    def _require_same(self, name: str, state: dict[str, Any], mine: Any) -> None:
        if state[name] != mine:
            raise StateMismatch(
                f"the state was saved with {name}={state[name]!r} and this data set has {mine!r}"
            )


def _require_same_list(loaded: Position, files: Catalog | None) -> None:
    """The loaded position must find the order it was counted in."""
    expected = loaded.list_digest or (loaded.files.digest if loaded.files is not None else None)
    found = files.digest if files is not None else None
    if expected != found:
        raise StateMismatch(
            f"the state of epoch {loaded.epoch} was saved with {_list_of(expected)}, and this is "
            f"{_list_of(found)}"
        )


def _list_of(digest: str | None) -> str:
    return "no list of its own" if digest is None else f"the list of digest {digest}"


def _require_known(state: dict[str, Any]) -> None:
    """A state must be one of ours, whole and of this version."""
    if not isinstance(state, dict) or set(state) != set(_STATE):
        odd = set(state) ^ set(_STATE) if isinstance(state, dict) else {type(state).__name__}
        raise StateMismatch(f"not a state of rayloader: {', '.join(sorted(map(str, odd)))}")
    if state["version"] != STATE_VERSION:
        raise StateMismatch(
            f"state version {state['version']!r}: this rayloader knows {STATE_VERSION}"
        )
    wrong = [name for name, fits in _STATE.items() if not fits(state[name])]
    if wrong:
        found = ", ".join(f"{name}={state[name]!r:.40}" for name in wrong)
        raise StateMismatch(f"not a state of rayloader: {found}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


_STATE: dict[str, Callable[[Any], bool]] = {
    "version": _is_whole,
    "epoch": _is_count,
    "seed": _is_whole,
    "shuffle": _is_bool,
    "catalog": _is_text,
    "explicit": _is_bool,
    "step": _is_count,
    "start": _is_count,
    "position": _is_count,
    "delivered": _are_counts,
    "world_size": _is_count,
    "batch_size": _is_count,
    "uneven": _is_text,
    "drop_last": _is_bool,
}
"""What a state consists of, and what each part must be."""
