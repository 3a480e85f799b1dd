"""Parameters found in autograd's graph: however they are used, the clipped sum is that of the one-example loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import Loss, deviation, one_example_loop

BATCH, TIME, FEATURES, CLASSES = 6, 4, 5, 3


class Net(nn.Module):
    """A module made of a function of (self, x), with parameters and children as given."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif part.requires_grad:
                self.register_parameter(name, nn.Parameter(part.detach()))
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def weight(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def head(features: int = FEATURES) -> nn.Linear:
    return nn.Linear(features, CLASSES)


def standardized(m: nn.Module, x: Tensor) -> Tensor:
    w = m.w
    w = (w - w.mean((1, 2), keepdim=True)) / w.std((1, 2), keepdim=True)
    return m.head(F.conv1d(x.mT, w).flatten(1))


def prompt(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.inner(torch.cat([m.p.expand(len(x), -1, -1), x], 1))).mean(1))


def part_bias(m: nn.Module, x: Tensor) -> Tensor:
    """Some of the projections have a bias, others a buffer of zeros for one."""
    return m.head(torch.tanh(F.linear(x, m.w, torch.cat([m.q, m.k, m.q * m.v]))).mean(1))


def packed(m: nn.Module, x: Tensor) -> Tensor:
    lengths = x[:, 0, 0].abs().mul(10).long() % TIME + 1
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.head(pad_packed_sequence(m.rnn(sequence)[0], batch_first=True)[0].sum(1))


def positions(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.inner(x) + m.table(torch.arange(x.size(1)))).mean(1))


def attention(m: nn.Module, x: Tensor) -> Tensor:
    h = m.inner(x)
    return m.head(m.attention(h, h, h)[0].mean(1))


def relative(m: nn.Module, x: Tensor) -> Tensor:
    t = torch.arange(x.size(1))
    bias = m.table((t[:, None] - t[None, :]).clamp(-2, 2) + 2)[..., 0]
    scores = x @ x.mT / 3 + bias
    return m.head(torch.tanh(m.inner(scores.softmax(-1) @ x)).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear on merged rows": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.inner(x.flatten(0, 1))).view(*x.shape).mean(1)),
        inner=nn.Linear(5, 5),
        head=head(),
    ),
    "time first": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.inner(x.transpose(0, 1))).mean(0)), inner=nn.Linear(5, 5), head=head()
    ),
    "time first, merged": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.inner(x.transpose(0, 1).flatten(0, 1))).view(x.size(1), len(x), 5).mean(0)),
        inner=nn.Linear(5, 5),
        head=head(),
    ),
    "a weight used beside its module": lambda: Net(
        lambda m, x: m.head(torch.tanh(F.linear(x, m.inner.weight, m.inner.bias)).mean(1)),
        inner=nn.Linear(5, 5),
        head=head(),
    ),
    "bare matrix": lambda: Net(lambda m, x: m.head(torch.tanh(x @ m.w).mean(1)), w=weight(5, 5), head=head()),
    "matrix on the left": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.w @ x.mean(1).mT).mT), w=weight(5, 5), head=head()
    ),
    "einsum": lambda: Net(lambda m, x: m.head(torch.einsum("btf,fg->bg", x, m.w).tanh()), w=weight(5, 5), head=head()),
    "scale, offset, 0-dimensional factor": lambda: Net(
        lambda m, x: m.head((x * m.a + m.b - m.c / 2).mean(1)) * m.s,
        a=weight(5),
        b=weight(TIME, 1),
        c=weight(1, 5),
        s=weight(),
        head=head(),
    ),
    "attention by a vector": lambda: Net(
        lambda m, x: m.head(((x @ m.q).softmax(1).unsqueeze(2) * x).sum(1)), q=weight(5), head=head()
    ),
    "a vector used twice": lambda: Net(
        lambda m, x: m.head(((x @ m.q).softmax(1).unsqueeze(2) * x + (x.tanh() @ m.q).unsqueeze(2)).sum(1)),
        q=weight(5),
        head=head(),
    ),
    "scaled and shifted at once": lambda: Net(
        lambda m, x: m.head(torch.addcmul(m.p, m.s, x.tanh(), value=0.5).square().mean(1)),
        p=weight(1, 1, 5),
        s=weight(5),
        head=head(),
    ),
    "repeated for each example": lambda: Net(
        lambda m, x: m.head(torch.tanh(x + m.inner(m.p).repeat(len(x), 1).view(len(x), TIME, 5)).mean(1)),
        p=weight(TIME, 5),
        inner=nn.Linear(5, 5),
        head=head(),
    ),
    "repeated to a dimension of examples": lambda: Net(
        lambda m, x: m.head(torch.tanh(x + m.p.repeat(len(x), 1, 1)).mean(1)), p=weight(TIME, 5), head=head()
    ),
    "bias in parts": lambda: Net(part_bias, w=weight(6, 5), q=weight(2), k=torch.zeros(2), v=weight(2), head=head(6)),
    "class token": lambda: Net(prompt, p=weight(1, 5), inner=nn.Linear(5, 5), head=head()),
    "prompt of three": lambda: Net(prompt, p=weight(3, 5), inner=nn.Linear(5, 5), head=head()),
    "positions without a batch": lambda: Net(positions, table=nn.Embedding(9, 5), inner=nn.Linear(5, 5), head=head()),
    "relative positions": lambda: Net(relative, table=nn.Embedding(5, 1), inner=nn.Linear(5, 5), head=head()),
    "low rank": lambda: Net(
        lambda m, x: m.head(torch.tanh(F.linear(x, m.base + m.b @ m.a)).mean(1)),
        base=torch.randn(5, 5),
        a=weight(2, 5),
        b=weight(5, 2),
        head=head(),
    ),
    "weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh(), nn.Flatten(), head(20)
    ),
    "standardized convolution": lambda: Net(standardized, w=weight(4, 5, 2), head=head(4 * (TIME - 1))),
    "convolution of frames": lambda: Net(
        lambda m, x: m.head(m.conv(x.reshape(-1, 1, 5)).view(len(x), TIME, -1).tanh().mean(1)),
        conv=nn.Conv1d(1, 2, 3, padding=1),
        head=head(10),
    ),
    "layer norm, time first": lambda: Net(
        lambda m, x: m.head(m.norm(m.inner(x.transpose(0, 1))).mean(0)),
        inner=nn.Linear(5, 5),
        norm=nn.LayerNorm(5),
        head=head(),
    ),
    "group norm of frames": lambda: Net(
        lambda m, x: m.head(m.norm(m.inner(x.flatten(0, 1))).view(len(x), TIME, -1).tanh().mean(1)),
        inner=nn.Linear(5, 6),
        norm=nn.GroupNorm(2, 6),
        head=head(6),
    ),
    "called three times": lambda: Net(
        lambda m, x: m.head(m.inner(m.inner(m.inner(x).tanh()).tanh()).mean(1)), inner=nn.Linear(5, 5), head=head()
    ),
    "tied, one transposed": lambda: Net(
        lambda m, x: m.head(F.linear(torch.tanh(F.linear(x, m.w)), m.w.t()).mean(1)), w=weight(5, 5), head=head()
    ),
    "convolution called twice": lambda: Net(
        lambda m, x: m.head(m.conv(m.conv(x.mT).tanh()).mean(2)), conv=nn.Conv1d(5, 5, 3, padding=1), head=head()
    ),
    "slices of one weight": lambda: Net(
        lambda m, x: m.head((torch.tanh(x @ m.w[:5]) * (x @ m.w[5:10])).mean(1) + m.w[10]), w=weight(11, 5), head=head()
    ),
    "slices that overlap": lambda: Net(
        lambda m, x: m.head((torch.tanh(x @ m.w[:5]) * (x @ m.w[3:8])).mean(1)), w=weight(8, 5), head=head()
    ),
    "an operation without a rule": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(20, 5), Twice(nn.Bilinear(5, 5, 4)), head(4)
    ),
    "an operation on the parameter without a rule": lambda: Net(
        lambda m, x: m.head(torch.tanh(x @ torch.linalg.matrix_exp(m.w)).mean(1)), w=weight(5, 5), head=head()
    ),
    "in place behind a layer": lambda: nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Flatten(), head(20)),
    "attention": lambda: Net(
        attention, inner=nn.Linear(5, 4), attention=nn.MultiheadAttention(4, 2, batch_first=True), head=head(4)
    ),
    "encoder": lambda: nn.Sequential(
        nn.Linear(5, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(), head(16)
    ),
    "LSTM": lambda: Net(
        lambda m, x: m.head(m.rnn(x)[0].sum(1)),
        rnn=nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True),
        head=head(8),
    ),
    "GRU": lambda: Net(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.GRU(5, 4, 2, batch_first=True), head=head(4)),
    "RNN, time first": lambda: Net(
        lambda m, x: m.head(m.rnn(x.transpose(0, 1))[0][-1]), rnn=nn.RNN(5, 4), head=head(4)
    ),
    "PReLU": lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Flatten(), head(16)),
}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def losses_of(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y, reduction="none")


def assert_right(model: nn.Module, x: Tensor, y: Tensor, loss: Loss = losses_of) -> GhostClipper:
    """Several steps through one clipper, of batches of changing size."""
    model, x = model.double(), x.double() if x.is_floating_point() else x
    with GhostClipper(model, 0.1) as clipper:
        for rows in (len(x), len(x), 1, len(x) - 1, len(x)):
            expected, norms = one_example_loop(model, loss, x[:rows], y[:rows], 0.1)
            result = clipper.backward(loss(model, x[:rows], y[:rows]))
            assert deviation(result.grads, expected) < 1e-7
            torch.testing.assert_close(result.norms, norms, rtol=1e-7, atol=0)
            assert (result.norms >= norms * (1 - 1e-12)).all()
            assert all(p.grad is None for p in model.parameters())
    return clipper


def data(batch: int = BATCH, time: int = TIME) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, time, FEATURES), torch.randint(0, CLASSES, (batch,))


@pytest.mark.parametrize("name", NETS)
def test_equals_the_one_example_loop(name: str) -> None:
    assert_right(NETS[name](), *data())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("batch", [TIME, FEATURES, 2 * TIME])
def test_sizes_that_coincide(name: str, batch: int) -> None:
    """As many examples as positions or features: nothing is told by a size."""
    assert_right(NETS[name](), *data(batch))


@pytest.mark.parametrize("name", NETS)
def test_the_ordinary_loop_is_the_same_or_refused(name: str) -> None:
    model, (x, y) = NETS[name]().double(), data()
    x = x.double()
    expected, _ = one_example_loop(model, losses_of, x, y, 0.1)
    with GhostClipper(model, 0.1) as clipper:
        clipper.expected_rows = BATCH
        losses_of(model, x, y).mean().backward()
        assert deviation(clipper.take().grads, expected) < 1e-7


class Table(nn.Module):
    """A language model whose embedding is its output layer, too."""

    def __init__(self, padding: int | None, copies: int) -> None:
        super().__init__()
        self.table, self.copies = nn.Embedding(7, FEATURES, padding_idx=padding), copies
        self.mix = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = sum(torch.tanh(self.mix(self.table((x + i) % 7))) for i in range(self.copies))
        return F.linear(h, self.table.weight)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("copies", [1, 2])
def test_embedding_tied_to_the_output_layer(padding: int | None, copies: int) -> None:
    x = torch.randint(0, 7, (BATCH, TIME))
    loss = lambda m, a, b: F.cross_entropy(m(a).mT, a.roll(1, 1), reduction="none").mean(1)  # noqa: E731
    assert_right(Table(padding, copies), x, x[:, 0], loss)


def test_gradient_penalty_and_adversarial_examples() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.Tanh(), head(6)), data()

    def penalized(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        losses = losses_of(m, a, b)
        (g,) = torch.autograd.grad(losses.sum(), a, create_graph=True)
        return losses + (g.flatten(1).norm(dim=1) - 1) ** 2

    def adversarial(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        (g,) = torch.autograd.grad(losses_of(m, a, b).sum(), a)
        return losses_of(m, a.detach() + 0.1 * g.sign(), b)

    assert_right(model, x, y, penalized)
    assert_right(model, x, y, adversarial)


def test_inputs_get_their_gradient_in_the_ordinary_loop() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), head(20)), data()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(losses_of(model, x, y).mean(), x)
    with GhostClipper(model, 1.0) as clipper:
        losses_of(model, x, y).mean().backward()
        clipper.take()
    assert torch.equal(x.grad, expected)
    assert all(p.grad is None for p in model.parameters())


def test_checkpointing() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Conv1d(TIME, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), head(12))
    assert_right(
        model, *data(), lambda m, a, b: F.cross_entropy(checkpoint(m, a, use_reentrant=False), b, reduction="none")
    )
    x, y = data()
    x = x.double().requires_grad_()
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match="use_reentrant=False"):
        clipper.backward(F.cross_entropy(checkpoint(model, x, use_reentrant=True), y, reduction="none"))


def test_another_seed_of_the_user_is_not_touched() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), head(20)), data()
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        losses = losses_of(model, x, y)
        after = torch.get_rng_state()
        with GhostClipper(model, 1.0) as clipper:
            clipper.backward(losses)
        assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what mixes examples ---------------------------------------------------------------------------------------------


class OwnBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), *layers, head(6))


def sorted_rows(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.head(m.inner(x[order]).tanh().mean(1)[order.argsort()])


def contrastive(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(m(x), dim=1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(x)), reduction="none")


MIXING: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "batch statistics": (lambda: flat(OwnBatchNorm()), losses_of),
    "batch norm by a function": (lambda: flat(Norm()), losses_of),
    "statistics of a part": (lambda: flat(Part()), losses_of),
    "rows in another order": (lambda: Net(sorted_rows, inner=nn.Linear(5, 5), head=head()), losses_of),
    "pairs": (lambda: flat(nn.Tanh()), contrastive),
    "minus the mean loss": (lambda: flat(nn.Tanh()), lambda m, x, y: losses_of(m, x, y) - losses_of(m, x, y).mean()),
    "hard examples": (lambda: flat(nn.Tanh()), lambda m, x, y: losses_of(m, x, y).sort().values),
    "shifted": (lambda: flat(nn.Tanh()), lambda m, x, y: losses_of(m, x, y) + losses_of(m, x, y).roll(1)),
    "cumulated": (lambda: flat(nn.Tanh()), lambda m, x, y: losses_of(m, x, y).cumsum(0)),
    "softmax over the batch": (lambda: flat(nn.Softmax(0)), losses_of),
    "mixed up": (lambda: flat(nn.Tanh()), lambda m, x, y: 0.7 * losses_of(m, x, y) + 0.3 * losses_of(m, x, y).flip(0)),
    "attention over the batch": (
        lambda: Net(
            lambda m, x: m.head(m.attention(x, x, x)[0].mean(1)), attention=nn.MultiheadAttention(5, 1), head=head()
        ),
        losses_of,
    ),
}


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :3], x[:, 3:] - x[:, 3:].mean(0)], 1)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("batch", [TIME, BATCH])
def test_what_mixes_examples_is_refused(name: str, ordinary: bool, batch: int) -> None:
    make, loss = MIXING[name]
    model, (x, y) = make(), data(batch)
    with GhostClipper(model, 1.0) as clipper:
        for _ in range(2):  # not at the first step alone
            losses = loss(model, x, y)
            run = losses.mean().backward if ordinary else lambda losses=losses: clipper.backward(losses)
            with pytest.raises(RuntimeError, match=r"no sums over|backward\(losses\)"):
                run()
            assert not clipper.has_result
    assert all(p.grad is None for p in model.parameters())


def test_mixing_that_starts_later_is_refused() -> None:
    """The graph is the same, but the rows are chosen by the data."""
    model = Net(sorted_rows, inner=nn.Linear(5, 5), head=head())
    x, y = data()
    x = x[x[:, 0, 0].argsort()]
    with GhostClipper(model, 1.0) as clipper:
        clipper.backward(losses_of(model, x, y))  # in order by chance
        with pytest.raises(RuntimeError, match="no sums over"):
            clipper.backward(losses_of(model, x.flip(0), y))


def test_rows_that_are_picked_within_an_example_are_fine() -> None:
    last = lambda m, x: m.head(m.inner(x).tanh()[torch.arange(len(x)), x[:, 0, 0].gt(0).long()])  # noqa: E731
    assert_right(Net(last, inner=nn.Linear(5, 5), head=head()), *data())


def test_a_gradient_that_was_zero_is_proved_later() -> None:
    """The first factor of a low-rank update has no gradient before the second, which starts at 0, has moved."""
    model = Net(
        lambda m, x: m.head((x + OwnBatchNorm()(x @ m.a) @ m.b).mean(1)), a=weight(5, 2), b=weight(2, 5), head=head()
    )
    with torch.no_grad():
        model.b.zero_()
    x, y = data()
    with GhostClipper(model, 1.0) as clipper:
        clipper.backward(losses_of(model, x, y))
        with torch.no_grad():
            model.b.normal_()
        with pytest.raises(RuntimeError, match="no sums over"):
            clipper.backward(losses_of(model, x, y))


@pytest.mark.parametrize(("batch", "time"), [(6, 7), (4, 9), (5, 5), (3, 4)])
def test_one_row_of_an_example_is_used(batch: int, time: int) -> None:
    """As many class tokens lie apart in merged rows as rows that are laid out time first: the view tells."""
    body = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = Net(lambda m, x: m.head(m.body(x)[:, 0]), body=body, head=head(8)).double()
    x, y = torch.randn(batch, time, 8).double(), torch.arange(batch) % CLASSES
    assert_right(model, x, y)
    with GhostClipper(model, 1.0) as clipper:
        clipper.backward(losses_of(model, x, y))
        (plan,) = clipper._plans.values()
        assert all(use.settled for use in plan.uses)


def test_as_many_rows_as_a_vector_has_entries() -> None:
    model = NETS["attention by a vector"]().double()
    x, y = data(FEATURES, 1)
    assert_right(model, x.double(), y)
    model = Net(lambda m, x: m.head(x * (x @ m.q).sigmoid().unsqueeze(1)), q=weight(5), head=head()).double()
    assert_right(model, torch.randn(5, 5).double(), torch.arange(5) % CLASSES)


def test_one_graph_is_clipped_once() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), head(20)), data()
    with GhostClipper(model, 1.0) as clipper:
        losses = losses_of(model, x, y)
        clipper.backward(losses)
        with pytest.raises(RuntimeError, match=r"twice through one graph|a second time"):
            clipper.backward(losses * 2)


def test_packed_sequences_are_refused_with_the_fix() -> None:
    model, (x, y) = Net(packed, rnn=nn.LSTM(5, 4, batch_first=True), head=head(4)), data()
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match=r"packed sequences \(pad"):
        clipper.backward(losses_of(model, x, y))


def test_parameters_outside_of_the_model_are_refused() -> None:
    model, other, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(20, 6)), head(6), data()
    with GhostClipper(model, 1.0) as clipper:
        with pytest.raises(RuntimeError, match=r"parameter of shape \(3.*\) outside of the model"):
            clipper.backward(F.cross_entropy(other(model(x)), y, reduction="none"))
        model.add_module("late", other)
        with pytest.raises(RuntimeError, match=r"'late\.(weight|bias)', which was added after"):
            clipper.backward(losses_of(model, x, y))
        other.requires_grad_(False)
        clipper.backward(losses_of(model, x, y))
    assert other.weight.grad is None


def test_two_private_models_in_one_loss_are_refused() -> None:
    model, other, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(20, 6)), head(6), data()
    with GhostClipper(model, 1.0) as first, GhostClipper(other, 1.0):
        with pytest.raises(RuntimeError, match=r"two private optimizers: detach\(\)"):
            F.cross_entropy(other(model(x)), y).backward()
        other.requires_grad_(False)
        F.cross_entropy(other(model(x)), y).backward()
        assert first.has_result
