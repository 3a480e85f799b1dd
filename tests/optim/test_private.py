"""The private optimizers: torch's updates without noise, the right noise with it, one step a logical batch."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from dpkernels.accounting import Ledger, Plan, SampledGaussian, epsilon, plan
from dpkernels.data import PoissonLoader
from dpkernels.optim import DPSGD, DPAdam, DPAdamW, DPOptimizer
from dpkernels.optim.private import PrivateOptimizer
from dpkernels.random import Domain, Sample

FEATURES, CLASSES, BATCH = 5, 3, 8


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def batch(rows: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y, reduction="none")


def a_plan(**changes: object) -> Plan:
    values = {"dataset_size": 100, "batch_size": BATCH, "steps": 40, "delta": 1e-5, "noise_multiplier": 1.0} | changes
    return plan(**values)  # type: ignore[arg-type]


def announce(optimizer: PrivateOptimizer, rows: int) -> None:
    """As a loader does that drew ``rows`` examples."""
    optimizer.begin_physical_batch(rows, True, Sample(optimizer.key, optimizer.next_step))


def one_step(net: nn.Module, optimizer: PrivateOptimizer, seed: int = 0, rows: int = BATCH) -> None:
    x, y = batch(rows, seed)
    announce(optimizer, rows)
    optimizer.backward(losses(net, x, y))
    assert optimizer.step()


def assert_same(net: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


# ---- without noise: torch's own updates ------------------------------------------------------------------------------

WITHOUT_NOISE = {"noise_multiplier": 0.0, "batch_size": BATCH, "max_grad_norm": 1e6}
PAIRS = [
    (DPSGD, torch.optim.SGD, {"lr": 0.3}),
    (DPSGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    (DPSGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    (DPSGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (DPAdam, torch.optim.Adam, {"lr": 0.01}),
    (DPAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    (DPAdam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (DPAdamW, torch.optim.AdamW, {"lr": 0.01}),
    (DPAdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("private", "ordinary", "options"), PAIRS)
@pytest.mark.parametrize("way", ["losses", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_equals_torch(private: type, ordinary: type, options: dict, way: str, dtype: torch.dtype) -> None:
    net, twin = model().to(dtype), model().to(dtype)
    reduction = {} if way == "losses" else {"loss_reduction": way}
    optimizer = private(net, **options, **WITHOUT_NOISE, **reduction)
    reference = ordinary(twin.parameters(), **options)
    for seed in range(5):
        x, y = batch(seed=seed)
        x = x.to(dtype)
        if way == "losses":
            optimizer.backward(losses(net, x, y))
        else:
            value = losses(net, x, y)
            (value.mean() if way == "mean" else value.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        reference.zero_grad()
        losses(twin, x, y).mean().backward()
        reference.step()
    assert_same(net, twin)


@pytest.mark.parametrize("make", [lambda p: torch.optim.RMSprop(p, lr=0.01), lambda p: torch.optim.NAdam(p, lr=0.01)])
def test_wraps_any_torch_optimizer(make: object) -> None:
    net, twin = model(), model()
    optimizer = DPOptimizer(net, make(net.parameters()), **WITHOUT_NOISE)  # type: ignore[operator]
    reference = make(twin.parameters())  # type: ignore[operator]
    for seed in range(4):
        x, y = batch(seed=seed)
        optimizer.zero_grad()
        optimizer.backward(losses(net, x, y))
        optimizer.step()
        reference.zero_grad()
        losses(twin, x, y).mean().backward()
        reference.step()
    assert_same(net, twin)


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameter_groups_and_schedulers(wrapped: bool) -> None:
    def groups(m: nn.Sequential) -> list[dict]:
        return [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters(), "momentum": 0.5}]

    net, twin = model(), model()
    reference = torch.optim.SGD(groups(twin), lr=0.3, momentum=0.9)
    if wrapped:
        optimizer = DPOptimizer(net, torch.optim.SGD(groups(net), lr=0.3, momentum=0.9), **WITHOUT_NOISE)
    else:
        optimizer = DPSGD(net, params=groups(net), lr=0.3, momentum=0.9, **WITHOUT_NOISE)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 6) for o in (optimizer, reference)]
    for seed in range(5):
        x, y = batch(seed=seed)
        optimizer.backward(losses(net, x, y))
        optimizer.step()
        reference.zero_grad()
        losses(twin, x, y).mean().backward()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    assert_same(net, twin)


def test_freezing_between_steps() -> None:
    net, twin = model(), model()
    optimizer, reference = (
        DPSGD(net, lr=0.3, momentum=0.9, **WITHOUT_NOISE),
        torch.optim.SGD(twin.parameters(), 0.3, 0.9),
    )
    for seed, trainable in enumerate([True, False, True]):
        x, y = batch(seed=seed)
        for m in (net, twin):
            m[0].requires_grad_(trainable)
        optimizer.backward(losses(net, x, y))
        optimizer.step()
        reference.zero_grad()
        losses(twin, x, y).mean().backward()
        reference.step()
    assert_same(net, twin)


def test_freezing_within_a_logical_batch_discards_it() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.3, max_grad_norm=1.0)
    sample = Sample(optimizer.key, 0)
    for trainable in (True, False):
        net[0].requires_grad_(trainable)
        optimizer.begin_physical_batch(BATCH, False, sample)
        if trainable:
            optimizer.backward(losses(net, *batch()))
    with pytest.raises(RuntimeError, match="frozen or unfrozen within a logical batch; the batch is discarded"):
        optimizer.backward(losses(net, *batch()))
    optimizer.backward(losses(net, *batch(3)))  # another number of rows: nothing is announced any more
    assert optimizer.step()
    assert optimizer.key.free(Domain.SAMPLING) == 0


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
def test_an_empty_batch_is_noise_of_the_right_size(kind: str) -> None:
    """Case: the update is noise only, of standard deviation sigma B_C / expected batch size, and the step is spent."""
    net = nn.Linear(100, 80)
    before = copy.deepcopy(net)
    the_plan = a_plan(noise_multiplier=2.0)
    if kind == "sgd":
        optimizer = DPSGD(net, the_plan, lr=1.0, max_grad_norm=0.5)
    else:
        optimizer = DPOptimizer(net, torch.optim.SGD(net.parameters(), 1.0), the_plan, max_grad_norm=0.5)
    announce(optimizer, 0)
    optimizer.step()  # no backward is needed where there is nothing to differentiate
    moves = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), before.parameters(), strict=True)]).double()
    expected = 2.0 * 0.5 / BATCH
    assert abs(float(moves.std()) / expected - 1) < 0.03  # 8,080 values: 4 standard errors
    assert abs(float(moves.mean())) < 5 * expected / math.sqrt(moves.numel())
    assert optimizer.epsilon() == pytest.approx(
        epsilon(noise_multiplier=2.0, sampling_rate=0.08, steps=1, delta=1e-5), rel=1e-6
    )


def test_noise_is_new_at_every_step_and_for_every_optimizer() -> None:
    moves = []
    for _ in range(2):
        net = nn.Linear(30, 30)
        optimizer = DPSGD(net, a_plan(), lr=1.0, max_grad_norm=1.0)
        for _ in range(2):
            before = net.weight.detach().clone()
            announce(optimizer, 0)
            optimizer.step()
            moves.append((net.weight.detach() - before).flatten())
    correlations = torch.corrcoef(torch.stack(moves)) - torch.eye(4)
    assert float(correlations.abs().max()) < 0.2


def test_a_seed_repeats_the_noise_and_is_not_private() -> None:
    nets = [model(), model()]
    for net in nets:
        optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0, seed=7)
        one_step(net, optimizer)
    assert_same(*nets, tolerance=0)
    assert "not private" in optimizer.privacy_statement().lower()


def test_the_divisor_is_the_expected_batch_size() -> None:
    """Case: data sets of N and N - 1 examples share q and denominator, and the actual batch size divides nothing."""
    x, y = batch(3)
    net, twin = model(), model()
    for m, size in ((net, 3), (twin, 6)):
        optimizer = DPSGD(m, lr=1.0, noise_multiplier=0.0, batch_size=size, max_grad_norm=1e6)
        optimizer.backward(losses(m, x, y))
        optimizer.step()
    start = model()
    for p, q, s in zip(net.parameters(), twin.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(p - s, 2 * (q - s), rtol=1e-4, atol=1e-6)


# ---- logical and physical batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["losses", "mean"])
def test_physical_batches_add_up(way: str) -> None:
    x, y = batch()
    results = []
    for sizes in ([8], [4, 4], [3, 5], [1] * 8, [0, 8], [8, 0]):
        net = model()
        optimizer = DPSGD(net, lr=1.0, noise_multiplier=0.0, batch_size=BATCH, max_grad_norm=0.3)
        start = 0
        for k, size in enumerate(sizes):
            optimizer.begin_physical_batch(size, k == len(sizes) - 1)
            value = losses(net, x[start : start + size], y[start : start + size])
            if way == "losses":
                optimizer.backward(value)
            else:
                value.mean().backward()
            before = [p.detach().clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            moved = not all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
            assert moved == (k == len(sizes) - 1), "step() acts at the end of the logical batch only"
            start += size
        assert optimizer.steps == 1
        results.append(net)
    for other in results[1:]:
        assert_same(results[0], other)


def test_misuse_raises() -> None:
    x, y = batch()
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="needs a backward"):
        optimizer.step()
    optimizer.begin_physical_batch(BATCH, False)
    with pytest.raises(ValueError, match=r"one entry for each of 8 examples, got 4"):
        optimizer.backward(losses(net, x[:4], y[:4]))
    with pytest.raises(RuntimeError, match="no backward ran on the previous batch of 8"):
        optimizer.begin_physical_batch(4, True)
    optimizer.backward(losses(net, x, y))
    with pytest.raises(RuntimeError, match="contribute twice"):
        optimizer.backward(losses(net, x, y))
    optimizer.step()  # no effect yet
    optimizer.begin_physical_batch(4, True)
    losses(net, x[:4], y[:4]).mean().backward()
    with pytest.raises(RuntimeError, match="contribute twice"):
        losses(net, x[:4], y[:4]).mean().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) was not called"):
        optimizer.begin_physical_batch(4, True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="needs a backward"):
        optimizer.step()


def test_a_mean_over_the_wrong_number_of_rows_raises() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    optimizer.begin_physical_batch(BATCH, True)
    x, y = batch(5)
    with pytest.raises(RuntimeError, match="mean over the 8 examples of the batch"):
        losses(net, x, y).mean().backward()


# ---- accounting ------------------------------------------------------------------------------------------------------


def test_epsilon_is_what_was_spent() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    assert optimizer.epsilon() == 0
    for k in range(3):
        one_step(net, optimizer, seed=k)
    expected = epsilon(noise_multiplier=1.0, sampling_rate=0.08, steps=3, delta=1e-5)
    assert optimizer.epsilon() == pytest.approx(expected, rel=1e-6)
    assert optimizer.epsilon(delta=1e-3) < optimizer.epsilon()
    assert "differentially private" in optimizer.privacy_statement()


def test_epsilon_needs_a_plan_and_a_loader() -> None:
    x, y = batch()
    net = model()
    optimizer = DPSGD(net, noise_multiplier=1.0, batch_size=BATCH, lr=0.1, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="without a plan"):
        optimizer.epsilon()
    optimizer.clipper.detach()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    optimizer.backward(losses(net, x, y))
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"1 of 1 steps took a batch that PoissonLoader\(dataset, plan, .* not hand out"
    ):
        optimizer.epsilon()
    assert optimizer.privacy_statement().startswith("Not private")


def test_the_budget_is_a_guard() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(steps=2), lr=0.1, max_grad_norm=1.0)
    for _ in range(2):
        one_step(net, optimizer)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match="steps are spent"):
        one_step(net, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("private", [DPSGD, DPAdam, "wrapped"])
def test_save_and_load_in_between(private: object) -> None:
    """Case: 5 + 5 steps with a save and a load between spend what 10 straight ones do; a seeded run ends alike."""

    def make(net: nn.Module) -> PrivateOptimizer:
        options = {"max_grad_norm": 1.0, "seed": 3}
        if private == "wrapped":
            return DPOptimizer(net, torch.optim.Adam(net.parameters(), 0.05), a_plan(), **options)
        return private(net, a_plan(), lr=0.05, **options)  # type: ignore[operator]

    straight = model()
    optimizer = make(straight)
    for k in range(10):
        one_step(straight, optimizer, seed=k)
    first = model()
    half = make(first)
    for k in range(5):
        one_step(first, half, seed=k)
    half.begin_physical_batch(BATCH, False)  # an unfinished logical batch is no part of the state
    half.backward(losses(first, *batch(seed=99)))
    saved = copy.deepcopy((first.state_dict(), half.state_dict()))
    second = model()
    second.load_state_dict(saved[0])
    resumed = make(second)
    resumed.load_state_dict(saved[1])
    assert resumed.epsilon() == half.epsilon()
    for k in range(5, 10):
        one_step(second, resumed, seed=k)
    assert_same(straight, second, tolerance=0)
    assert resumed.epsilon() == optimizer.epsilon()


def test_loading_an_older_state_gives_nothing_back() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    one_step(net, optimizer)
    old = optimizer.state_dict()
    one_step(net, optimizer)
    spent = optimizer.epsilon()
    optimizer.load_state_dict(old)
    assert optimizer.epsilon() == spent


def test_the_state_holds_no_key() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, momentum=0.9, max_grad_norm=1.0)
    one_step(net, optimizer)
    saved = pickle.dumps(optimizer.state_dict())
    assert bytes(optimizer.key.value.tolist()) not in saved
    loader = PoissonLoader(batch(100), a_plan(), optimizer=optimizer)
    for of in (optimizer, loader):
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict"):
                duplicate(of)


def test_a_ledger_on_disk_outlives_the_process(tmp_path: object) -> None:
    path = tmp_path / "ledger.json"  # type: ignore[operator]
    spent = []
    for _ in range(2):
        with Ledger(path, a_plan()) as ledger:
            net = model()
            optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0, ledger=ledger)
            one_step(net, optimizer)
            spent.append(ledger.events())
    assert spent == [(SampledGaussian(1.0, 0.08, 1),), (SampledGaussian(1.0, 0.08, 2),)]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "max_grad_norm must be given"),
        ({"max_grad_norm": 1.0}, "give plan, or both"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0}, "give plan, or both"),
        ({"max_grad_norm": 1.0, "noise_multiplier": -1.0, "batch_size": 4}, "noise_multiplier must be a finite number"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 0}, "batch_size must be a positive integer"),
        ({"max_grad_norm": 0.0, "noise_multiplier": 1.0, "batch_size": 4}, "max_grad_norm must"),
        ({"max_grad_norm": math.inf, "noise_multiplier": 1.0, "batch_size": 4}, "max_grad_norm=inf needs"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4, "plan": a_plan()}, "not both"),
        ({"max_grad_norm": 1.0, "plan": 3}, "plan must be a plan made by"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4, "lr": -1.0}, "lr must"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4, "momentum": -1.0}, "momentum must"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4, "nesterov": True}, "nesterov needs"),
    ],
)
def test_arguments_are_checked(options: dict, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        DPSGD(model(), **({"lr": 0.1} | options))


def test_groups_must_cover_the_model() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"freeze or add 2\.weight, 2\.bias"):
        DPSGD(net, params=net[0].parameters(), lr=0.1, **WITHOUT_NOISE)
    with pytest.raises(ValueError, match="must be parameters of model"):
        DPSGD(net, params=[*net.parameters(), nn.Parameter(torch.ones(2))], lr=0.1, **WITHOUT_NOISE)
    with pytest.raises(ValueError, match="max_grad_norm is one for all parameters"):
        DPSGD(net, params=[{"params": net.parameters(), "max_grad_norm": 1.0}], lr=0.1, **WITHOUT_NOISE)
    DPSGD(net, lr=0.1, **WITHOUT_NOISE)  # none of the failures left the model attached


def test_another_plan_does_not_bind() -> None:
    optimizer = DPSGD(model(), a_plan(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="not the optimizer's plan"):
        optimizer.bind(a_plan(steps=41))


def test_loading_a_foreign_state_raises() -> None:
    net = model()
    optimizer = DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="no entry 'privacy'"):
        optimizer.load_state_dict(torch.optim.SGD(net.parameters(), 0.1).state_dict())
    other = model()
    with pytest.raises(ValueError, match=r"saved with max_grad_norm=2\.0, this optimizer has 1\.0"):
        optimizer.load_state_dict(DPSGD(other, a_plan(), lr=0.1, max_grad_norm=2.0).state_dict())


def test_no_warnings_in_an_ordinary_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = model()
        one_step(net, DPSGD(net, a_plan(), lr=0.1, max_grad_norm=1.0))
