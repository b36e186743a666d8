"""Stop in the middle of an epoch, save the position, and go on from it, later or elsewhere.

python examples/stateful_resume.py DIRECTORY
"""

import json
import sys

import rayloader


def opened() -> rayloader.RankDataset:
    """The same data set each time: same source, same seed."""
    return rayloader.RankDataset(sys.argv[1], batch_size=8, seed=7)


seen: list[str] = []
with opened() as dataset:
    for batch in dataset:
        seen += batch.keys
        if len(seen) >= 24:
            break  # the job is preempted
    # Plain values, a few hundred bytes: save them beside the model. The position counts the batches
    # that were handed out. A run with another number of ranks may go on from it, too.
    saved = json.dumps(dataset.state_dict())

with opened() as dataset:
    dataset.load_state_dict(json.loads(saved))
    for batch in dataset:
        seen += batch.keys
    # After an epoch's end the position is the next one's beginning.
    assert dataset.state_dict()["epoch"] == 1

assert len(seen) == len(set(seen))
print(f"{len(seen)} files, each exactly once, in two runs")
