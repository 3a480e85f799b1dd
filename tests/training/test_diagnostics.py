"""Diagnostics tell what an ordinary loop over the examples would, change nothing of the run, and say what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkernels import models
from dpkernels.losses import LosingLess
from dpkernels.training import TrainConfig
from dpkernels.training.diagnostics import WARNING, take_snapshot
from tests.clipping.oracle import one_example_loop


def test_a_snapshot_is_what_single_examples_show(small: Callable[..., TrainConfig]) -> None:
    torch.manual_seed(0)
    model = models.mnist_cnn()
    x, y = torch.rand(5, 1, 28, 28), torch.arange(5)
    config = small(loss="losing-less", loss_threshold_epoch=1.0, loss_beta=0.1, max_grad_norm=2.0)
    before = torch.get_rng_state()
    snapshot = take_snapshot(config, model, x, y, step=7, epoch=1.5)
    assert torch.equal(torch.get_rng_state(), before)

    def loss(network: Any, inputs: Any, labels: Any) -> Any:
        return LosingLess(network, 1, 0.1, 5)(inputs, labels, epoch=1)

    clipped, norms = one_example_loop(model, loss, x, y, 2.0)
    whole, _ = one_example_loop(model, loss, x, y, 1e9)
    assert snapshot.gradient_norms == pytest.approx(norms.tolist(), rel=1e-4)
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (clipped, whole)]
    assert snapshot.cosine == pytest.approx(float(torch.cosine_similarity(*flat, dim=0)), rel=1e-5)
    logits = model(x).norm(dim=1).mean().item()
    last, first = list(snapshot.output_norms)[-1], next(iter(snapshot.output_norms))
    assert snapshot.output_norms[last] == pytest.approx(logits, rel=1e-5)
    assert snapshot.output_norms[first] == pytest.approx(model[0](x).flatten(1).norm(dim=1).mean().item(), rel=1e-5)
    assert snapshot.weight_norms[first] == pytest.approx(model[0].weight.norm().item(), rel=1e-5)
    assert (snapshot.step, snapshot.epoch) == (7, 1.5)


def test_a_run_leaves_them_only_where_it_is_asked_to(
    small: Callable[..., TrainConfig], run: Callable[..., Any], interrupt_at: Callable[[int], Any], tmp_path: Path
) -> None:
    config = small(seed=1)
    plain = run(config, tmp_path / "plain")
    assert not list(plain.folder.path.glob("diagnostics*"))
    stopped = run(config, tmp_path / "asked", diagnostics=True, progress=interrupt_at(7))
    assert not stopped.metrics["complete"]
    asked = run(None, tmp_path / "asked", resume=True, diagnostics=True)
    first, second = (torch.load(r.folder.checkpoint, weights_only=True)["model"] for r in (plain, asked))
    assert all(torch.equal(first[name], second[name]) for name in first)

    document = json.loads(asked.folder.diagnostics.read_text())
    assert document["warning"] == WARNING
    assert [snapshot["step"] for snapshot in document["snapshots"]] == [0, 3, 6, 9, 12]
    assert len(document["snapshots"][0]["gradient_norms"]) == document["examples"] == 256
    for path in (asked.folder.diagnostics, asked.folder.diagnostics_plot):
        assert "PRIVATE" in path.name
        assert path.stat().st_mode & 0o077 == 0
        assert path.stat().st_size > 1000


def test_what_is_not_finite_does_not_end_a_run(small: Callable[..., TrainConfig]) -> None:
    model = models.create("linear", (1, 8, 8), 10)
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))
    snapshot = take_snapshot(small(), model, torch.rand(3, 1, 8, 8), torch.arange(3), step=0, epoch=0.0)
    assert snapshot.cosine is None
    assert snapshot.gradient_norms == []
    assert set(snapshot.weight_norms.values()) == {None}
