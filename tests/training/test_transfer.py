"""Runs that start from a public model: what is loaded, frozen and trained, and what a resume makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from dpkernels import models
from dpkernels.cli import main
from dpkernels.training import TrainConfig
from dpkernels.training.transfer import parameter_groups, prepare
from tests.training.conftest import Watcher

Small = Callable[..., TrainConfig]


def network() -> nn.Module:
    return models.create("resnet8", (1, 8, 8), 10)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = network()
    path = tmp_path_factory.mktemp("public") / "public.safetensors"
    save_model(model, str(path))
    return path, model.state_dict()


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, {"classifier", "norm", "body"}),
        ({"freeze": "3"}, {"classifier"}),
        ({"freeze": "body"}, {"classifier", "norm"}),
        ({"freeze": "norm, body,"}, {"classifier"}),
        ({"freeze": "0,1.0.residual.0"}, {"classifier", "norm", "body"}),
        ({"sparse": 0.01}, {"classifier", "norm", "sparse"}),
        ({"sparse": 0.01, "freeze": "1"}, {"classifier", "norm", "sparse"}),
    ],
)
def test_what_is_trained_and_how_fast(
    public: tuple[Path, dict[str, torch.Tensor]], small: Small, fields: dict[str, Any], trained: set[str]
) -> None:
    config = small(model="resnet8", init=str(public[0]), lr=0.8, lr_body=0.01, **fields)
    model = network()
    report, *counts = prepare(config, model)
    assert f"{len(public[1]) - 2} tensors loaded" in report
    assert torch.equal(model[1][0].activation[0].weight, public[1]["1.0.activation.0.weight"])
    groups = parameter_groups(config, model)
    assert groups is not None
    assert {group["name"] for group in groups} == trained
    assert {group["name"]: group["lr"] for group in groups} == {
        role: 0.8 if role == "classifier" else 0.01 for role in trained
    }
    assert bool(counts) == bool(fields)
    if "sparse" in trained and "freeze" not in fields:
        convolutions = sum(tensor.numel() for tensor in public[1].values() if tensor.dim() == 4)
        assert f"sparse {round(0.01 * convolutions)} of 77,562 parameters" in counts[0]


def test_a_sparse_run_goes_on_and_leaves_a_dense_model(
    public: tuple[Path, dict[str, torch.Tensor]], small: Small, run: Any, tmp_path: Path, interrupt_at: Any
) -> None:
    fields = {"model": "resnet8", "init": str(public[0]), "sparse": 0.02, "freeze": "1", "lr": 0.8, "lr_body": 0.05}
    config = small(**fields, seed=1, batch_size=50, epochs=0.1, schedule="cosine")
    whole = run(config, tmp_path / "whole")
    assert run(config, tmp_path / "broken", progress=interrupt_at(2)).stopped_by is not None
    again = run(config, tmp_path / "broken", resume=True, progress=Watcher())
    left = [load_file(result.folder.model) for result in (whole, again)]
    assert left[0].keys() == public[1].keys()
    for name, its in public[1].items():
        assert torch.equal(left[0][name], left[1][name])
        changed = (left[0][name] != its).sum()
        assert (changed == 0) == name.startswith(("0.", "1.")) or its.dim() == 4
    counts = {name: (left[0][name] != its).sum() for name, its in public[1].items() if its.dim() == 4}
    assert not any(count for name, count in counts.items() if name.startswith(("0.", "1.")))
    trained = sum(public[1][name].numel() for name in counts if not name.startswith(("0.", "1.")))
    assert sum(counts.values()) == round(0.02 * trained)
    assert whole.metrics["trained_parameters"] < 4000
    assert whole.metrics["init"] == str(public[0])
    assert 0 < json.loads(whole.folder.history.read_text().splitlines()[-1])["lr"] < 0.8  # the classifier's


def test_the_command_line(
    public: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(public[0].parent)
    words = ["train", "--model", "resnet8", "--epochs", "0.1", "--batch-size", "100", "--noise-multiplier", "2"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--init", public[0].name, "--sparse", "0.01", "--lr-body", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "trained: classifier 650, norm" in printed
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["init"] == str(public[0])
    for more, message in (
        (["--sparse", "0.01"], "--sparse must be given with init only"),
        (["--init", "other.pt"], "expected a file of weights"),
        (["--init", public[0].name, "--model", "linear"], "the weights do not fit the model: "),
        (["--freeze", "4"], "block_groups must be from 0 to 3, got 4"),
        (["--freeze", "conv1"], "no module or parameter 'conv1'"),
    ):
        assert main([*words[:-1], str(tmp_path / "other"), *more]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "other").exists()
