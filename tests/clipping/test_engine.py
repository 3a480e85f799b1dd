"""GhostClipper against a loop over single examples in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpkernels.clipping import GhostClipper, UnsupportedModelError, check
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

BATCH, FEATURES, CLASSES = 6, 5, 3


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(FEATURES, 4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output, hidden = self.recurrent(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(output[:, 0] + hidden[-1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        causal = torch.triu(torch.full((x.size(1), x.size(1)), -1e9, dtype=x.dtype), 1)
        return self.head(self.attention(h, h, h, attn_mask=causal)[0].mean(1))


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.token)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Inherited(nn.Linear):
    """A subclass without a forward of its own is a plain Linear."""


def reused() -> nn.Module:
    twice = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(twice, nn.Tanh(), twice, nn.Tanh(), nn.Linear(FEATURES, CLASSES))


def tied() -> nn.Module:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(FEATURES, CLASSES))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(inplace=True), nn.Linear(7, CLASSES))


def frozen(*names: str) -> nn.Module:
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(FEATURES - 1, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES - 1), layer, nn.Flatten(), nn.Linear(4 * (FEATURES - 1), CLASSES))


FLAT, SEQUENCE = (FEATURES,), (4, FEATURES)
MODELS = {
    "mlp": (mlp, FLAT),
    "few outputs, many inputs": (lambda: nn.Linear(1100, CLASSES), (1100,)),
    "4-D input": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Flatten(), nn.Linear(24, CLASSES)),
        (2, 3, FEATURES),
    ),
    "reused module": (reused, FLAT),
    "tied weights": (tied, FLAT),
    "first layer frozen": (lambda: frozen("0.weight", "0.bias"), FLAT),
    "weight only": (lambda: frozen("0.bias", "2.bias"), FLAT),
    "bias only": (lambda: frozen("0.weight", "2.weight"), FLAT),
    "inherited forward": (lambda: nn.Sequential(Inherited(FEATURES, CLASSES)), FLAT),
    "own forward": (lambda: nn.Sequential(Doubled(FEATURES, 4), nn.Linear(4, CLASSES)), FLAT),
    "class token": (ClassToken, FLAT),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))), FLAT),
    "LSTM": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "GRU": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "attention": (Attention, SEQUENCE),
}
SLOW = pytest.mark.filterwarnings("ignore:There is a performance drop")


@SLOW
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["losses", "mean", "sum"])
def test_equals_the_one_example_loop(name: str, way: str) -> None:
    make, shape = MODELS[name]
    model, x, y = make(), torch.randn(BATCH, *shape), torch.randint(0, CLASSES, (BATCH,))
    _, norms = one_example_loop(model, cross_entropy, x, y, 1.0)
    bound = float(norms.median())  # some are clipped and some are not
    expected, norms = one_example_loop(model, cross_entropy, x, y, bound)
    if way == "losses":
        with GhostClipper(model, bound) as clipper:
            result = clipper.backward(cross_entropy(model, x, y))
    else:
        with GhostClipper(model, bound, loss_reduction=way) as clipper:
            losses = cross_entropy(model, x, y)
            (losses.mean() if way == "mean" else losses.sum()).backward()
            result = clipper.take()
    assert deviation(result.grads, expected) < 1e-6
    torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert result.batch_size == BATCH
    assert bound < result.l2_bound < 1.002 * bound


@pytest.mark.parametrize("make", [mlp, ClassToken, reused])
def test_empty_batch_sums_to_zero(make: type[nn.Module]) -> None:
    model = make()
    with GhostClipper(model, 1.0) as clipper:
        result = clipper.backward(cross_entropy(model, torch.empty(0, FEATURES), torch.empty(0, dtype=torch.long)))
    assert result.norms.shape == (0,)
    assert all(
        (g == 0).all() and g.shape == p.shape for g, p in zip(result.grads.values(), model.parameters(), strict=True)
    )


def test_empty_batch_under_a_mean_counts_as_zero() -> None:
    model = mlp()
    with GhostClipper(model, 1.0) as clipper:
        loss = cross_entropy(model, torch.empty(0, FEATURES), torch.empty(0, dtype=torch.long)).mean()
        assert loss.isnan()
        loss.backward()
        assert all((g == 0).all() for g in clipper.take().grads.values())


@pytest.mark.parametrize("make", [mlp, reused, ClassToken])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_example_is_dropped_by_selection(make: type[nn.Module], bad: float) -> None:
    model, x, y = make(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    keep = torch.arange(BATCH) != 2
    expected, _ = one_example_loop(model, cross_entropy, x[keep], y[keep], 0.5)
    x[2, 1] = bad
    with GhostClipper(model, 0.5) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 1e-6


def test_physical_batches_add_up() -> None:
    model, x, y = mlp(), torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))
    with GhostClipper(model, 0.3) as clipper:
        whole = clipper.backward(cross_entropy(model, x, y)).grads
        for size in (4, 3, 1):
            parts = [
                clipper.backward(cross_entropy(model, x[i : i + size], y[i : i + size])).grads
                for i in range(0, 8, size)
            ]
            total = {name: sum(part[name] for part in parts) for name in whole}
            assert deviation(total, whole) < 1e-6


def test_freezing_and_unfreezing_between_steps() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    model[0].requires_grad_(False)
    with GhostClipper(model, 0.5) as clipper:
        for trainable in (False, True, False):
            model[0].requires_grad_(trainable)
            expected, _ = one_example_loop(model, cross_entropy, x, y, 0.5)
            assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-6


def test_autocast() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.5)
    with GhostClipper(model, 0.5) as clipper, torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
        assert output.dtype == torch.bfloat16
        result = clipper.backward(nn.functional.cross_entropy(output.float(), y, reduction="none"))
    assert deviation(result.grads, expected) < 0.05


def test_compile_with_graph_breaks() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.5)
    with GhostClipper(model, 0.5) as clipper:
        compiled = torch.compile(model, backend="eager")
        assert deviation(clipper.backward(cross_entropy(compiled, x, y)).grads, expected) < 1e-6


# ---- what must raise ------------------------------------------------------------------------------------------------


def test_second_backward_raises() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    with GhostClipper(model, 1.0) as clipper:
        cross_entropy(model, x, y).mean().backward()
        with pytest.raises(RuntimeError, match="contribute twice"):
            cross_entropy(model, x, y).mean().backward()
        clipper.take()
        loss = cross_entropy(model, x, y).mean()
        loss.backward(retain_graph=True)
        clipper.take()
        with pytest.raises(RuntimeError, match="twice through one graph"):
            loss.backward()


def test_unused_parameter_raises() -> None:
    model = nn.ModuleDict({"used": nn.Linear(FEATURES, CLASSES), "unused": nn.Linear(2, 2)})
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match=r"unused.weight, unused.bias.*Freeze"):
        clipper.backward(model["used"](torch.randn(BATCH, FEATURES)).sum(1))


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (torch.tensor(1.0), r"losses must be \[batch\], one loss per example.*got shape \(\)"),
        (torch.ones(2, 3), r"got shape \(2, 3\)"),
        (1.0, "got float"),
    ],
)
def test_losses_must_be_per_example(losses: Tensor, words: str) -> None:
    with GhostClipper(mlp(), 1.0) as clipper, pytest.raises(ValueError, match=words):
        clipper.backward(losses)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (parametrizations.spectral_norm(nn.Linear(2, 2)), "spectral normalization"),
        (torch.nn.utils.spectral_norm(nn.Linear(2, 2)), "spectral normalization"),
        (nn.LazyLinear(3), "not initialized"),
        (torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
    ],
)
def test_refused_by_module_path(module: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"(?s)inner.part.*{words}"):
        GhostClipper(nn.ModuleDict({"inner": nn.ModuleDict({"part": module})}), 1.0)


def test_attach_errors() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        GhostClipper([], 1.0)
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        GhostClipper(mlp().requires_grad_(False), 1.0)
    for bound in (0.0, -1.0, float("nan"), 1e11):
        with pytest.raises(ValueError, match="max_grad_norm must"):
            GhostClipper(mlp(), bound)
    with pytest.raises(TypeError, match="max_grad_norm must be a number"):
        GhostClipper(mlp(), "1")
    model = mlp()
    with GhostClipper(model, 1.0), pytest.raises(ValueError, match="already has a GhostClipper"):
        GhostClipper(model, 1.0)
    GhostClipper(model, 1.0).detach()
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match="no backward has run"):
        clipper.take()


# ---- check ----------------------------------------------------------------------------------------------------------


def test_check_agrees_and_names_what_is_off() -> None:
    class Mixing(nn.Module):
        """Subtracts the mean of the batch: every example's gradient depends on the others."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.last(h - 0.5 * h.mean(0))

    loss = nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    model = mlp()
    with GhostClipper(model, 1.0):  # an attached clipper is no obstacle
        report = check(model, loss, x, y)
    assert report.ok, str(report)
    report = check(Mixing(), loss, x, y)
    assert not report.ok
    assert "first.weight" in report.wrong
    assert "WRONG" in str(report)
