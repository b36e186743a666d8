"""One process reads a directory for three epochs.

python examples/single_process.py DIRECTORY
"""

import sys

import rayloader

with rayloader.RankDataset(sys.argv[1], batch_size=24, seed=7) as dataset:
    print(f"{len(dataset)} batches per epoch")
    for epoch in range(3):
        dataset.set_epoch(epoch)  # another order, the same reader
        brightest = 0
        for batch in dataset:
            # A batch is one piece of memory that is shared with the reader; batch[i] is a view of
            # it. Whoever wants to keep a sample for long keeps batch[i].clone().
            brightest = max(brightest, *(int(sample.max()) for sample in batch))
        receipt = dataset.receipt
        print(
            f"epoch {epoch}: {receipt.files} files, {receipt.bytes / receipt.seconds / 1e9:.2f} "
            f"GB/s, first batch after {receipt.first_batch_seconds * 1e3:.1f} ms, "
            f"largest byte {brightest}"
        )
