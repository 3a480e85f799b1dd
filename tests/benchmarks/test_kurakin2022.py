"""The paper's numbers of privacy, and the study of network sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.papers.kurakin2022 import procedure
from benchmarks.papers.kurakin2022.__main__ import PAPER
from benchmarks.papers.kurakin2022.accounting import PRINTED, Printed
from benchmarks.papers.kurakin2022.data import halved
from dpkernels.data import ImageDataset, ImageSplit
from dpkernels.models import create
from dpkernels.training import resolve

SLOW = 0.1  # noise multipliers below it take seconds


@pytest.mark.parametrize("row", [row for row in PRINTED if row.noise_multiplier > SLOW], ids=str)
def test_epsilons_that_the_paper_prints(row: Printed) -> None:
    assert row.agrees(row.by_its_function())
    assert row.ours("rdp").upper <= row.by_its_function() * (1 + 1e-9)  # all real orders, and so never more
    assert row.ours("rdp-classic").upper < 1.25 * float(row.epsilon)


@pytest.mark.parametrize("row", PRINTED[-3:], ids=str)
def test_tight_accounting_gives_less(row: Printed) -> None:
    assert 0.85 * float(row.epsilon) < row.ours("pld").upper < 0.94 * float(row.epsilon)


def test_every_row_is_a_configuration_whose_model_fits() -> None:
    split = ImageSplit(torch.zeros(10, 3, 16, 16, dtype=torch.uint8), torch.arange(10))
    for make in PAPER.experiments.values():
        rows = make()
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            data = ImageDataset(row.fields["dataset"], tuple("0123456789"), split, split)
            config = resolve(data, row.fields)
            assert create(config.model, (3, 16, 16), 10)(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


def test_images_are_halved() -> None:
    image = torch.tensor([[[[0, 4, 255, 255], [8, 4, 255, 253]]]], dtype=torch.uint8)
    assert halved(image).tolist() == [[[[4, 254]]]]  # of 254.5, the even one


@pytest.mark.parametrize("public", [False, True])
def test_the_procedure_finds_the_smallest_norm_that_costs_little(
    public: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(procedure, "AROUND", (1.0,))
    words = ["--epochs", "2", "--batch-size", "128", "--epsilon", "3", "--scale", "3", "--out", str(tmp_path)]
    words += ["--rates", "1e-4", "3", "--norms", "1000", "1", "0.001", "--tolerance", "0.05"]
    procedure.main([*words, *(["--public"] if public else [])])
    lines = capsys.readouterr().out.splitlines()
    left = json.loads((tmp_path / "procedure.json").read_text())
    assert [trial["stage"] for trial in left["trials"]] == [1, 1, 2, 2, 2, 3]
    assert (left["lr"], left["max_grad_norm"]) == (3.0, 1.0)
    one, two = left["trials"][1:3]
    assert (one["max_grad_norm"], one["noise_multiplier"]) == (str(math.inf), 0.0)
    assert one["accuracy"] == two["accuracy"] > 0.8  # a norm that no gradient reaches clips nothing
    assert left["trials"][4]["accuracy"] < one["accuracy"] - 0.05
    run = json.loads((tmp_path / "stage3-lr3-norm1" / "config.json").read_text())["config"]
    assert (run["batch_size"], run["epochs"]) == (384, 6.0)
    assert ("NOT PRIVATE" in left["statement"]) is not public
    assert all("NOT PRIVATE" in line for line in lines) is not public
