"""Other people's loops around the private optimizers: schedulers, closures, gradient scalers, frameworks."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpkernels as dpk
from dpkernels.data import PoissonLoader
from dpkernels.optim import DPSGD, DPAdamW, DPOptimizer
from dpkernels.optim.private import PrivateOptimizer

SIZE, STEPS = 100, 8
DATA = (torch.randn(SIZE, 5), torch.randint(0, 3, (SIZE,)))


def make_plan(batch_size: int = 20, steps: int = STEPS, size: int = SIZE) -> dpk.accounting.Plan:
    values = {"dataset_size": size, "batch_size": batch_size, "steps": steps, "delta": 1e-5}
    return dpk.plan(**values, noise_multiplier=1.0, accountant="rdp")  # type: ignore[arg-type]


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y, reduction="none")


# ---- passes and epochs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 6])
def test_a_loop_over_epochs_around_the_loader_trains_the_plan_once_and_is_told(physical: int | None) -> None:
    net, plan = nn.Linear(5, 3), make_plan()
    optimizer = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    loader = PoissonLoader(DATA, plan, optimizer=optimizer, physical_batch_size=physical)

    def epoch() -> int:
        for x, y in loader:
            optimizer.backward(losses(net, x, y))
            optimizer.step()
        return optimizer.steps

    assert epoch() == STEPS
    for _ in range(2):
        with pytest.warns(UserWarning, match="nothing is left of the loader's 8 steps"):
            assert epoch() == STEPS


@pytest.mark.parametrize("seed", range(8))
def test_epochs_are_the_steps_of_the_plan_whatever_is_left_early(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(20, 200)
    plan = make_plan(chance.randrange(1, 20), chance.randrange(1, 60), size)
    optimizer = DPSGD(nn.Linear(1, 1), plan, lr=0.1, max_grad_norm=1.0)
    data, leave = torch.randn(size, 1), chance.choice([0.0, 0.1])
    loader = PoissonLoader(data, plan, optimizer=optimizer, physical_batch_size=chance.choice([None, 3]))
    seen: list[list[int]] = []
    for batches in loader.epochs():
        seen.append([])
        for x in batches:
            assert loader.epoch == optimizer.next_step * plan.batch_size // size
            if chance.random() < leave:
                break
            optimizer.backward(optimizer.clipper.model(x).squeeze(1))
            if optimizer.step():
                seen[-1].append(loader.epoch)
    epochs = (plan.steps - 1) * plan.batch_size // size + 1
    assert len(seen) == epochs
    if not leave:
        assert all(set(each) == {epoch} for epoch, each in enumerate(seen))
        assert sum(map(len, seen)) == plan.steps
    for x in loader.take(plan.steps):  # what the last epoch left
        optimizer.backward(optimizer.clipper.model(x).squeeze(1))
        optimizer.step()
    assert optimizer.steps == plan.steps
    with pytest.warns(UserWarning, match="nothing is left"):
        assert list(loader.epochs()) == []


def test_the_length_is_what_a_pass_hands_out_or_unknown() -> None:
    plan = make_plan()
    for steps in (None, 0, 3):
        loader = PoissonLoader(DATA, plan, steps=steps)
        assert len(loader) == len(list(loader.take(STEPS))) == len(loader) == (STEPS if steps is None else steps)
    loader = PoissonLoader(DATA, plan, physical_batch_size=1000)
    with pytest.raises(TypeError, match=r"number of physical batches is not known .* loader\.plan\.steps"):
        len(loader)
    assert len(list(loader)) == STEPS


# ---- schedulers ------------------------------------------------------------------------------------------------------


def test_a_scheduler_follows_steps_that_acted() -> None:
    net, plan = nn.Linear(5, 3), make_plan()
    optimizer = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    acted = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in PoissonLoader(DATA, plan, optimizer=optimizer, physical_batch_size=6):
            optimizer.backward(losses(net, x, y))
            acted.append(optimizer.step())
            if acted[-1]:
                schedule.step()
    assert acted.count(True) == STEPS < len(acted)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**STEPS


def test_a_scheduler_that_runs_within_a_logical_batch_is_told() -> None:
    net, plan = nn.Linear(5, 3), make_plan()
    optimizer = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def train() -> None:
        for x, y in PoissonLoader(DATA, plan, optimizer=optimizer, physical_batch_size=6):
            optimizer.backward(losses(net, x, y))
            optimizer.step()
            schedule.step()

    with pytest.warns(UserWarning, match=r"learning rate changed within a logical batch: .*step\(\) returned True"):
        train()


# ---- closures and scalers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 6])
def test_a_closure_runs_once_before_the_step(physical: int | None) -> None:
    net, twin, plan = nn.Linear(5, 3), nn.Linear(5, 3), make_plan()
    twin.load_state_dict(net.state_dict())
    calls = 0
    for m in (net, twin):
        optimizer = DPSGD(m, plan, lr=0.1, max_grad_norm=1.0, seed=1)
        for x, y in PoissonLoader(DATA, plan, optimizer=optimizer, physical_batch_size=physical):
            if m is twin:
                optimizer.backward(losses(m, x, y))
                optimizer.step()
                continue

            def closure(optimizer: DPSGD = optimizer, x: Tensor = x, y: Tensor = y) -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss

            before = calls
            optimizer.step(closure)
            assert calls == before + 1
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_closure_that_fails_or_uses_the_batch_again_spends_nothing() -> None:
    net, plan = nn.Linear(5, 3), make_plan()
    optimizer = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    x, y = next(PoissonLoader(DATA, plan, optimizer=optimizer))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.backward(losses(net, x, y))
    with pytest.raises(RuntimeError, match="contribute twice"):
        optimizer.step(lambda: F.cross_entropy(net(x), y).backward())
    assert optimizer.epsilon() == 0
    assert optimizer.step(lambda: None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step\(\) needs a closure"),
        (lambda p: torch.optim.SparseAdam(list(p)), "dense gradients"),
    ],
)
def test_an_inner_optimizer_that_could_not_step_is_refused_at_construction(make: Any, words: str) -> None:
    net = nn.Linear(5, 3)
    with pytest.raises(TypeError, match=words):
        DPOptimizer(net, make(net.parameters()), make_plan(), max_grad_norm=1.0)
    DPSGD(net, make_plan(), lr=0.1, max_grad_norm=1.0)


def test_a_gradient_scaler_is_refused_before_anything_is_spent() -> None:
    net, plan, scaler = nn.Linear(5, 3), make_plan(), torch.amp.GradScaler("cpu")
    optimizer = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    x, y = next(PoissonLoader(DATA, plan, optimizer=optimizer))
    optimizer.backward(scaler.scale(losses(net, x, y)))
    with pytest.raises(RuntimeError, match=r"GradScaler scales losses before they are clipped.*leave it out"):
        scaler.step(optimizer)
    assert optimizer.epsilon() == 0
    disabled = torch.amp.GradScaler("cpu", enabled=False)  # passes everything on
    assert disabled.step(optimizer)


# ---- frameworks ------------------------------------------------------------------------------------------------------


def lightning_module(way: str, physical: int | None) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 3)
            self.automatic_optimization = way == "automatic"
            self.plan = make_plan()
            self.private = DPSGD(self.net, self.plan, lr=0.1, max_grad_norm=1.0)

        def configure_optimizers(self) -> PrivateOptimizer:
            return self.private

        def train_dataloader(self) -> PoissonLoader:
            return PoissonLoader(DATA, self.plan, optimizer=self.private, physical_batch_size=physical)

    class Automatic(Module):
        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    class Manual(Module):
        def training_step(self, batch: Any, number: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()

    class FromIterator(Module):
        def training_step(self, dataloader_iter: Any) -> None:
            (x, y), _, _ = next(dataloader_iter)
            self.private.backward(losses(self.net, x, y))
            self.private.step()

    module = {"automatic": Automatic, "manual": Manual, "iterator": FromIterator}[way]()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(module)
    return module


@pytest.mark.parametrize(("way", "physical"), [("automatic", None), ("manual", None), ("iterator", 6)])
def test_lightning_trains_the_whole_plan(way: str, physical: int | None) -> None:
    module = lightning_module(way, physical)
    assert module.private.steps == STEPS
    assert module.private.epsilon() > 0


def test_lightning_that_fetches_ahead_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a framework that fetches ahead"):
        lightning_module("manual", 6)


@pytest.mark.parametrize(
    ("physical", "arguments", "words"),
    [
        (None, {"num_train_epochs": 1}, None),
        (None, {"max_steps": STEPS}, None),
        (6, {"max_steps": 200}, None),
        (6, {"num_train_epochs": 1}, "max_steps"),
        (None, {"num_train_epochs": 1, "gradient_accumulation_steps": 2}, "accumulates gradients"),
    ],
)
def test_transformers_trains_the_whole_plan_or_refuses(
    tmp_path: Any, physical: int | None, arguments: dict[str, Any], words: str | None
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.linear(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    examples = [{"x": x, "labels": y} for x, y in zip(*DATA, strict=True)]
    net, plan = Net(), make_plan()
    optimizer = DPAdamW(net, plan, lr=1e-3, max_grad_norm=1.0)

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> PoissonLoader:
            return PoissonLoader(examples, plan, optimizer=optimizer, physical_batch_size=physical)

    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True} | arguments
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        net,
        transformers.TrainingArguments(str(tmp_path), **options),
        train_dataset=examples,
        optimizers=(optimizer, schedule),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if words is None:
            trainer.train()
            assert optimizer.steps == STEPS
        else:
            with pytest.raises((RuntimeError, ValueError), match=words):
                trainer.train()
            assert optimizer.steps == 0


def test_accelerate_passes_the_loader_on() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, net, plan = accelerate.Accelerator(cpu=True), nn.Linear(5, 3), make_plan()
    private = DPSGD(net, plan, lr=0.1, max_grad_norm=1.0)
    model, optimizer, loader = accelerator.prepare(net, private, PoissonLoader(DATA, plan, optimizer=private))
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert private.steps == STEPS
    assert private.epsilon() > 0
