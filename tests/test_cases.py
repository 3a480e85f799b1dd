"""What went wrong elsewhere: inputs with known answers, from the model through the private optimizer and the loader.

Each of these stands for its kind. Where a room's own test has the answer already, it is not repeated here:

    what mixes examples is refused by module path, with the fix            tests/layers, tests/clipping/test_engine.py
    checkpointing, copies, torch.compile                                   tests/clipping/test_engine.py
    freezing and unfreezing between steps                                  tests/optim/test_private.py
    a second backward on a batch, a batch without a backward               tests/optim/test_private.py
    the same rate whatever the length of the data set                      tests/data/test_loader.py
    positions that cancel, products of huge and tiny numbers               tests/ops/test_linear.py
    published and hand-checked values of epsilon                           tests/accounting/test_published.py
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpkernels as dpk
from benchmarks.correctness import CASES, Case, Refused, step_deviation
from dpkernels.clipping import check
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

CLASSES = 3


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plan(**changes: object) -> dpk.Plan:
    values = {"dataset_size": 8, "batch_size": 8, "steps": 3, "delta": 1e-5, "noise_multiplier": 1.0} | changes
    return dpk.plan(**values, accountant="rdp")  # type: ignore[arg-type]


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    the_plan: dpk.Plan,
    *,
    physical: int | None = None,
    steps: int | None = None,
    start_step: int = 0,
    way: str = "losses",
    state: dict | None = None,
    **options: object,
) -> dpk.DPSGD:
    """The documented loop, by one loss per example or by the ordinary mean."""
    optimizer = dpk.DPSGD(model, the_plan, **{"lr": 0.5, "max_grad_norm": 0.3, "seed": 1} | options)  # type: ignore[arg-type]
    if state is not None:
        optimizer.load_state_dict(state)
    loader = dpk.PoissonLoader(
        data, the_plan, optimizer=optimizer, physical_batch_size=physical, steps=steps, start_step=start_step
    )
    for x, y in loader:
        if way == "losses":
            optimizer.backward(cross_entropy(model, x, y))
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.clipper.detach()
    return optimizer


# ---- layers: the list of benchmarks.correctness, and what it does not show -------------------------------------------


class Positions(nn.Module):
    """A linear layer over the channels of a map, [batch, height, width, channels]."""

    def __init__(self, flatten: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head, self.flatten = nn.Linear(5, 4), nn.Linear(4, CLASSES), flatten

    def forward(self, x: Tensor) -> Tensor:
        if self.flatten:
            x = x.flatten(1, 2)
        return self.head(self.inner(x).tanh().flatten(1, -2).sum(1))


def headed(*layers: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_right_or_refused(case: Case) -> None:
    if case.refuse:
        with pytest.raises((Refused, RuntimeError)):
            step_deviation(case, "dpkernels")
    elif case.autocast:
        assert step_deviation(case, "dpkernels") < 0.05
    else:  # norms of positions that cancel carry a term for what that may round elsewhere
        limit = 0.01 if case.name == "positions that cancel" else 1e-8
        assert step_deviation(case, "dpkernels", torch.float64) < limit


def test_the_norm_of_a_grouped_convolution_is_that_of_its_small_weight() -> None:
    for groups in (2, 4):
        model, x = nn.Conv2d(4, 8, 3, groups=groups, bias=False).double(), torch.randn(3, 4, 6, 6).double()
        with dpk.GhostClipper(model, 1.0) as clipper:
            result = clipper.backward(model(x).square().flatten(1).sum(1))
        for i in range(3):
            (gradient,) = torch.autograd.grad(model(x[i : i + 1]).square().sum(), model.weight)
            assert gradient.shape == (8, 4 // groups, 3, 3)
            torch.testing.assert_close(result.norms[i], gradient.norm(), rtol=1e-9, atol=0)


def test_linear_on_4d_input_equals_flattening_the_middle() -> None:
    x, y = torch.randn(6, 2, 3, 5), torch.randint(0, CLASSES, (6,))
    results = []
    for model in (Positions(), Positions(flatten=True)):
        with dpk.GhostClipper(model, 0.5) as clipper:
            results.append(clipper.backward(cross_entropy(model, x, y)))
    assert torch.equal(results[0].norms, results[1].norms)
    assert deviation(results[0].grads, results[1].grads) == 0


def test_the_norm_of_a_bias_is_that_of_the_summed_output_gradient() -> None:
    """Five positions: neither of each position alone, nor of their Gram matrix."""
    model, x, probe = nn.Linear(4, 3), torch.randn(6, 5, 4), torch.randn(6, 5, 3)
    model.weight.requires_grad_(False)
    with dpk.GhostClipper(model, 1.0) as clipper:
        result = clipper.backward((model(x) * probe).sum((1, 2)))
    torch.testing.assert_close(result.norms, probe.double().sum(1).norm(dim=1))


@pytest.mark.parametrize("trainable", ["weight", "bias"])
def test_a_layer_of_which_one_parameter_trains(trainable: str) -> None:
    model = headed(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), features=36).double()
    for name, p in model.named_parameters():
        p.requires_grad_(trainable in name)
    x, y = torch.randn(6, 3, 5, 5).double(), torch.randint(0, CLASSES, (6,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.5)
    before = copy.deepcopy(model)
    optimizer = dpk.DPSGD(model, lr=1.0, noise_multiplier=0.0, batch_size=1, max_grad_norm=0.5)
    optimizer.backward(cross_entropy(model, x, y))
    optimizer.step()
    moved = {k: p - q for (k, p), q in zip(before.named_parameters(), model.parameters(), strict=True)}
    assert deviation({k: moved[k].detach() for k in expected}, expected) < 1e-9
    assert all(not moved[k].any() for k in moved.keys() - expected.keys())


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entry", [1e-5, 300.0])
def test_half_precision_gradients_whose_squares_leave_its_range(dtype: torch.dtype, entry: float) -> None:
    model = nn.Linear(64, 32).to(dtype)
    x, probe = torch.ones(4, 64, dtype=dtype), torch.full((4, 32), entry).to(dtype)
    norm = float(probe[0, 0]) * math.sqrt(64 * 32 + 32)  # every entry of weight and bias is `entry`
    for bound in (norm / 10, norm * 10):
        with dpk.GhostClipper(model, bound) as clipper:
            result = clipper.backward((model(x).float() * probe.float()).sum(1))
        torch.testing.assert_close(result.norms, torch.full((4,), norm, dtype=torch.float64), rtol=1e-5, atol=0)
        size = math.hypot(*(float(g.norm()) for g in result.grads.values()))
        assert size == pytest.approx(4 * min(norm, bound), rel=1e-5)


def test_three_positions_that_nearly_cancel() -> None:
    """The true norm is 0.01, and the Gram matrix of the positions has entries of 1e4."""
    model = nn.Linear(40, 40, bias=False)
    a, g = F.normalize(torch.randn(1, 40), dim=1) * 10, F.normalize(torch.randn(1, 40), dim=1) * 10
    x = torch.stack([a, a, a], 1)
    probe = torch.stack([g, -0.5 * g, -0.5 * g * (1 + 2e-4)], 1)
    exact = torch.einsum("btd,btp->dp", probe.double(), x.double())
    assert float(exact.norm()) == pytest.approx(0.01, rel=0.01)
    with dpk.GhostClipper(model, 1e-3) as clipper:
        result = clipper.backward((model(x) * probe).sum((1, 2)))
    assert float(result.norms) == pytest.approx(float(exact.norm()), rel=0.01)
    assert float(result.grads["weight"].norm()) <= 1e-3


@pytest.mark.parametrize(
    ("activation", "gradient", "norm"), [(1e25, 1e-25, 1.0), (1e-13, 1e-12, 1e-25), (1e20, 1e18, 1e38)]
)
def test_products_of_huge_and_tiny_numbers(activation: float, gradient: float, norm: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    with dpk.GhostClipper(model, 1e-3) as clipper:
        result = clipper.backward(model(torch.full((2, 1), activation)).squeeze(1) * gradient)
    torch.testing.assert_close(result.norms, torch.full((2,), norm, dtype=torch.float64), rtol=1e-5, atol=0)
    assert float(result.grads["weight"]) == pytest.approx(2 * min(norm, 1e-3), rel=1e-5)


# ---- batches ---------------------------------------------------------------------------------------------------------


def images(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, *shape, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def small_net() -> nn.Module:
    torch.manual_seed(2)
    return headed(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), features=36)


@pytest.mark.parametrize("way", ["losses", "mean"])
def test_physical_batches_of_any_size_give_one_update(way: str) -> None:
    """Eight examples at rate 1: whole, 4 + 4, 3 + 3 + 2 and 8 x 1."""
    data, results = images(8, 1, 5, 5), []
    for physical in (None, 4, 3, 1):
        model = small_net()
        optimizer = train(model, data, plan(), physical=physical, way=way)
        assert optimizer.steps == 3
        results.append(flat(model))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_an_empty_batch_is_noise_alone_and_is_accounted() -> None:
    """Two examples at rate 1/2: about a quarter of the batches are empty."""
    the_plan = plan(dataset_size=2, batch_size=1, steps=24, noise_multiplier=2.0)
    model = nn.Linear(60, CLASSES)
    x, y = images(2, 60)
    optimizer = dpk.DPSGD(model, the_plan, lr=1.0, max_grad_norm=0.5, seed=1)
    noise = []
    for xs, ys in dpk.PoissonLoader((x, y), the_plan, optimizer=optimizer):
        before = flat(model)
        losses = cross_entropy(model, xs, ys)
        optimizer.backward(losses)
        optimizer.step()
        if len(xs) == 0:
            noise.append(flat(model) - before)
    assert 2 <= len(noise) <= 12
    values = torch.cat(noise).double()
    assert float(values.std()) == pytest.approx(2.0 * 0.5 / 1, rel=5 / math.sqrt(2 * len(values)))
    assert abs(float(values.mean())) < 5 / math.sqrt(len(values))
    assert optimizer.epsilon() == pytest.approx(
        dpk.epsilon(noise_multiplier=2.0, sampling_rate=0.5, steps=24, delta=1e-5), rel=1e-6
    )


def test_data_sets_that_differ_by_an_example_are_treated_alike() -> None:
    """Ten examples and nine: rate 0.4 and denominator 4 for both. A step that draws the tenth differs by at most the
    bound over 4, the others do not differ."""
    the_plan = plan(dataset_size=10, batch_size=4, steps=8)
    assert (the_plan.sampling_rate, the_plan.batch_size) == (0.4, 4)
    x, y = images(10, 1, 5, 5)
    models = [small_net(), small_net()]
    optimizers = [dpk.DPSGD(model, the_plan, lr=1.0, max_grad_norm=0.3, seed=1) for model in models]
    loaders = [
        dpk.PoissonLoader((x[:size], y[:size]), the_plan, optimizer=optimizer)
        for size, optimizer in zip((10, 9), optimizers, strict=True)
    ]
    parted = 0
    for batches in itertools.islice(zip(*loaders, strict=True), the_plan.steps):
        before = [flat(model) for model in models]
        for model, optimizer, (xs, ys) in zip(models, optimizers, batches, strict=True):
            optimizer.backward(cross_entropy(model, xs, ys))
            optimizer.step()
        moves = [flat(model) - was for model, was in zip(models, before, strict=True)]
        difference = float((moves[0] - moves[1]).double().norm())
        if len(batches[0][0]) == len(batches[1][0]):
            assert difference < 1e-5
        else:
            parted += 1
            assert 0.01 < difference <= optimizers[0].clipper.l2_bound / 4 * 1.001
            models[0].load_state_dict(models[1].state_dict())  # compare step by step
    assert parted >= 1


def test_training_in_two_parts_ends_where_one_run_does() -> None:
    """50 + 50 steps with a save and a load between: the epsilon of 100, and in a seeded run the same parameters."""
    data, the_plan = images(12, 1, 5, 5), plan(dataset_size=12, batch_size=4, steps=100)
    straight = small_net()
    one = train(straight, data, the_plan, physical=3, momentum=0.9)
    first = small_net()
    half = train(first, data, the_plan, physical=3, momentum=0.9, steps=50)
    second = small_net()
    second.load_state_dict(first.state_dict())
    rest = train(second, data, the_plan, physical=3, momentum=0.9, start_step=50, state=half.state_dict())
    assert rest.epsilon() == one.epsilon() > half.epsilon()
    assert torch.equal(flat(second), flat(straight))


def test_an_input_that_merges_the_batch_with_positions_is_clipped_by_example() -> None:
    """[batch * positions, channels] everywhere, up to the losses: only the loader knows how many examples there are."""
    the_plan = plan(dataset_size=8, batch_size=8)
    model = nn.Linear(5, CLASSES)
    optimizer = dpk.DPSGD(model, the_plan, lr=0.1, max_grad_norm=1.0)
    x, _ = images(8, 4, 5)
    ((batch, *_),) = itertools.islice(dpk.PoissonLoader((x,), the_plan, optimizer=optimizer), 1)
    labels = torch.zeros(32, dtype=torch.long)
    with pytest.raises(ValueError, match="losses must have one entry for each of 8 examples, got 32"):
        optimizer.backward(cross_entropy(model, batch.flatten(0, 1), labels))
    by_example = lambda m, a, b: cross_entropy(m, a[0], b[0]).mean().view(1)  # noqa: E731
    expected, norms = one_example_loop(model, by_example, batch, labels.view(8, 4), 1.0)
    F.cross_entropy(model(batch.flatten(0, 1)), labels).backward()
    result = optimizer.clipper.take()
    assert deviation(result.grads, expected) < 1e-5
    torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=0)


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_class_weights_are_exact_per_example_and_their_mean_is_no_loss_per_example() -> None:
    """The mean of a weighted cross entropy divides by the weights of the whole batch: an example's label would change
    the others' gradients. ``check`` tells where a loss does so."""
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
    model, x, y = (
        headed(nn.Linear(4, 5), features=5).double(),
        torch.randn(6, 4).double(),
        torch.tensor([0, 1, 2, 2, 1, 0]),
    )

    def weighted(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y, weight, reduction="none")

    expected, _ = one_example_loop(model, weighted, x, y, 0.3)
    with dpk.GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(weighted(model, x, y)).grads, expected) < 1e-9
        with pytest.raises(ValueError, match=r"losses must be \[batch\], one loss per example"):
            clipper.backward(F.cross_entropy(model(x), y, weight))

    def divided_by_the_weights_of_the_batch(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, weight, reduction="none") / weight[y].sum()

    assert not check(model, divided_by_the_weights_of_the_batch, x, y, max_grad_norm=10.0).ok
    assert check(model, lambda output, y: F.cross_entropy(output, y, weight, reduction="none"), x, y).ok
