"""The page about rules holds: its rule is right, and without it the operation is handled slowly, with a warning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from dpkernels.layers import RULES, Rule, StoredRule, register
from tests.clipping.oracle import deviation, one_example_loop

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


@pytest.fixture
def rules() -> Iterator[list[Rule]]:
    before = list(RULES)
    yield RULES
    RULES[:] = before


class Model(nn.Module):
    def __init__(self, swing: Any) -> None:
        super().__init__()
        self.swing, self.scale, self.head = swing, nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.swing(x, self.scale).mean(1))
        return outputs


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize(("batch", "time"), [(4, 3), (3, 3), (1, 2)])
def test_the_rule_of_the_page(rules: list[Rule], batch: int, time: int) -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    assert type(rules[0]).__name__ == "SwingRule"
    model = Model(names["Swing"].apply).double()
    x, y = torch.randn(batch, time, 5).double(), torch.arange(batch) % 3
    expected, _ = one_example_loop(model, losses_of, x, y, 0.1)
    with GhostClipper(model, 0.1) as clipper:
        assert deviation(clipper.backward(losses_of(model, x, y)).grads, expected) < 1e-10
        (plan,) = clipper._plans.values()
    assert any(use.rule is rules[0] for use in plan.uses)
    rules.pop(0)
    with GhostClipper(model, 0.1) as clipper:
        if batch > 1:
            with pytest.warns(UserWarning, match=r"no rule for parameters of Swing"):
                slowly = clipper.backward(losses_of(model, x, y))
        else:
            slowly = clipper.backward(losses_of(model, x, y))
    assert deviation(slowly.grads, expected) < 1e-10


def test_what_is_no_rule(rules: list[Rule]) -> None:
    with pytest.raises(TypeError, match=r"instance of a dpkernels\.layers\.Rule"):
        register(type(rules[0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"StoredRule\.nodes is empty"):
        register(StoredRule())
