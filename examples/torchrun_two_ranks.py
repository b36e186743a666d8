"""Two ranks train on one directory; each epoch every file goes to one of them.

torchrun --nproc-per-node 2 examples/torchrun_two_ranks.py DIRECTORY
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rayloader

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# Rank and world size come from torch.distributed; both ranks share one private Ray.
with rayloader.RankDataset(sys.argv[1], batch_size=8, seed=7) as dataset:
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for batch in dataset:
            # As many steps on every rank: no rank waits for another's gradients in vain.
            histograms = torch.stack([sample.bincount(minlength=256).float() for sample in batch])
            loss = model(histograms / histograms.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        files = torch.tensor(dataset.receipt.files)
        dist.all_reduce(files)
        if dataset.rank == 0:
            print(f"epoch {epoch}: {int(files)} files on {dataset.world_size} ranks")

dist.destroy_process_group()
