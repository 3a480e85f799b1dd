"""Every class of the zoo, small: the engine's clipped gradients are those of a loop over single examples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from benchmarks.zoo.exactness import ROWS, exactness
from benchmarks.zoo.models import FULL, MODELS, SMALL, missing

#: Norms may only round up, so that what is clipped comes out smaller: most where convolutions' and long products' norms
#: are bounded and not computed. A wrong gradient is off by more than 1e-3.
TOLERANCE = 1e-6
CASES = [(name, rows) for name, model in MODELS.items() for rows in (ROWS, *model.examples.coincident)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower by many, and libraries' advice is not what is tested."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def require(name: str) -> None:
    if reason := missing(MODELS[name].library):
        pytest.skip(reason)


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_gradients_are_those_of_single_examples(name: str, rows: int) -> None:
    """Also where a batch has as many examples as an example has positions. Both doors: losses, and their mean."""
    require(name)
    found = exactness(MODELS[name], rows)
    assert 0 < found.clipped < rows
    assert found.deviation < TOLERANCE
    assert found.refusal is None
    assert found.ordinary_deviation is not None
    assert found.ordinary_deviation < TOLERANCE


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.library == "torch.nn"])
def test_in_float32(name: str) -> None:
    """torch computes recurrent layers by other operations there than in float64."""
    found = exactness(MODELS[name], dtype=torch.float32)
    assert found.deviation < 1e-3
    assert found.ordinary_deviation is not None
    assert found.ordinary_deviation < 1e-3


def test_a_small_model_is_of_the_same_kind() -> None:
    """The same class, every kind of parameter that the full size has, and a batch that the loss takes."""
    for name, model in MODELS.items():
        if model.library != "torch.nn":
            continue
        full, small = (model.make(size)[0] for size in (FULL, SMALL))
        assert type(full) is type(small), name
        assert {n for n, _ in small.named_parameters()} <= {n for n, _ in full.named_parameters()}, name


def test_models_are_the_same_at_every_call() -> None:
    model = MODELS["lstm"]
    (first, x, y), (second, other_x, other_y) = model.make(SMALL), model.make(SMALL)
    assert torch.equal(x, other_x)
    assert torch.equal(y, other_y)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)
