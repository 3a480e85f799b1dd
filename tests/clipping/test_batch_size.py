"""How many examples an ordinary loss sums up: what the model was called with tells, or the loss is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import deviation, one_example_loop
from tests.clipping.test_graph import BATCH, FEATURES, TIME, Net, data, head, losses_of, weight


class Positioned(nn.Module):
    """Takes positions before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TIME, FEATURES), head()

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.table(positions) + x).mean(1))
        return outputs


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("positions", [torch.arange(TIME), torch.arange(TIME)[None]])
def test_a_batch_is_not_counted_by_an_argument_without_one(positions: Tensor, reduction: str) -> None:
    """Positions in one row would make one example of the whole batch, which is clipped as one."""
    model, (x, y) = Positioned().double(), data()
    x = x.double()
    expected, _ = one_example_loop(model, lambda m, x, y: losses_of(Net(lambda _, x: m(positions, x)), x, y), x, y, 0.1)
    with GhostClipper(model, 0.1, loss_reduction=reduction) as clipper:
        F.cross_entropy(model(positions, x), y, reduction=reduction).backward()
        result = clipper.take()
    assert result.batch_size == BATCH
    assert deviation(result.grads, expected) < 1e-7


def test_a_part_of_a_model_called_alone_tells_its_batch_or_is_refused() -> None:
    """Instance norm merges examples and channels into one row, which is no batch of one."""
    norm, table, x = nn.InstanceNorm1d(FEATURES, affine=True), weight(4, FEATURES), torch.randn(BATCH, FEATURES, TIME)
    model = Net(lambda m, x: m.norm(x), norm=norm, table=table)
    model.table.requires_grad_(False)
    with GhostClipper(model, 0.1, loss_reduction="sum") as clipper:
        model.norm(x).square().sum().backward()
        assert clipper.take().batch_size == BATCH
        model.table.requires_grad_(True)
        with pytest.raises(RuntimeError, match="how many examples"):
            (model.norm(x).square().sum() + (torch.randn(TIME, 4) @ model.table).sum()).backward()
