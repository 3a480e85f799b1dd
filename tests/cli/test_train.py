"""`dpkernels train` from arguments to files, exit code and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dpkernels.accounting.statement import rounded_up
from dpkernels.cli import main
from dpkernels.training import load_checkpoint
from dpkernels.training.config import field_names

SHORT = ["--epochs", "2", "--batch-size", "479", "--noise-multiplier", "2"]  # six steps


def test_a_run_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", *SHORT, "--seed", "1", "--out", str(out)]) == 0
    printed, _ = capsys.readouterr()
    metrics = json.loads((out / "metrics.json").read_text())
    assert printed.startswith("NOT PRIVATE: --seed 1")
    assert f"test accuracy  {metrics['test_accuracy']:.2%}" in printed
    assert f"epsilon {rounded_up(metrics['epsilon'])} at delta 1e-05" in printed
    assert str(out / "privacy.png") in printed
    assert metrics["statement"] in printed
    assert printed.count("\nepoch ") == 2  # no terminal: a line an epoch
    assert "loss" not in printed.split(metrics["statement"])[0]
    assert {path.name for path in out.iterdir()} >= {
        "metrics.json",
        "history.jsonl",
        "privacy.png",
        "model.safetensors",
        "checkpoint.pt",
        "config.json",
    }

    assert main(["train", *SHORT, "--seed", "1", "--out", str(out)]) == 2
    assert "already holds a run: go on with --resume" in capsys.readouterr().err
    changed = ["--lr", "1", "--momentum", "0.9", "--seed", "2"]
    assert main(["train", "--resume", "--out", str(out), *changed]) == 2
    error = capsys.readouterr().err
    assert "lr=1.0 (was 4.0)" in error
    assert "seed=2 (was 1)" in error
    assert "momentum" not in error
    before = load_checkpoint(out / "checkpoint.pt").model
    assert main(["train", *SHORT, "--seed", "1", "--resume", "--out", str(out), "--quiet"]) == 0
    assert "\nepoch " not in capsys.readouterr().out
    after = load_checkpoint(out / "checkpoint.pt").model
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_demo_reaches_its_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All defaults, but for a seed: at (3, 1e-5), at least 92% of the test images of digits."""
    assert main(["train", "--seed", "0", "--out", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["epsilon"] <= 3.0
    assert metrics["delta"] == 1e-5
    assert metrics["test_accuracy"] >= 0.92


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SHORT]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-")
    assert json.loads((folder / "metrics.json").read_text())["private"]


def test_every_field_of_a_configuration_has_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in field_names() if f"--{name.replace('_', '-')}" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0"], "--epsilon must be a finite number > 0, got 0.0"),
        (["--epsilon", "-1"], "--epsilon must be a finite number > 0, got -1.0"),
        (["--epsilon", "nan"], "--epsilon must be a finite number > 0, got nan"),
        (["--noise-multiplier", "0"], "--noise-multiplier must be a finite number > 0, got 0.0"),
        (["--noise-multiplier", "1", "--epsilon", "3"], "not allowed with argument"),
        (["--delta", "0"], "--delta must be a probability with 0 < delta < 1, got 0.0"),
        (["--delta", "1.5"], "--delta must be a probability with 0 < delta < 1, got 1.5"),
        (["--batch-size", "0"], "--batch-size must be a positive integer, got 0"),
        (["--batch-size", "1438"], "--batch-size must be at most dataset_size=1437, got 1438"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--epochs", "-2"], "--epochs must be a finite number > 0, got -2.0"),
        (["--lr", "0"], "--lr must be a finite number > 0, got 0.0"),
        (["--max-grad-norm", "0"], "--max-grad-norm must be a number from 1e-10 to 1e10, got 0.0"),
        (["--momentum", "1"], "--momentum must be a number with 0 <= momentum < 1, got 1.0"),
        (["--loss", "hinge"], "argument --loss: invalid choice: 'hinge'"),
        (["--loss-gamma", "2"], "--loss-gamma must be given with the losses that have it"),
        (["--optimizer", "lion"], "argument --optimizer: invalid choice: 'lion'"),
        (["--optimizer", "adam", "--momentum", "0.5"], "--momentum must be 0 with the optimizer adam, got 0.5"),
        (["--dataset", "imagenet"], "--dataset must be one of digits, mnist, fashion-mnist, cifar10"),
        (["--dataset", "mnist", "--data-root", "/nonexistent"], "mnist was not found: looked in /nonexistent/mnist"),
        (["--model", "gpt"], "--model must be one of linear, mnist_cnn"),
        (["--model", "mnist_cnn"], "(1, 28, 28)"),
        (["--physical-batch-size", "0"], "--physical-batch-size must be at least 1, got 0"),
        (["--workers", "-1"], "--workers must be at least 0, got -1"),
        (["--device", "toaster"], "--device must be a device of torch, got 'toaster'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_bad_input_is_one_readable_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    length = [] if "--epochs" in arguments else ["--epochs", "1"]
    assert main(["train", "--out", str(out), *length, *arguments]) == 2
    printed, error = capsys.readouterr()
    assert "Traceback" not in error
    assert error.startswith("dpkernels")
    assert error.count("\n") == 1
    assert message in error
    assert "test accuracy" not in printed
    assert not out.exists()


def test_an_output_folder_that_cannot_be_written_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("dpkernels.cli.train.load_dataset", lambda *_: pytest.fail("the data was read before"))
    assert main(["train", "--out", str(tmp_path / "file" / "run")]) == 2
    assert "must be writable" in capsys.readouterr().err


def test_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 20), ("test", 5)):
        for label in ("dark", "light"):
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(0, 100, (6, 6), generator=generator, dtype=torch.uint8)
                Image.fromarray((pixels + 150 * (label == "light")).numpy()).save(folder / f"{index}.png")
    base = ["train", "--dataset", str(tmp_path / "pictures"), "--epochs", "3", "--batch-size", "20", "--epsilon", "20"]
    assert main([*base, "--out", str(tmp_path / "a")]) == 2
    assert "--dataset-size must be given for a folder" in capsys.readouterr().err
    assert main([*base, "--out", str(tmp_path / "a"), "--dataset-size", "40"]) == 0
    assert "linear on pictures" in capsys.readouterr().out


def test_photographs_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a resume reads them so, and Nesterov's momentum reaches the optimizer."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for label in ("dark", "light"):
            (tmp_path / "shots" / split / label).mkdir(parents=True)
            for index in range(8):
                pixels = torch.randint(0, 100, (9 + index, 20 - index), generator=generator, dtype=torch.uint8)
                picture = Image.fromarray((pixels + 150 * (label == "light")).numpy())
                picture.save(tmp_path / "shots" / split / label / f"{index}.jpg")
    base = ["train", "--dataset", str(tmp_path / "shots"), "--dataset-size", "16", "--batch-size", "8", "--epochs", "1"]
    base += ["--image-size", "6", "--physical-batch-size", "3", "--delta", "0.01", "--nesterov"]
    assert main([*base, "--out", str(tmp_path / "a")]) == 0
    assert json.loads((tmp_path / "a" / "config.json").read_text())["config"]["image_size"] == 6
    groups = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["nesterov"] for group in groups] == [True]
    capsys.readouterr()
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 0
    assert "linear on shots" in capsys.readouterr().out


def test_a_delta_that_protects_nobody_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SHORT, "--delta", "0.01", "--out", str(tmp_path / "run")]) == 0
    error = capsys.readouterr().err
    assert error.startswith("dpkernels: warning: delta=0.01 is not below 1/dataset_size")
    assert error.count("\n") == 1


def test_a_recipe_with_another_loss_and_diagnostics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is given beside a recipe replaces what goes with it: its noise, and what its loss has of its own."""
    given = ["--dataset", "digits", "--model", "linear", "--batch-size", "479", "--epochs", "1", "--epsilon", "9"]
    recipe = ["--recipe", "shamsabadi2023-mnist-cnn", "--loss", "huber", "--loss-beta", "0.5"]
    assert main(["train", *recipe, *given, "--out", str(tmp_path), "--diagnostics"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PRIVATE: these values depend on single training examples")
    assert "linear on digits: huber, sgd" in printed
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    assert (config["loss"], config["loss_beta"], config["loss_gamma"]) == ("huber", 0.5, None)
    assert (config["epsilon"], config["noise_multiplier"]) == (9.0, None)
    assert (tmp_path / "diagnostics-PRIVATE.png").exists()


def test_a_model_on_features_says_so_and_refuses_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["train", *SHORT, "--model", "scatternet_linear"]
    assert main([*model, "--features", "none", "--out", str(tmp_path / "pixels")]) == 2
    assert "--features must be given with scatternet_linear on images, got none" in capsys.readouterr().err
    assert not (tmp_path / "pixels").exists()
    assert main([*model, "--out", str(tmp_path / "run")]) == 0
    assert "scatternet_linear on digits by scatternet features: cross-entropy" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["features"] == "scatternet"


def test_an_epsilon_beyond_the_noise_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epsilon, words in (("1000", "--epsilon must be smaller, got 1000"), ("45", "--epsilon must be smaller for")):
        base = ["train", "--epochs", "2", "--batch-size", "479", "--epsilon", epsilon]
        assert main([*base, "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_debugging_keeps_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPKERNELS_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        main(["train", "--resume", "--out", str(tmp_path / "none")])
