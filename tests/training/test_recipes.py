"""Recipes are those of the paper, and a run on features pays for its statistics and goes on after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkernels.accounting import Gaussian, bound
from dpkernels.data import ArraySplit, ImageDataset, ImageSplit
from dpkernels.models import create
from dpkernels.training import RECIPES, Execution, RunFolder, TrainConfig, recipe, resolve, train

SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
FEATURES = {"mnist": (81, 7, 7), "fashion-mnist": (81, 7, 7), "cifar10": (243, 8, 8)}


def like(name: str) -> ImageDataset:
    split = ImageSplit(torch.zeros(2, *SHAPES[name], dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    return ImageDataset(name, tuple("0123456789"), split, split, 50_000 if name == "cifar10" else 60_000)


@pytest.mark.parametrize("name", [n for n in RECIPES if "transfer" not in n and not n.startswith("kurakin2022")])
def test_every_recipe_is_a_configuration_whose_model_fits(name: str) -> None:
    values = recipe(name)
    config = resolve(like(values["dataset"]), values)
    shape = FEATURES[config.dataset] if config.features == "scatternet" else SHAPES[config.dataset]
    assert create(config.model, shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)
    assert (config.max_grad_norm, config.momentum, config.delta) == (0.1, 0.9, 1e-5)
    assert config.epsilon == (None if name.startswith("shamsabadi2023") else 3.0)


def test_table_13() -> None:
    rows = {
        "mnist-scatternet-linear": (4096, 8.0, 40),
        "mnist-scatternet-cnn": (1024, 1.0, 25),
        "mnist-cnn": (512, 0.5, 40),
        "fashion-mnist-scatternet-linear": (8192, 16.0, 40),
        "fashion-mnist-scatternet-cnn": (2048, 4.0, 40),
        "fashion-mnist-cnn": (2048, 4.0, 40),
        "cifar10-scatternet-linear": (8192, 4.0, 60),
        "cifar10-scatternet-cnn": (8192, 4.0, 60),
        "cifar10-cnn": (1024, 1.0, 30),
    }
    for name, wanted in rows.items():
        values = recipe(f"tramer2021-{name}")
        assert (values["batch_size"], values["lr"], values["epochs"]) == wanted
    assert recipe("tramer2021-fashion-mnist-scatternet-cnn")["groups"] == 27
    assert recipe("tramer2021-cifar10-cnn")["normalization"] == "public"


def test_table_5() -> None:
    rows = {
        "mnist-cnn": (512, 0.5, 40, 1.23, 0, 1, 5),
        "mnist-scatternet-cnn": (1024, 1.0, 25, 1.35, 2, 11, 2),
        "fashion-mnist-cnn": (2048, 4.0, 40, 2.15, 0, 1, 5),
        "fashion-mnist-scatternet-cnn": (2048, 4.0, 40, 2.15, 2, 51, 2),
        "cifar10-cnn": (1024, 1.0, 30, 1.54, 7, 11, 5),
        "cifar10-scatternet-cnn": (8192, 4.0, 60, 5.67, 2, 11, 2),
    }
    own = ("loss_threshold_epoch", "loss_beta", "loss_gamma")
    for name, wanted in rows.items():
        values = recipe(f"shamsabadi2023-{name}")
        assert tuple(values[f] for f in ("batch_size", "lr", "epochs", "noise_multiplier", *own)) == wanted
        assert values["loss"] == "losing-less"
        given = {"dataset": values["dataset"], "loss": "losing-less", "features": values.get("features", "none")}
        defaults = resolve(like(values["dataset"]), given)
        assert tuple(getattr(defaults, f) for f in own) == wanted[4:]
    assert len([name for name in RECIPES if name.startswith("shamsabadi2023")]) == len(rows)


def test_table_17() -> None:
    values = recipe("tramer2021-transfer-resnext")
    assert (values["batch_size"], values["lr"], values["epochs"], values["epsilon"]) == (2048, 8.0, 40, 2.0)
    assert recipe("tramer2021-transfer-simclr")["lr"] == 4.0


def photographs() -> ImageDataset:
    split = ImageSplit(torch.zeros(2, 3, 80, 80, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    return ImageDataset("imagenet", tuple("0123456789"), split, split)


def test_the_recipes_of_kurakin_et_al() -> None:
    best = resolve(photographs(), recipe("kurakin2022-imagenet-places365") | {"dataset": "imagenet"})
    assert (best.batch_size, best.epochs, best.lr, best.epsilon, best.delta) == (65_536, 70, 7.68, 10, 1e-6)
    assert (best.momentum, best.nesterov, best.weight_decay, best.max_grad_norm) == (0.9, True, 1e-4, 1.0)
    assert best.freeze == "3"
    assert (best.schedule, best.warmup * best.epochs) == ("cosine", pytest.approx(1))
    full = resolve(photographs(), recipe("kurakin2022-imagenet-full-batch") | {"dataset": "imagenet"})
    with pytest.warns(UserWarning, match="delta=1e-06 is not below 1/dataset_size=7.8"):
        plan = full.plan()
    assert plan.steps == 782
    assert 65 < bound(plan.events, plan.delta).upper < 72.3  # what the paper prints
    assert plan.bound.refusal  # which is more than this package's noise can be shown to carry
    vgg = resolve(like("cifar10"), recipe("kurakin2022-cifar10-simplevgg"))
    assert (vgg.model, vgg.batch_size, vgg.epochs, vgg.noise_multiplier) == ("simple_vgg", 500, 100, 1.5)


def test_an_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="recipe must be one of tramer2021-mnist-scatternet-linear"):
        recipe("mnist")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"normalization": "group"}, "groups must be given with normalization='group'"),
        ({"groups": 9}, "groups must be given with normalization='group' and only then"),
        ({"norm_noise_multiplier": 8.0}, "norm_noise_multiplier must be given with normalization='private'"),
        (
            {"features": "sift"},
            "features must be one of none, scatternet, scatternet-mirrored, scatternet-whitened, "
            "scatternet-mirrored-whitened",
        ),
        ({"normalization": "batch"}, "normalization must be one of none, group, public, private"),
        ({"norm_noise_multiplier": 0.0}, "norm_noise_multiplier must be a finite number > 0"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(like("mnist"), {"dataset": "mnist", **given})


def test_features_bring_a_linear_model_and_private_statistics() -> None:
    config = resolve(like("mnist"), {"dataset": "mnist", "features": "scatternet"})
    assert (config.model, config.normalization, config.norm_noise_multiplier) == ("scatternet_linear", "private", 32.0)
    assert config.compose_with == (Gaussian(32.0 / 2**0.5),)
    free = resolve(like("mnist"), {"dataset": "mnist", "features": "scatternet", "normalization": "public"})
    assert free.compose_with == ()


def test_pixels_of_cifar10_are_normalized_by_public_statistics_unless_a_public_model_saw_others() -> None:
    data = like("cifar10")
    assert resolve(data, {"dataset": "cifar10"}).normalization == "public"
    assert resolve(data, {"dataset": "cifar10", "init": "weights.pt"}).normalization == "none"
    assert resolve(data, {"dataset": "cifar10", "init": "weights.pt", "normalization": "public"}).compose_with == ()
    assert resolve(data, {"dataset": "cifar10", "features": "scatternet"}).normalization == "private"


@pytest.fixture
def on_features(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TrainConfig]:
    monkeypatch.setenv("DPKERNELS_CACHE", str(tmp_path / "cache"))
    return lambda **changes: small(**{"features": "scatternet", **changes})


def test_a_run_pays_for_its_statistics(
    on_features: Callable[..., TrainConfig], digits: ImageDataset, tmp_path: Path
) -> None:
    config = on_features(seed=1)
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    plan = config.plan()
    assert plan.compose_with == config.compose_with
    metrics = train(config, plan, digits, folder).metrics
    first = json.loads(folder.ledger.read_text())["entries"][0]
    assert (first["what"], first["noise_multiplier"]) == ("normalization statistics", 32.0 / 2**0.5)
    assert metrics["epsilon"] == plan.epsilon
    assert metrics["test_accuracy"] > 0.5
    assert (metrics["features"], metrics["normalization"]) == ("scatternet", "private")
    assert folder.read_config() == (config, plan)
    weights = torch.load(folder.checkpoint, weights_only=True)["model"]
    assert weights["0.std"].shape == (81,)


def test_a_stopped_run_keeps_its_statistics(
    on_features: Callable[..., TrainConfig],
    digits: ImageDataset,
    run: Callable[..., Any],
    interrupt_at: Callable[[int], Any],
    tmp_path: Path,
) -> None:
    config = on_features(seed=1)
    whole = run(config, tmp_path / "whole")
    stopped = run(config, tmp_path / "parts", progress=interrupt_at(5))
    assert not stopped.metrics["complete"]
    resumed = run(config, tmp_path / "parts", resume=True)
    states = [torch.load(r.folder.checkpoint, weights_only=True)["model"] for r in (whole, resumed)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_statistics_that_were_lost_are_not_made_again(
    on_features: Callable[..., TrainConfig],
    run: Callable[..., Any],
    copy_at: Callable[[int, Path, Path], Any],
    tmp_path: Path,
) -> None:
    run(on_features(), tmp_path / "run", progress=copy_at(1, tmp_path / "run", tmp_path / "killed"))
    (tmp_path / "killed" / "checkpoint.pt").unlink()
    with pytest.raises(FileNotFoundError, match="something is spent: normalization statistics"):
        run(None, tmp_path / "killed", resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "public"},
        {"normalization": "group", "groups": 27},
        {"normalization": "public", "features": "scatternet-whitened"},
        {"normalization": "public", "features": "scatternet-mirrored"},
        {"normalization": "public", "features": "scatternet-mirrored-whitened"},
    ],
)
def test_normalization_that_is_free(
    on_features: Callable[..., TrainConfig], digits: ImageDataset, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = on_features(epochs=1.0, **changes)
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    train(config, config.plan(), digits, folder, execution=Execution(physical_batch_size=100))
    assert all(entry["step"] for entry in json.loads(folder.ledger.read_text())["entries"])


def test_pixels_are_normalized_in_units_of_synthetic_images(
    small: Callable[..., TrainConfig], digits: ImageDataset, tmp_path: Path
) -> None:
    ranges = {}
    for name, data in (("symmetric", digits), ("unit", digits.scaled(0.0, 1.0))):
        folder = RunFolder(tmp_path / name)
        folder.claim()
        config = small(normalization="public", epochs=0.5)
        train(config, config.plan(), data, folder)
        weights = torch.load(folder.checkpoint, weights_only=True)["model"]
        ends = torch.tensor(data.test.value_range, dtype=torch.float64)
        ranges[name] = (ends - weights["0.mean"]) / weights["0.std"]
    # grey is 0.5 with a contrast of 0.2, so that black and white lie 2.5 from it, whatever pixels were scaled to
    assert ranges["unit"].tolist() == pytest.approx([-2.5, 2.5], abs=0.1)
    assert torch.allclose(ranges["unit"], ranges["symmetric"], atol=1e-5)


def test_private_statistics_of_pixels_are_paid_for(
    small: Callable[..., TrainConfig], digits: ImageDataset, run: Callable[..., Any], tmp_path: Path
) -> None:
    config = small(normalization="private", norm_noise_multiplier=4.0, seed=2)
    result = run(config, tmp_path / "run")
    first = json.loads(result.folder.ledger.read_text())["entries"][0]
    assert (first["what"], first["noise_multiplier"]) == ("normalization statistics", 4.0 / 2**0.5)
    weights = torch.load(result.folder.checkpoint, weights_only=True)["model"]
    pixels = digits.train.batch(torch.arange(len(digits.train)))[0].double()
    assert weights["0.mean"].item() == pytest.approx(pixels.mean().item(), abs=0.1)
    assert weights["0.std"].item() == pytest.approx(pixels.std().item(), rel=0.1)


def test_features_that_the_user_brings_have_no_public_statistics(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    split = ArraySplit(torch.zeros(20, 5), torch.arange(20) % 10)
    data = ImageDataset("brought", tuple("0123456789"), split, split)
    for config in (small(normalization="public"), small(normalization="private", norm_noise_multiplier=8.0)):
        folder = RunFolder(tmp_path / config.normalization)
        folder.claim()
        with pytest.raises(ValueError, match="normalization must be none or group for brought, which holds no images"):
            train(config, config.plan(), data, folder)
        assert not folder.exists
