"""What is explained is what the engine does: every layer, and in each the way that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.bench import MODELS, choices, explain
from dpkernels.bench.choices import LayerChoice, Way
from dpkernels.layers import STORED, conv


def test_every_trainable_layer_is_explained() -> None:
    rows = list(explain("mnist_cnn", batch=3, seconds=0.0))
    parameters = [name for name, _ in MODELS["mnist_cnn"].build().named_parameters()]
    assert [row.layer for row in rows] == list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    assert [row.type for row in rows] == ["Conv2d", "Conv2d", "Linear", "Linear"]
    assert rows[0].input_shape == (1, 28, 28)
    assert rows[-1].output_shape == (1, 10)  # positions and outputs
    for row in rows:
        assert row.chosen in row.ways
        assert all(way.ms > 0 for way in row.ways.values())
    assert set(rows[0].ways) == {"stored", "direct", "gram"}
    predicted = {name: way.predicted for name, way in rows[0].ways.items()}
    assert min(predicted, key=lambda name: predicted[name] or 0) == rows[0].chosen
    assert predicted[rows[0].chosen] == 1


@pytest.mark.parametrize(("model", "taken"), [("mnist_cnn", {"stored"}), ("cifar10_cnn", {"stored", "gram"})])
def test_a_convolution_takes_the_way_that_is_explained(
    model: str, taken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's norms have the bits of the chosen way, and gradients are kept where that stores them."""
    norms: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = conv.conv_squared_norms
    engine: list[tuple[Tensor, bool]] = []

    def spy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = norms(*args, **kwargs)
        engine.append((result[0], result[1] is not None))
        return result

    monkeypatch.setattr(conv, "conv_squared_norms", spy)
    seen = choices.records(model, 2)
    monkeypatch.undo()
    explained = [choices.ways(s.record)[:2] for s in seen if isinstance(s.record.rule, conv.ConvRule)]
    assert {chosen for chosen, _ in explained} == taken
    assert len(explained) == len(engine)
    for (chosen, runs), (squared, stored) in zip(explained, reversed(engine), strict=True):
        assert stored == (chosen == "stored")
        assert torch.equal(runs[chosen](), squared)
        if chosen == "gram":
            assert not torch.equal(runs["direct"](), squared)


def test_other_layers_have_one_way() -> None:
    seen = choices.records("resnet18", 1)
    names = {name for name, _ in MODELS["resnet18"].build().named_parameters()}
    assert {name for s in seen for name in s.parameters.values()} == names
    record = next(s.record for s in seen if s.record.rule is STORED)
    chosen, runs, _ = choices.ways(record)
    assert (chosen, set(runs)) == ("only", {"only"})
    assert torch.equal(runs["only"](), runs["only"]())  # a run consumes a copy of the record


def layer(name: str, chosen: str, **ways: tuple[float, float]) -> LayerChoice:
    return LayerChoice(name, "Conv2d", (1, 4, 4), (2, 3, 3), chosen, {k: Way(*figures) for k, figures in ways.items()})


def test_marks_and_sums() -> None:
    good = layer("good", "stored", stored=(1.1, 1.0), direct=(1.0, 2.0))  # 10% slower: within the tolerance
    bad = layer("bad", "gram", stored=(2.0, 1.5), gram=(3.0, 1.0))
    large = layer("large", "direct", stored=(4.0, 1.0), direct=(4.0, 1.7))
    assert [(c.fastest, c.slow, c.memory_spared) for c in (good, bad, large)] == [
        ("direct", False, False),
        ("stored", True, False),
        ("stored", False, True),
    ]
    assert "lost" not in choices.line(good)
    assert choices.line(bad).endswith("*gram    3.000 (1.00)  <- stored is faster: 50% lost")
    assert choices.line(large).endswith("(stored would take too much memory)")
    assert "1x4x4 -> 2x3x3" in choices.line(good)
    assert choices.total([good, bad, large]) == (
        "chosen 8.10 ms, best 7.00 ms: 15.7% lost; 1 of 3 layers by more than 15%"
    )
    document = choices.as_json([good, bad])
    assert (document["chosen_ms"], document["best_ms"]) == (pytest.approx(4.1), 3.0)
    assert document["layers"][1]["slow"]
    assert document["layers"][1]["ways"]["gram"] == {"ms": 3.0, "predicted": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "nowhere"}, "explain must be of mnist_cnn, .*, got nowhere"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"seconds": -1.0}, "seconds must be at least 0, got -1.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(**{"model": "mnist_cnn", **arguments})
