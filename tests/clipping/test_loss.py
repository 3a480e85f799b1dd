"""The ordinary loop: plain means and sums are taken, whatever would couple the examples is refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkernels import GhostClipper
from tests.clipping.oracle import deviation, one_example_loop

CLASSES, ROWS = 3, 6
WEIGHTS = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 2, 1, 0])

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [B, 3], labels [B] -> scalar


def per_example(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "of losses": lambda z, y: per_example(z, y).mean(),
    "over dimension 0": lambda z, y: per_example(z, y).mean(0),
    "sum divided by a number": lambda z, y: per_example(z, y).sum() / len(y),
    "in steps of accumulation": lambda z, y: F.cross_entropy(z, y) / 4 * 2.0,
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, CLASSES).to(z.dtype), weight=WEIGHTS),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).to(z.dtype), WEIGHTS),
    "margins": lambda z, y: F.multi_margin_loss(z, y, weight=WEIGHTS),
    "kl divergence": lambda z, y: F.kl_div(z.log_softmax(1), F.one_hot(y, CLASSES).to(z.dtype), reduction="batchmean"),
    "two losses": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean() - 1.0,
    "another type": lambda z, y: F.cross_entropy(z, y).to(torch.float32).squeeze().clone(),
    "weights of their own": lambda z, y: (WEIGHTS[y] * per_example(z, y)).mean(),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "class weights": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, reduction="sum"),
    "ignored labels": lambda z, y: F.cross_entropy(z, y, ignore_index=1, reduction="sum"),
    "divided by the expected batch": lambda z, y: per_example(z, y).sum() / 512,
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype), reduction="sum"),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "class weights": (lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS), "class weights"),
    "ignored labels": (lambda z, y: F.cross_entropy(z, y, ignore_index=1), r"ignored labels \(1\)"),
    "ignored by default": (lambda z, y: F.cross_entropy(z, y.where(y > 0, -100)), r"ignored labels \(-100\)"),
    "smoothed with weights": (lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, label_smoothing=0.1), "weights"),
    "of pixels": (
        lambda z, y: F.cross_entropy(z[:, :, None, None], y[:, None, None], weight=WEIGHTS),
        "class weights",
    ),
    "by hand": (lambda z, y: (WEIGHTS[y] * per_example(z, y)).sum() / WEIGHTS[y].sum(), "divided by a tensor"),
    "by a weighted sum's number": (
        lambda z, y: (WEIGHTS[y] * per_example(z, y)).sum() / (WEIGHTS[y].sum().item() + 0.5),
        "divided by 6.5",
    ),
    "by a product": (lambda z, y: torch.dot(WEIGHTS[y] / WEIGHTS[y].sum(), per_example(z, y)), "Dot"),
    "scaled by a tensor": (lambda z, y: F.cross_entropy(z, y) * WEIGHTS[y].mean(), "multiplied by a tensor"),
    "squared": (lambda z, y: F.cross_entropy(z, y) * F.cross_entropy(z, y), "multiplied by a tensor"),
    "of some": (lambda z, y: per_example(z, y)[y != 1].mean(), "divided by 4"),
    "root of a mean": (lambda z, y: z.square().mean().sqrt(), "Sqrt"),
    "norm": (lambda z, y: z.norm(), "Norm"),
    "largest": (lambda z, y: per_example(z, y).max(), "Max"),
    "median": (lambda z, y: per_example(z, y).median(), "Median"),
    "softened largest": (lambda z, y: per_example(z, y).logsumexp(0), "Logsumexp"),
    "power of a mean": (lambda z, y: F.cross_entropy(z, y).pow(2), "Pow"),
    "picked from a mean": (lambda z, y: per_example(z, y).mean(0, keepdim=True)[0], "Select"),
    "by einsum": (
        lambda z, y: torch.einsum("i,i->", per_example(z, y), WEIGHTS[y] / WEIGHTS[y].sum()),
        "must be a scalar reduced over",
    ),
    "scaled in half precision": (lambda z, y: F.cross_entropy(z, y) * WEIGHTS[y].mean().half(), "by a tensor"),
    "scaled by a whole number": (lambda z, y: F.cross_entropy(z, y) * y.sum().to(torch.int8), "by a tensor"),
    "if true of the batch": (lambda z, y: F.cross_entropy(z, y) * (y.sum() > 3), "by a tensor"),
    "by a count": (lambda z, y: per_example(z, y)[y != 1].sum() / (y != 1).sum(), "divided by 4"),
    "sum": (SUMS["cross entropy"], "divided by nothing.*loss_reduction='sum'"),
    "half of it a sum": (lambda z, y: F.cross_entropy(z, y) + z.square().sum(), "divided by nothing"),
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MEANS)
def test_means_are_those_of_single_examples(name: str, model: nn.Module, x: Tensor) -> None:
    # A plain mean over a batch of one is the example's own loss.
    single = lambda m, a, b: MEANS[name](m(a), b).reshape(1)  # noqa: E731
    expected, _ = one_example_loop(model, single, x, Y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        MEANS[name](model(x), Y).backward()
        assert deviation(clipper.take().grads, expected) < (1e-6 if name == "another type" else 1e-9)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_those_of_single_examples(name: str, model: nn.Module, x: Tensor) -> None:
    single = lambda m, a, b: SUMS[name](m(a), b).reshape(1)  # noqa: E731
    expected, _ = one_example_loop(model, single, x, Y, 1e-3)
    with GhostClipper(model, 1e-3, loss_reduction="sum") as clipper:
        SUMS[name](model(x), Y).backward()
        assert deviation(clipper.take().grads, expected) < 1e-9


@pytest.mark.parametrize("name", REFUSED)
def test_what_couples_examples_is_refused_and_leaves_nothing(name: str, model: nn.Module, x: Tensor) -> None:
    loss, message = REFUSED[name]
    with GhostClipper(model, 1.0) as clipper:
        with pytest.raises(RuntimeError, match=message):
            loss(model(x), Y).backward()
        assert not clipper.has_result
        assert all(p.grad is None for p in model.parameters())
        F.cross_entropy(model(x), Y).backward()  # the next batch is as ever
        assert clipper.take().batch_size == ROWS


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: per_example(z, y).sum() / (y != 1).sum()])
def test_a_mean_where_a_sum_was_announced(loss: Loss, model: nn.Module, x: Tensor) -> None:
    with GhostClipper(model, 1.0, loss_reduction="sum"), pytest.raises(RuntimeError, match="loss_reduction='mean'"):
        loss(model(x), Y).backward()


def test_a_batch_of_one_needs_no_reduction(model: nn.Module, x: Tensor) -> None:
    with GhostClipper(model, 0.1) as clipper:
        per_example(model(x[:1]), Y[:1]).backward()
        squeezed = clipper.take().grads
        F.cross_entropy(model(x[:1]), Y[:1]).backward()
        assert deviation(clipper.take().grads, squeezed) == 0.0
        with pytest.raises(RuntimeError, match="class weights"):  # weighs nothing alone, but something beside others
            F.cross_entropy(model(x[:1]), Y[:1], weight=WEIGHTS).backward()


HIDDEN: list[Loss] = [
    lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS).reshape(1),
    lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS).reshape(1).squeeze() / ROWS,
    lambda z, y: torch.dot(WEIGHTS[y] / WEIGHTS[y].sum(), per_example(z, y)).reshape(1),
]


@pytest.mark.parametrize("loss", HIDDEN)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_shape_of_one_hides_nothing(loss: Loss, reduction: str, rows: int, model: nn.Module, x: Tensor) -> None:
    with GhostClipper(model, 1.0, loss_reduction=reduction), pytest.raises(RuntimeError, match="backward\\(losses\\)"):  # type: ignore[arg-type]
        loss(model(x[:rows]), Y[:rows]).backward()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, loss: Tensor) -> Tensor:
        return 2 * loss

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_function_of_ones_own_is_not_known(model: nn.Module, x: Tensor) -> None:
    with GhostClipper(model, 1.0), pytest.raises(RuntimeError, match="Twice was applied"):
        Twice.apply(F.cross_entropy(model(x), Y)).backward()


CHANGING: dict[str, tuple[str, Loss]] = {
    "the batch size twice": ("mean", lambda z, y: F.cross_entropy(z, y) / len(y)),
    "the batch size under a sum": ("sum", lambda z, y: per_example(z, y).sum() / len(y)),
    "the share of a logical batch": ("mean", lambda z, y: F.cross_entropy(z, y) * len(y) / 8),
    "a number from the labels": ("mean", lambda z, y: F.cross_entropy(z, y) / WEIGHTS[y].sum().item()),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_changes_with_the_batch(name: str, model: nn.Module, x: Tensor) -> None:
    reduction, loss = CHANGING[name]
    with GhostClipper(model, 1.0, loss_reduction=reduction) as clipper:  # type: ignore[arg-type]
        loss(model(x), Y).backward()
        clipper.take()
        with pytest.raises(RuntimeError, match="in an earlier batch by"):
            loss(model(x[:4]), Y[:4]).backward()
        assert not clipper.has_result


def test_batches_of_any_size_have_the_same_weights(model: nn.Module, x: Tensor) -> None:
    for reduction, losses in (("mean", MEANS), ("sum", SUMS)):
        for loss in losses.values():
            with GhostClipper(model, 1.0, loss_reduction=reduction) as clipper:  # type: ignore[arg-type]
                divides = loss is MEANS["sum divided by a number"]  # by zero, for an empty batch
                for rows in (ROWS, 1, 5, 3) if divides else (ROWS, 1, 5, 0, 3):
                    loss(model(x[:rows]), Y[:rows]).backward()
                    assert clipper.take().batch_size == rows


def test_a_gradient_that_hides_the_weights(model: nn.Module, x: Tensor) -> None:
    with GhostClipper(model, 1.0), pytest.raises(RuntimeError, match="gradient="):
        F.cross_entropy(model(x), Y).backward(torch.tensor(2.0, dtype=torch.float64))


def test_other_models_keep_their_losses(model: nn.Module, x: Tensor) -> None:
    other = nn.Linear(4, CLASSES).double()
    with GhostClipper(model, 1.0):
        F.cross_entropy(other(x), Y, weight=WEIGHTS).backward()
        assert other.weight.grad is not None
    F.cross_entropy(model(x), Y, weight=WEIGHTS).backward()
    assert model.weight.grad is not None
