"""What lies between losses and modules in the ordinary loop: per-example operations pass, all others are refused."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import deviation, one_example_loop

ROWS, TIME, CLASSES = 6, 5, 3
Op = Callable[[Tensor], Tensor]  # [B, T, C] to a tensor with the batch first

#: Operations that work on one example at a time, from [B, T, C] to the same shape.
APART: dict[str, Op] = {
    "tanh": torch.tanh,
    "sigmoid times itself": lambda z: z.sigmoid() * z,
    "softplus": F.softplus,
    "over time": lambda z: z - z.mean(1, keepdim=True),
    "largest over time": lambda z: z - z.amax(1, keepdim=True),
    "softmax over classes": lambda z: z.softmax(-1) * z,
    "log softmax over time": lambda z: z.log_softmax(1),
    "cumulative sum over time": lambda z: z.cumsum(1),
    "sorted over time": lambda z: z.sort(1).values,
    "rolled over time": lambda z: z.roll(1, 1),
    "flipped classes": lambda z: z.flip(2),
    "norm over classes": lambda z: z / (1 + z.norm(dim=2, keepdim=True)),
    "standard deviation over time": lambda z: z / (1 + z.std(1, keepdim=True)),
    "flattened and back": lambda z: z.reshape(-1, CLASSES).tanh().view(len(z), TIME, CLASSES),
    "transposed and back": lambda z: z.transpose(0, 1).tanh().transpose(0, 1),
    "permuted and back": lambda z: z.permute(2, 0, 1).sigmoid().permute(1, 2, 0),
    "split over time": lambda z: torch.cat(z.split([2, 3], 1)[::-1], 1),
    "chunks over classes": lambda z: torch.stack([c.squeeze(2) for c in z.chunk(3, 2)], 2),
    "unbound over time": lambda z: torch.stack(z.unbind(1)[::-1], 1),
    "picked over time": lambda z: z[:, torch.tensor([4, 0, 1, 3, 2])],
    "gathered over classes": lambda z: z.gather(2, z.detach().argsort(2)),
    "picked by rows": lambda z: z[torch.arange(len(z)), z.detach().sum(2).argmax(1)].unsqueeze(1) + z,
    "masked": lambda z: z.masked_fill(z.detach() > 0.4, 0.1),
    "chosen": lambda z: torch.where(z.detach() > 0, z, 0.1 * z),
    "clamped": lambda z: z.clamp(-2, 2),
    "attention": lambda z: torch.bmm(torch.bmm(z, z.mT).softmax(-1), z),
    "einsum": lambda z: torch.einsum("btc,bsc->bts", z, z).mean(2, keepdim=True) * z,
    "a number": lambda z: 0.5 * z - 1.0 / 3,
    "padded": lambda z: F.pad(z, (0, 0, 1, 0))[:, :TIME],
    "expanded": lambda z: z + z[:, :1].expand(-1, TIME, -1),
    "other type": lambda z: z.float().double(),
}
#: Operations that let one example's loss depend on others.
MIXING: dict[str, Op] = {
    "minus the mean": lambda z: z - z.mean(0),
    "by the batch's mean, detached": lambda z: z / (2 + z.detach().mean().tanh()),
    "softmax over the batch": lambda z: z.softmax(0),
    "logsumexp over the batch": lambda z: z - z.logsumexp(0, keepdim=True),
    "cumulative sum over the batch": lambda z: z.cumsum(0),
    "sorted over the batch": lambda z: z.sort(0).values,
    "rolled over the batch": lambda z: z.roll(1, 0),
    "rolled altogether": lambda z: z.roll(1),
    "flipped batch": lambda z: z.flip(0),
    "largest few of the batch, repeated": lambda z: torch.cat([z.topk(len(z) // 2, 0).values] * 2),
    "gathered over the batch": lambda z: z.gather(0, z.detach().argsort(0)),
    "picked from the batch": lambda z: z[torch.randperm(len(z))],
    "selected by index": lambda z: z.index_select(0, torch.arange(len(z)).flip(0)),
    "one example's share": lambda z: z + z[:1],
    "one example's share, expanded": lambda z: z + z[0].expand_as(z),
    "by the norm of all": lambda z: z / z.norm(),
    "by the largest of all": lambda z: z / z.abs().max(),
    "the median of all": lambda z: z - z.median(),
    "standard deviation of the batch": lambda z: z / (1 + z.std(0)),
    "halves exchanged": lambda z: torch.cat([z[3:], z[:3]]),
    "pairs": lambda z: torch.einsum("btc,atc->bt", z, z).unsqueeze(2) * z,
    "a whole flag": lambda z: z * (z.detach().mean() > -9),
    "a whole half": lambda z: z * z.detach().mean().half(),
    "a whole count": lambda z: z * z.detach().sum().to(torch.int8).abs().clamp(1, 1),
    "a whole bound": lambda z: torch.minimum(z, z.detach().mean()),
    "a whole condition": lambda z: torch.where(z.detach().mean() > 9, z, z * 2),
    "mixed by weights": lambda z: (torch.full((len(z), len(z)), 0.3).double() @ z.flatten(1)).view_as(z),
    "unknown": lambda z: torch.special.bessel_j0(z.detach()) + torch.special.i0e(z),
    "merged with time": lambda z: z.transpose(0, 1).reshape(-1, CLASSES).view_as(z).softmax(-1),
    "Fourier transform over the batch": lambda z: torch.fft.fft(z, dim=0).real,
}
#: From [B, T, C] and labels [B] to a scalar: a mean of one loss per example.
ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda z, y: z.square().mean(),
    "cross entropy": lambda z, y: F.cross_entropy(z.mean(1), y),
    "of tokens": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.repeat_interleave(TIME)),
    "of maps": lambda z, y: F.cross_entropy(z.mT, y.unsqueeze(1).expand(-1, TIME)),
    "over time, then all": lambda z, y: z.square().sum((1, 2)).mean() / 7,
    "by hand": lambda z, y: z.square().sum() / len(z),
    "squares": lambda z, y: F.mse_loss(z, torch.full_like(z, 0.3)),
    "smooth": lambda z, y: F.smooth_l1_loss(z, torch.zeros_like(z), beta=0.3),
    "huber": lambda z, y: F.huber_loss(z, torch.zeros_like(z), delta=0.3),
    "logits": lambda z, y: F.binary_cross_entropy_with_logits(z, torch.full_like(z, 0.2)),
    "probabilities": lambda z, y: F.binary_cross_entropy(z.sigmoid(), torch.full_like(z, 0.2)),
    "signs": lambda z, y: F.soft_margin_loss(z, torch.ones_like(z)),
    "margins": lambda z, y: F.multi_margin_loss(z.mean(1), y),
    "label margins": lambda z, y: F.multilabel_margin_loss(z.mean(1), F.pad(y.unsqueeze(1), (0, 2), value=-1)),
    "two": lambda z, y: F.cross_entropy(z[:, 0], y) - 0.3 * z.abs().mean() + 1,
}


def make() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    return model, torch.randn(ROWS, TIME, 4).double(), torch.randint(0, CLASSES, (ROWS,))


@settings(max_examples=150, deadline=None)
@given(ops=st.lists(st.sampled_from(list(APART)), max_size=4), end=st.sampled_from(list(ENDS)))
def test_operations_on_single_examples_pass_and_are_exact(ops: list[str], end: str) -> None:
    model, x, y = make()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        for op in ops:
            z = APART[op](z)
        return ENDS[end](z, y)

    expected, _ = one_example_loop(model, lambda m, x, y: loss(m, x, y).reshape(1), x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        loss(model, x, y).backward()
        got = clipper.take().grads
    limit = 1e-6 if "other type" in ops else 1e-8
    scale = max(float(value.abs().max()) for value in expected.values())
    assert all(float((got[name] - expected[name]).abs().max()) <= limit * scale for name in got)


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(st.sampled_from(list(APART)), max_size=2),
    mixing=st.sampled_from(list(MIXING)),
    after=st.lists(st.sampled_from(list(APART)), max_size=2),
    end=st.sampled_from(list(ENDS)),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_one_operation_across_examples_is_refused(
    before: list[str], mixing: str, after: list[str], end: str, reduction: str
) -> None:
    """At the first batch, or where only its operands tell (a matrix of weights) at the first that has others."""
    model, x, y = make()
    with GhostClipper(model, 0.3, loss_reduction=reduction) as clipper:  # type: ignore[arg-type]
        z = model(x)
        for op in before:
            z = APART[op](z)
        z = MIXING[mixing](z)
        for op in after:
            z = APART[op](z)
        loss = ENDS[end](z, y) * (ROWS if reduction == "sum" else 1)
        with pytest.raises(RuntimeError, match=r"optimizer\.backward\(losses\)|loss_reduction='mean'"):
            loss.backward()
        assert not clipper.has_result
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mixing", MIXING)
def test_every_one_of_them(mixing: str) -> None:
    model, x, _ = make()
    with GhostClipper(model, 0.3), pytest.raises(RuntimeError, match=r"optimizer\.backward\(losses\)"):
        MIXING[mixing](model(x)).square().mean().backward()


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "the hardest pixels": ("mean", lambda losses, z: losses.flatten().topk(losses.numel() // ROWS).values.mean()),
    "the hardest half": ("sum", lambda losses, z: losses.mean(1).topk(3).values.sum() / 3),
    "a stack of roots": ("sum", lambda losses, z: torch.stack([losses.sum().sqrt()]).sum()),
    "the batch before the classes": ("sum", lambda losses, z: z.square().mean(0).sum()),
    "weights that sum to one": ("sum", lambda losses, z: losses.mean(1) @ losses.detach().mean(1).softmax(0)),
    "losses against each other": ("mean", lambda losses, z: F.cross_entropy(z[:, 0] @ z[:, 1].T, torch.arange(ROWS))),
    "a cumulative mean": ("mean", lambda losses, z: (losses.cumsum(0) / torch.arange(1, ROWS + 1).view(-1, 1)).mean()),
    "its own kind of mean": ("mean", lambda losses, z: (losses / losses.detach().mean()).mean()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_the_batch_are_refused(name: str) -> None:
    model, x, y = make()
    reduction, loss = LOSSES[name]
    with GhostClipper(model, 0.3, loss_reduction=reduction) as clipper:  # type: ignore[arg-type]
        z = model(x)
        losses = F.cross_entropy(z.mT, y.unsqueeze(1).expand(-1, TIME), reduction="none")
        with pytest.raises(RuntimeError, match=r"optimizer\.backward\(losses\)"):
            loss(losses, z).backward()
        assert not clipper.has_result


@pytest.mark.parametrize(
    "shared",
    [
        lambda z, w: (z * w).square().mean(),
        lambda z, w: (z.flatten(0, 1) @ w.diag()).square().mean(),
        lambda z, w: F.binary_cross_entropy_with_logits(z, torch.full_like(z, 0.3), pos_weight=w),
        lambda z, w: F.mse_loss(z, w.expand_as(z)),
        lambda z, w: torch.maximum(z, w).mean(),
    ],
)
def test_an_operand_without_batch_stays_the_same(shared: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A weight per class passes for as long as it is the same for every batch: one that is computed from it is not."""
    model, x, _ = make()
    weight = torch.tensor([0.5, 1.0, 2.0]).double()
    with GhostClipper(model, 0.3) as clipper:
        for rows in (ROWS, 4, 5):
            shared(model(x[:rows]), weight.clone()).backward()
            clipper.take()
        with pytest.raises(RuntimeError, match="not the one of an earlier batch"):
            shared(model(x), weight + 0.25).backward()


def test_a_part_that_comes_and_goes_hides_no_changing_weight() -> None:
    model, x, y = make()
    with GhostClipper(model, 0.3) as clipper:
        for step in range(4):
            z = model(x)
            loss = F.cross_entropy(z.mean(1), y) + (0.1 * z.square().mean() if step % 2 else 0.0)
            loss.backward()
            clipper.take()
        z = model(x)
        with pytest.raises(RuntimeError, match="in an earlier batch by"):
            (F.cross_entropy(z.mean(1), y) * 1.01 + 0.1 * z.square().mean()).backward()


def test_targets_that_broadcast_are_refused_as_they_change() -> None:
    """[B, 1] against [B] is [B, B]: every example meets all labels."""
    model, x, targets = nn.Linear(4, 1).double(), torch.randn(ROWS, 4).double(), torch.randn(2, ROWS).double()
    with GhostClipper(model, 0.3) as clipper:
        F.mse_loss(model(x), targets[0].expand(ROWS, ROWS)).backward()
        clipper.take()
        with pytest.raises(RuntimeError, match=r"MseLoss\.target"):
            F.mse_loss(model(x), targets[1].expand(ROWS, ROWS)).backward()


# ---- the mean weighs every example the same, to the bit --------------------------------------------------------------

PRECISIONS = ["float32", "bfloat16", "float16", "autocast"]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 700),
    precision=st.sampled_from(PRECISIONS),
    kind=st.sampled_from(["cross entropy", "mean", "by hand", "times constants", "squares", "two"]),
    seed=st.integers(0, 10**6),
)
def test_a_mean_has_the_bits_of_the_sum(rows: int, precision: str, kind: str, seed: int) -> None:
    """So no example's gradient knows how many others there are: 1/B is rounded into none of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    x, y, target = torch.randn(rows, 4), torch.randint(0, CLASSES, (rows,)), torch.randn(rows, CLASSES)
    if precision in ("bfloat16", "float16"):
        dtype = getattr(torch, precision)
        model, x, target = model.to(dtype), x.to(dtype), target.to(dtype)
    each = {
        "cross entropy": lambda z: F.cross_entropy(z, y, reduction="none"),
        "mean": lambda z: F.cross_entropy(z, y, reduction="none"),
        "by hand": lambda z: z.square().sum(1),
        "times constants": lambda z: 0.75 * z.square().sum(1),
        "squares": lambda z: F.mse_loss(z, target, reduction="none").sum(1) / 3,
        "two": lambda z: F.cross_entropy(z, y, reduction="none") + 0.1 * z.square().sum(1),
    }[kind]
    mean = {
        "cross entropy": lambda z: F.cross_entropy(z, y),
        "mean": lambda z: F.cross_entropy(z, y, reduction="none").mean(),
        "by hand": lambda z: z.square().sum(1).sum() / rows,
        "times constants": lambda z: z.square().sum(1).mean() / 4 * 3.0,
        "squares": lambda z: F.mse_loss(z, target),
        "two": lambda z: F.cross_entropy(z, y) + 0.1 * z.square().sum(1).mean(),
    }[kind]
    with (
        GhostClipper(model, 0.1) as clipper,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"),
    ):
        wanted = clipper.backward(each(model(x)))
        mean(model(x)).backward()
        got = clipper.take()
    assert torch.equal(got.norms, wanted.norms)
    assert deviation(got.grads, wanted.grads) == 0


@pytest.mark.parametrize("rows", [1, 3, 33, 257, 1000])
def test_one_more_example_leaves_the_others_gradients(rows: int) -> None:
    """Of an example that is not finite, and so dropped, nothing is left at all."""
    torch.manual_seed(0)
    model = nn.Linear(1, CLASSES)
    x, y = torch.randn(rows + 1, 1), torch.randint(0, CLASSES, (rows + 1,))
    x[rows] = float("nan")
    with GhostClipper(model, 0.1) as clipper:
        F.cross_entropy(model(x), y).backward()
        more = clipper.take().grads
        F.cross_entropy(model(x[:rows]), y[:rows]).backward()
        less = clipper.take().grads
    assert deviation(more, less) == 0


def test_a_graph_kept_for_later_and_several_losses() -> None:
    model, x, y = make()
    with GhostClipper(model, 0.3) as clipper:
        z = model(x)
        torch.autograd.backward([F.cross_entropy(z.mean(1), y), 0.5 * z.square().mean()], retain_graph=True)
        both = clipper.take().grads
        (F.cross_entropy(z := model(x).mean(1), y) + 0.5 * 0).backward()
        clipper.take()
        with pytest.raises(RuntimeError, match=r"gradient=\.\.\."):
            model(x).mean().backward(torch.tensor(3.0).double())
    expected, _ = one_example_loop(
        model, lambda m, x, y: (F.cross_entropy(m(x).mean(1), y) + 0.5 * m(x).square().mean()).reshape(1), x, y, 0.3
    )
    assert deviation(both, expected) < 1e-9
