"""Folders and tars of images by class, and the cache of what was decoded."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from dpkernels.data import ImageDataset, load_dataset
from dpkernels.data import folders as folders_module

Files = dict[str, Image.Image]


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    """A random picture; size is (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def some_files(mode: str = "RGB") -> Files:
    return {
        f"{split}/{label}/{name}.png": picture(seed, mode)
        for seed, (split, label, name) in enumerate(
            [("train", "cat", "b"), ("train", "cat", "a"), ("train", "ant", "z"), ("test", "cat", "c")]
        )
    }


def write(folder: Path, files: Files) -> Path:
    for name, image in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
    return folder


def write_tar(path: Path, files: Files, prefix: str = "") -> Path:
    with tarfile.open(path, "w") as archive:
        for name, image in files.items():
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            member = tarfile.TarInfo(prefix + name)
            member.size = buffer.tell()
            archive.addfile(member, io.BytesIO(buffer.getvalue()))
    return path


def check(data: ImageDataset, files: Files) -> None:
    assert data.classes == ("ant", "cat")
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.test.labels.tolist() == [1]
    for row, name in enumerate(["train/ant/z.png", "train/cat/a.png", "train/cat/b.png"]):
        np.testing.assert_array_equal(data.train.images[row].permute(1, 2, 0).numpy(), np.asarray(files[name]))


def test_a_folder_sorted_by_class_and_name(tmp_path: Path) -> None:
    files = some_files()
    folder = write(tmp_path / "pets", files)
    (folder / "train/cat/notes.txt").write_text("not an image")
    (folder / "train/cat/.hidden.png").write_text("not an image either")
    (folder / "train/README").write_text("not a class")
    data = load_dataset(folder)
    check(data, files)
    assert data.input_shape == (3, 5, 6)
    assert (data.name, data.nominal_size) == ("pets", None)


@pytest.mark.parametrize("prefix", ["", "./", "pets/"])
def test_a_tar_gives_the_same(tmp_path: Path, prefix: str) -> None:
    files = some_files()
    path = write_tar(tmp_path / "pets.tar", files, prefix)
    check(load_dataset(path), files)
    check(load_dataset(tmp_path), files)  # a folder that holds one tar


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """They are bytes to the file system; a cache that cannot hold them is passed by."""
    files = some_files()
    folder = write(tmp_path / "pets", files)
    strange = folder.with_name(os.fsdecode(b"p\xe9ts"))
    folder.rename(strange)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(load_dataset(strange), files)


def test_two_tars_are_ambiguous(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", some_files())
    write_tar(tmp_path / "b.tar", some_files())
    with pytest.raises(ValueError, match=r"expected one tar, got \['a.tar', 'b.tar'\]"):
        load_dataset(tmp_path)


def test_grayscale_stays_one_channel_and_mixes_into_colour(tmp_path: Path) -> None:
    gray = some_files("L")
    data = load_dataset(write(tmp_path / "gray", gray))
    assert data.input_shape == (1, 5, 6)
    np.testing.assert_array_equal(data.test.images[0, 0].numpy(), np.asarray(gray["test/cat/c.png"]))
    mixed = some_files() | {"train/ant/z.png": picture(9, "L"), "train/cat/a.png": picture(8, "P")}
    data = load_dataset(write(tmp_path / "mixed", mixed))
    assert data.input_shape == (3, 5, 6)
    assert torch.equal(data.train.images[0, 0], data.train.images[0, 2])


@pytest.mark.parametrize(
    ("name", "image", "words"),
    [
        ("train/cat/a.png", picture(1, size=(7, 5)), "expected 5x6 pixels as in test/cat/c.png, got 5x7"),
        ("train/ant/z.png", Image.new("I;16", (6, 5)), "expected an image with 8 bits a channel, got Pillow mode I;16"),
    ],
)
def test_an_image_that_does_not_fit_is_named(tmp_path: Path, name: str, image: Image.Image, words: str) -> None:
    folder = write(tmp_path, some_files() | {name: image})
    with pytest.raises(ValueError, match=words) as caught:
        load_dataset(folder)
    assert str(folder / name) in str(caught.value)


def test_colour_among_grayscale_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, some_files("L") | {"train/cat/b.png": picture(1)})
    with pytest.raises(ValueError, match=r"b.png: expected grayscale as in the test images, got RGB"):
        load_dataset(folder)


@pytest.mark.parametrize("extension", ["png", "jpg"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda _: b"", lambda _: b"hello"])
def test_a_damaged_image_is_named(tmp_path: Path, extension: str, damage: Callable[[bytes], bytes]) -> None:
    folder = write(tmp_path, some_files() | {f"train/cat/x.{extension}": picture(3)})
    path = folder / f"train/cat/x.{extension}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train/cat/x.{extension}: expected an image .*, got "):
        load_dataset(folder)


def test_layout_errors(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"train/cat/a.png": picture(0)})
    with pytest.raises(FileNotFoundError, match="the folder test is missing"):
        load_dataset(folder)
    (folder / "test").mkdir()
    with pytest.raises(ValueError, match="got no image in test"):
        load_dataset(folder)
    write(folder, {"test/dog/a.png": picture(0)})
    with pytest.raises(ValueError, match=r"got \['dog'\], which train does not have"):
        load_dataset(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="got none of them"):
        load_dataset(empty)


def test_a_cut_tar_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "pets.tar", some_files())
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"pets.tar: expected a whole tar archive"):
        load_dataset(path)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every image that is decoded, as it happens."""
    log: list[object] = []
    original = folders_module._decode

    def counting(source: Path, entry: object, *more: object) -> np.ndarray:
        log.append(entry)
        return original(source, entry, *more)

    monkeypatch.setattr(folders_module, "_decode", counting)
    return log


@pytest.mark.parametrize("as_tar", [False, True])
def test_decoded_once_and_again_when_the_source_changes(tmp_path: Path, decoded: list[object], as_tar: bool) -> None:
    files = some_files()

    def make() -> Path:
        return write_tar(tmp_path / "pets.tar", files) if as_tar else write(tmp_path / "pets", files)

    path = make()
    check(load_dataset(path), files)
    check(load_dataset(path), files)
    assert len(decoded) == 4
    entries = list((tmp_path / "cache").iterdir())
    assert len(entries) == 1
    assert stat.S_IMODE(entries[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(entries[0].parent.stat().st_mode) == 0o700

    files["train/ant/z.png"] = picture(77)
    make()
    touched = path if as_tar else path / "train/ant/z.png"
    os.utime(touched, ns=(0, touched.stat().st_mtime_ns + 1_000_000))
    check(load_dataset(path), files)
    assert len(decoded) == 8
    assert list((tmp_path / "cache").iterdir()) == entries  # the old entry was replaced


@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: b[:3], lambda b: b"x" * len(b)])
def test_a_damaged_cache_entry_is_made_again(
    tmp_path: Path, decoded: list[object], damage: Callable[[bytes], bytes]
) -> None:
    files = some_files()
    path = write(tmp_path / "pets", files)
    load_dataset(path)
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    check(load_dataset(path), files)
    check(load_dataset(path), files)
    assert len(decoded) == 8


def test_a_cache_entry_that_does_not_fit_together_is_made_again(tmp_path: Path, decoded: list[object]) -> None:
    files = some_files()
    path = write(tmp_path / "pets", files)
    load_dataset(path)
    (entry,) = (tmp_path / "cache").iterdir()
    with safe_open(entry, "numpy") as file:
        metadata, good = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    bad: list[tuple[dict[str, np.ndarray], dict[str, str]]] = [
        ({"train_labels": good["train_labels"] + 2}, {}),
        ({"train_labels": good["train_labels"][:-1]}, {}),
        ({"train_labels": good["train_labels"].astype(np.float64)}, {}),
        ({"test_images": good["test_images"].astype(np.float32)}, {}),
        ({"test_images": good["test_images"][0]}, {}),
        ({}, {"classes": "5"}),
        ({}, {"classes": "[" * 100_000}),
    ]
    for number, (arrays, words) in enumerate(bad, 2):
        save_file(good | arrays, entry, metadata=metadata | words)
        check(load_dataset(path), files)
        assert len(decoded) == 4 * number
    entry.unlink()
    os.mkfifo(entry)
    check(load_dataset(path), files)


def test_a_cache_that_cannot_be_written_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = some_files()
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("DPKERNELS_CACHE", str(blocked / "cache"))
    with pytest.warns(UserWarning, match="decoded images could not be kept in"):
        check(load_dataset(write(tmp_path / "pets", files)), files)


def test_cache_folder_falls_back_to_the_xdg_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_dataset(write(tmp_path / "pets", some_files()))
    assert len(list((tmp_path / "xdg" / "dpkernels").glob("pets-*.safetensors"))) == 1


def test_without_a_home_the_cache_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DPKERNELS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(RuntimeError, match="set the environment variable DPKERNELS_CACHE to a folder"):
        load_dataset(write(tmp_path / "pets", some_files()))


def test_images_of_the_real_tar(real_data: Path, tmp_path: Path) -> None:
    """A hundred members of the real CIFAR-10 tar, as the data set by name."""
    source = real_data / "cifar10" / "cifar10-jpeg.tar"
    if not source.is_file():
        pytest.skip(f"no {source}")
    kept: dict[tuple[str, ...], int] = {}
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(source) as whole, tarfile.open(tmp_path / "cifar10" / "few.tar", "w") as few:
        for member in whole:
            key = tuple(member.name.split("/")[:2])
            if member.isfile() and kept.setdefault(key, 0) < 5:
                kept[key] += 1
                few.addfile(member, whole.extractfile(member))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_dataset("cifar10", tmp_path)
    assert (len(data.train), len(data.test), data.input_shape, data.nominal_size) == (50, 50, (3, 32, 32), 50_000)
    assert data.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    assert data.train.labels.tolist() == [label for label in range(10) for _ in range(5)]
    assert 0.3 < data.train.images.double().mean().item() / 255 < 0.6
