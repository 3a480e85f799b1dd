"""Pre-trains a network on public data with ordinary SGD.

    python -m benchmarks.papers.luo2021.pretrain mnist --epochs 4 --out runs/luo2021

Settings are the paper's (section 5.8: batches of 128, momentum 0.9, weight decay 1e-4, learning rate 0.1 that falls
along a cosine), but for the epochs: the paper has 200. No augmentation. Leaves PAIR.safetensors in --out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional as F

from benchmarks.papers.luo2021.data import PAIRS
from dpkernels import models
from dpkernels.data import ImageDataset
from dpkernels.training import accuracy
from dpkernels.training.schedules import scheduler

BATCH = 128


def pretrain(model: nn.Module, dataset: ImageDataset, epochs: int, seed: int) -> None:
    """Ordinary training of `model` on `dataset`, in place."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    per_epoch = -(-len(dataset.train) // BATCH)
    schedule = scheduler(optimizer, "cosine", steps=epochs * per_epoch)
    model.train()
    for epoch in range(epochs):
        for indices in torch.randperm(len(dataset.train), generator=order).split(BATCH):
            images, labels = dataset.train.batch(indices)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: test accuracy {accuracy(model, dataset.test):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=PAIRS, help="named after its private data set")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/luo2021"))
    options = parser.parse_args()
    pair = PAIRS[options.pair]
    dataset = pair.public()
    torch.manual_seed(options.seed)
    model = models.create(pair.model, dataset.input_shape, dataset.num_classes)
    began = time.monotonic()
    pretrain(model, dataset, options.epochs, options.seed)
    metadata = {
        "dataset": dataset.name,
        "classes": ", ".join(dataset.classes),
        "model": pair.model,
        "epochs": str(options.epochs),
        "seed": str(options.seed),
        "test_accuracy": f"{accuracy(model, dataset.test):.4f}",
        "seconds": f"{time.monotonic() - began:.0f}",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.pair}.safetensors"
    save_model(model, str(path), metadata=metadata)
    print(f"{path}: {metadata}")


if __name__ == "__main__":
    main()
