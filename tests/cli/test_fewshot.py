"""`dpkernels fewshot` from arguments to what is printed and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dpkernels.cli import main

WORDS = ["fewshot", "--dataset", "digits", "--model", "linear", "--shots", "10", "--trials", "3", "--seed", "1"]


def test_a_few_tasks_of_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "few.json"
    assert main([*WORDS, "--steps", "5", "--noise-multiplier", "1", "--lr", "4", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert f"accuracy       {written['mean']:.2%} ± {written['interval']:.2%} (3 trials), 5-way 10-shot" in printed
    assert "at delta 1e-05 for the 50 examples of each task" in printed
    assert "NOT PRIVATE" in printed
    assert written["mean"] > 0.6
    assert written["config"]["dataset_size"] == 50


def test_photographs_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "test"):
        for label in ("left", "top", "bottom"):
            folder = tmp_path / "photographs" / split / label
            folder.mkdir(parents=True)
            for index in range(8):
                height, width = 20 + index, 30 - index
                pixels = torch.randint(0, 60, (height, width, 3), generator=generator, dtype=torch.uint8)
                half = {"left": pixels[:, : width // 2], "top": pixels[: height // 2], "bottom": pixels[height // 2 :]}
                half[label] += 150
                Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")
    task = ["--model", "linear", "--ways", "2", "--shots", "4", "--queries", "4", "--trials", "3", "--seed", "1"]
    words = ["fewshot", "--dataset", str(tmp_path / "photographs"), "--noise-multiplier", "0.1", *task]
    assert main([*words, "--image-size", "8", "--lr", "0.1", "--steps", "30"]) == 0
    accuracy = float(capsys.readouterr().out.split()[1].rstrip("%"))
    assert accuracy > 90
    assert main(words) == 2  # without a size they have none in common


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ways", "11"], "--ways must be at most the number of classes"),
        (["--sparse", "0.01"], "--sparse must be given with init only"),
        (["--init", "none.pt"], "expected a file of weights"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_readable_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--noise-multiplier", "1", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
