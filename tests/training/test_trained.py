"""The model that a run leaves does on images what it did in the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.training import RunFolder, TrainConfig, accuracy, load_trained, train
from tests.damage import one_outcome

Small = Callable[..., TrainConfig]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPKERNELS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "public"},
        {"normalization": "private", "averaging": 0.5},
        {"normalization": "group", "groups": 1, "model": "simple_vgg-4x1-8x1-16"},
    ],
)
def test_on_pixels_it_is_the_very_model(
    changes: dict[str, Any], small: Small, run: Callable[..., Any], digits: ImageDataset, tmp_path: Path
) -> None:
    result = run(small(epochs=1.0, seed=1, **changes), tmp_path / "run")
    for path in (result.folder.path, result.folder.model):
        model = load_trained(path)
        assert not model.training
        assert (model.classes, model.input_shape) == (digits.classes, (1, 8, 8))
        assert accuracy(model, digits.scaled(0.0, 1.0).test) == result.metrics["test_accuracy"]
    assert float(model.metadata["epsilon"]) == result.metrics["epsilon"]
    assert model.metadata["private"] == "false"


@pytest.mark.parametrize(
    "changes",
    [
        {"features": "scatternet"},
        {"features": "scatternet-whitened", "normalization": "public"},
        {"features": "scatternet-mirrored-whitened", "normalization": "group", "groups": 27},
    ],
)
def test_it_takes_the_features_itself(
    changes: dict[str, Any], small: Small, run: Callable[..., Any], digits: ImageDataset, tmp_path: Path
) -> None:
    result = run(small(epochs=2.0, seed=1, **changes), tmp_path / "run")
    model = load_trained(result.folder.path)
    found = accuracy(model, digits.scaled(0.0, 1.0).test)
    assert found == pytest.approx(result.metrics["test_accuracy"], abs=0.01)  # the run's features were rounded
    assert found > 0.5
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert model(torch.rand(0, 1, 8, 8)).shape == (0, 10)


def test_features_that_were_brought_are_taken_as_they_are(small: Small, tmp_path: Path) -> None:
    rows = torch.randn(479, 5, generator=torch.Generator().manual_seed(0))
    split = ArraySplit(rows, torch.arange(479) % 10)
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    config = small(dataset_size=479, model="linear")
    data = ImageDataset("brought", tuple("0123456789"), split, split)
    metrics = train(config, config.plan(), data, folder).metrics
    model = load_trained(folder.path)
    assert accuracy(model, split) == metrics["test_accuracy"]
    weights = load_file(folder.model)
    normed = F.layer_norm(rows, (5,))  # the first layer of "linear"
    assert torch.allclose(model(rows), normed @ weights["2.weight"].T + weights["2.bias"], atol=1e-6)


def test_images_of_another_kind_are_refused(small: Small, run: Callable[..., Any], tmp_path: Path) -> None:
    model = load_trained(run(small(epochs=1.0), tmp_path / "run").folder.path)
    for images in (torch.rand(2, 1, 9, 8), torch.rand(1, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"images must be floating-point \[batch, 1, 8, 8\], pixels in \[0, 1\]"):
            model(images)


def test_files_that_no_run_left(small: Small, run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the model of a run, got none"):
        load_trained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors must be a safetensors file"):
        load_trained(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="must be the model of a run of this version: it does not say its"):
        load_trained(path)
    folder = run(small(epochs=1.0), tmp_path / "run").folder
    metadata = load_trained(folder.path).metadata
    save_file(load_file(folder.model), path, metadata=metadata | {"fingerprint": "of others"})
    with pytest.raises(ValueError, match="was left by another version, whose none features were others"):
        load_trained(path)
    save_file(load_file(folder.model), path, metadata=metadata | {"classes": json.dumps(["one", "two"])})
    with pytest.raises(ValueError, match=r"model\.safetensors must hold the weights of linear"):
        load_trained(path)


TOLD = {
    "dataset": "digits",
    "classes": json.dumps([*"0123456789"]),
    "input_shape": "[1, 8, 8]",
    "pixel_range": "[0, 1]",
    "features": "none",
    "fingerprint": "",
    "normalization": "none",
    "groups": "null",
    "model": "linear",
}
LINEAR = {"2.weight": torch.zeros(10, 64), "2.bias": torch.zeros(10)}
NORMALIZED = {"1.2.weight": torch.zeros(10, 64), "1.2.bias": torch.zeros(10)}
PRIVATE = {"normalization": "private"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": "["}, ", classes: expected JSON"),
        ({"classes": "[" * 100_000}, ", classes: expected JSON"),
        ({"classes": "null"}, ", classes: expected a list of names, got None"),
        ({"classes": "5"}, ", classes: expected a list of names, got 5"),
        ({"classes": "[]"}, ", classes: expected a list of names, got []"),
        ({"input_shape": "3"}, ", input_shape: expected a list of sizes, got 3"),
        ({"input_shape": '["a"]'}, ", input_shape: expected a list of sizes, got ['a']"),
        ({"input_shape": "[1, -8, 8]"}, ", input_shape: expected a list of sizes, got [1, -8, 8]"),
        ({"input_shape": "[]"}, ", input_shape: expected a list of sizes, got []"),
        ({"input_shape": "[1, 100000, 100000]"}, "2.weight is float32 10x64 in the file, where float32 10x10000000000"),
        ({"pixel_range": "7"}, ", pixel_range: expected two numbers, the smaller one first, got 7"),
        ({"pixel_range": "[0, Infinity]"}, ", pixel_range: expected two numbers"),
        ({"features": "x"}, ", features: expected one of none, scatternet"),
        ({"features": "scatternet", "input_shape": "[1, 20000, 20000]"}, "images of more than 262144 pixels"),
        ({"features": "scatternet-whitened", "input_shape": "[300, 512, 512]"}, "of memory of this machine"),
        ({"normalization": "zzz"}, ", normalization: expected one of none, group, public, private, got 'zzz'"),
        ({"normalization": "group", "groups": '"a"'}, ", groups: expected a count or null, got 'a'"),
        ({"normalization": "group", "groups": "0"}, ", groups: expected a count or null, got 0"),
        ({"normalization": "group"}, ", groups: expected a number with group normalization and only then"),
        ({"groups": "3"}, ", groups: expected a number with group normalization and only then"),
        ({"normalization": "group", "groups": "3"}, "groups must divide channels=1, got 3"),
        ({"model": "../../etc/passwd"}, "name must be one of linear"),
        ({"model": "simple_vgg-999999x3-10"}, "is not in the file"),
        ({"model": "simple_vgg-100000000x3-10"}, "name must be one of linear"),
        ({"model": "simple_vgg-1x999999-10"}, "name must be of at most 1000 convolutions, got 999999"),
        ({"model": "resnet50", "input_shape": "[3, 8, 8]"}, "is not in the file"),
        (PRIVATE, "is not in the file"),
    ],
)
def test_metadata_of_a_stranger(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    """Refused within a second, and nothing is made of a size that the file only tells of."""
    path = tmp_path / "model.safetensors"
    save_file(LINEAR, path, metadata=TOLD)
    load_trained(path)
    save_file(LINEAR, path, metadata=TOLD | changes)
    message = one_outcome(lambda: load_trained(path), "model.safetensors", seconds=1)
    assert words in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"x": torch.zeros(1)}, {}, "2.weight, float32 10x64, is not in the file"),
        (LINEAR | {"2.bias": torch.zeros(11)}, {}, "2.bias is float32 11 in the file, where float32 10 is expected"),
        (LINEAR | {"2.bias": torch.zeros(10).half()}, {}, "2.bias is F16 10 in the file, where float32 10"),
        (LINEAR | {"more": torch.zeros(1)}, {}, "more is in the file and not in the model"),
        (NORMALIZED, PRIVATE, "0.mean, float64 1, is not in the file"),
    ],
)
def test_tensors_of_a_stranger(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], words: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata=TOLD | metadata)
    with pytest.raises(
        ValueError, match=r"model\.safetensors must hold the weights of linear for input_shape"
    ) as caught:
        load_trained(path)
    assert words in str(caught.value)
