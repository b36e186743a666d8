"""Run a sweep's trials on a Fleet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from rayloader.experiment.sweep import Cache, Records, SweepPlan, Trial, was_as_asked

if TYPE_CHECKING:
    from rayloader.fleet.fleet import Fleet


class Watch(Protocol):
    """Who is told how a sweep goes on."""

    def trials(self, done: int, total: int) -> None:
        """So many trials are recorded."""

    def trial_done(self, trial: Trial, bytes_per_second: float, limit: str) -> None:
        """A trial has been measured, at the median of its epochs."""


def run_trials(fleet: Fleet, plan: SweepPlan, records: Records, watch: Watch) -> None:
    """Run what the records lack of a plan, and record it.

    Raises:
        RayloaderError: a rank has failed. What is recorded stays.
    """
    trials = plan.trials
    for order, trial in enumerate(trials):
        watch.trials(len(records.done), len(trials))
        if trial in records.done:
            continue
        epochs = _run(fleet, plan, trial)
        records.add(
            {
                "kind": "trial",
                "ranks": trial.ranks,
                "concurrency": trial.concurrency,
                "repeat": trial.repeat,
                "order": order,
                "ended": time.time(),
                "epochs": epochs,
            }
        )
        rates = sorted(epoch["bytes_per_second"] for epoch in epochs[1:])
        watch.trial_done(trial, rates[len(rates) // 2], epochs[-1]["limit"]["name"])
    watch.trials(len(records.done), len(trials))


def _run(fleet: Fleet, plan: SweepPlan, trial: Trial) -> list[dict[str, Any]]:
    """The epochs of a trial, the warm-up first."""
    fleet.scale(trial.ranks)
    fleet.concurrency = trial.concurrency
    return [
        _epoch(fleet, plan.cache if number else "any", number, trial.repeat)
        for number in range(plan.epochs + 1)
    ]


def _epoch(fleet: Fleet, cache: Cache, number: int, repeat: int) -> dict[str, Any]:
    # The same orders in every trial: points differ by nothing else.
    epoch = repeat * 1000 + number
    share = fleet.page_cache(drop=cache == "cold")
    report = fleet.run_epoch(epoch).asdict()
    return {
        **report,
        "cached_before": share,
        "cache_as_asked": was_as_asked(cache, share),
    }
