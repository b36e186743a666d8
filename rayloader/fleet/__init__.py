"""The driver's hand on all ranks: one consumer per rank, scaled while they read.

::

    Fleet (driver)         crew.py     starts, replaces and ends the consumers
      │  Piece, cut, until             epoch.py leads them through an epoch
      ▼
    Consumer (an actor per rank, consumer.py) ── RankDataset ──► its reader (another actor)

A Fleet adds no way to read: each rank is a ``RankDataset``, as in training.
"""
