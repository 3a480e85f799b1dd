"""The loss that a configuration names is the one that the loop minimizes, also after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dpkernels import losses, models
from dpkernels.training import TrainConfig
from dpkernels.training.config import LOSSES
from dpkernels.training.objective import Objective, decayed_groups


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_what_its_name_says(loss: str, small: Callable[..., TrainConfig]) -> None:
    torch.manual_seed(0)
    model = models.create("simple_vgg", (1, 16, 16), 10)
    x, y = torch.rand(3, 1, 16, 16), torch.tensor([1, 5, 9])
    own = {"loss_threshold_epoch": 2.0, "loss_beta": 0.3, "loss_gamma": 3.0}
    config = small(loss=loss, **{name: own[name] for name in LOSSES[loss]})
    h = model(x)
    alpha = float(torch.sigmoid(torch.tensor(-1.0)))
    sse, focal = losses.sum_squared_error(h, y), losses.focal(h, y, 3.0)
    cross_entropy = F.cross_entropy(h, y, reduction="none")
    wanted = {
        "cross-entropy": cross_entropy,
        "losing-less": losses.LosingLess(model, 2, 0.3, 3)(x, y, 1),
        "losing-less-weights": alpha * focal + (1 - alpha) * sse,
        "sse-focal": alpha * focal + (1 - alpha) * sse,
        "sse-cross-entropy": alpha * cross_entropy + (1 - alpha) * sse,
        "focal": focal,
        "sse": sse,
        "sae": losses.sum_absolute_error(h, y),
        "huber": losses.huber(h, y, 0.3),
    }
    torch.testing.assert_close(Objective(config, model)(x, y, epoch=1), wanted[loss])


def test_the_penalty_on_weights_reaches_the_optimizer(small: Callable[..., TrainConfig]) -> None:
    model = models.create("simple_vgg", (1, 16, 16), 10)
    config = small(loss="losing-less-weights", loss_threshold_epoch=2.0, loss_beta=0.3)
    optimizer = torch.optim.SGD(decayed_groups(config, model), lr=0.1)
    Objective(config, model).set_weight_decay(optimizer, epoch=2)
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in [group["name"]]}
    for name, p in model.named_parameters():
        assert decays[name] == (pytest.approx(1 / (0.3 * p.numel())) if name.endswith("weight") else 0)
    assert decayed_groups(small(), model) is None


def test_a_stopped_run_goes_on_with_its_loss(
    small: Callable[..., TrainConfig],
    run: Callable[..., Any],
    interrupt_at: Callable[[int], Any],
    tmp_path: Path,
) -> None:
    loss = "losing-less-weights"  # the one that changes the optimizer as epochs go by
    config = small(seed=1, loss=loss, epochs=2.0, loss_threshold_epoch=0.0, loss_beta=0.1)
    whole = run(config, tmp_path / "whole")
    stopped = run(config, tmp_path / "parts", progress=interrupt_at(4))
    assert not stopped.metrics["complete"]
    resumed = run(config, tmp_path / "parts", resume=True)
    states = [torch.load(r.folder.checkpoint, weights_only=True)["model"] for r in (whole, resumed)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert resumed.metrics["loss"] == loss
