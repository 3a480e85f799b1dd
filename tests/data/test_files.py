"""Photographs that are cropped and decoded when they are fetched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpkernels.accounting import plan
from dpkernels.data import FileSplit, ImageDataset, PoissonLoader, load_dataset

SIZE = 8


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture: what is left of it at a smaller size does not depend on how it is shrunk."""
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    phase = 1 + seed % 3
    return Image.fromarray((255 * np.stack([across, down, (across + down) / 2], -1) / phase).astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = {
        "train/cat/b.JPEG": scene(300, 200),
        "train/cat/a.png": scene(100, 400, 1).convert("L"),
        "train/ant/z.jpg": scene(64, 64).convert("CMYK"),
        "val/cat/c.jpg": scene(90, 60, 2),
        "val/ant/d.png": scene(5, 7).convert("P"),
    }
    for name, image in images.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / name, **({} if name.endswith("png") else {"quality": 95}))
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    (tmp_path / "train/nothing").mkdir()
    return tmp_path


def photographs(folder: Path) -> ImageDataset:
    return load_dataset(folder, image_size=SIZE, value_range=(0.0, 1.0))


def test_order_labels_and_shape(folder: Path) -> None:
    data = photographs(folder)
    assert data.classes == ("ant", "cat")
    assert data.input_shape == (3, SIZE, SIZE)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 1], [0, 1])
    assert isinstance(data.train, FileSplit)
    assert data.train.names.tolist() == [b"ant/z.jpg", b"cat/a.png", b"cat/b.JPEG"]
    images, labels = data.train.batch(torch.tensor([2, 0]))
    assert images.shape == (2, 3, SIZE, SIZE)
    assert images.dtype == torch.float32
    assert labels.tolist() == [1, 0]
    assert torch.equal(data.train[2][0], images[0])
    whole = list(data.test.batches(1))
    assert torch.equal(torch.cat([images for images, _ in whole]), data.test.batch(torch.tensor([0, 1]))[0])
    assert data.train.batch(torch.tensor([], dtype=torch.int64))[0].shape == (0, 3, SIZE, SIZE)


def test_the_middle_of_the_picture_is_taken(folder: Path) -> None:
    """Colours of a gradient tell which part it is: 7/8 of the shorter side, also where a JPEG was decoded smaller."""
    image = photographs(folder).train[2][0]  # 300x200: columns 62.5 to 237.5, rows 12.5 to 187.5
    inner = (torch.arange(SIZE) + 0.5) / SIZE
    torch.testing.assert_close(image[0].mean(0), (62.5 + 175 * inner) / 300, atol=0.02, rtol=0)
    torch.testing.assert_close(image[1].mean(1), (12.5 + 175 * inner) / 200, atol=0.02, rtol=0)
    gray = photographs(folder).train[1][0]
    assert torch.equal(gray[0], gray[2])


def test_drawn_batches_by_workers(folder: Path) -> None:
    planned = plan(dataset_size=3, batch_size=2, steps=3, delta=0.1, noise_multiplier=1.0)
    for images, labels in PoissonLoader(photographs(folder).train, planned, physical_batch_size=2, num_workers=1):
        assert images.shape == (len(labels), 3, SIZE, SIZE)


def test_bad_files_and_folders_are_named(folder: Path) -> None:
    (folder / "train/cat/a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"train/cat/a.png: expected an image .*, got a file of none of these"):
        photographs(folder).train[1]
    Image.new("I;16", (9, 9)).save(folder / "train/cat/a.png")
    with pytest.raises(ValueError, match=r"expected an image with 8 bits a channel, got Pillow mode I;16"):
        photographs(folder).train[1]
    (folder / "val/dog").mkdir()
    scene(9, 9).save(folder / "val/dog/e.png")
    with pytest.raises(ValueError, match=r"expected the classes of train in val, got \['dog'\]"):
        photographs(folder)
    (folder / "val").rename(folder / "validation")
    with pytest.raises(FileNotFoundError, match=r"expected train/<class>/<image> and test/.*got \['train', 'valid"):
        photographs(folder)
    (folder / "test").mkdir()
    with pytest.raises(ValueError, match=r"test: expected .*got no image"):
        photographs(folder)
    with pytest.raises(FileNotFoundError, match="must be a folder of images where image_size is given, got 'mnist'"):
        load_dataset("mnist", image_size=32)
    with pytest.raises(ValueError, match="image_size must be a positive number of pixels up to 8192, got 0"):
        load_dataset(folder, image_size=0)
