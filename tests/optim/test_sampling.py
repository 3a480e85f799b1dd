"""What a step was sampled with: one sample a step, each used once, and every other step is told apart."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkernels as dpk
from dpkernels.accounting import Ledger, Plan, SampledGaussian
from dpkernels.data import PoissonLoader, poisson_sample
from dpkernels.optim import DPSGD
from dpkernels.optim.private import PrivateOptimizer
from dpkernels.random import Domain, Key, Sample

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("no epsilon will be stated", "delta=0.001")]

SIZE, BATCH, STEPS = 40, 8, 12


def make_plan(**changes: object) -> Plan:
    values = {"dataset_size": SIZE, "batch_size": BATCH, "steps": STEPS, "delta": 1e-3, "noise_multiplier": 0.08}
    return dpk.plan(**(values | changes), accountant="rdp")  # type: ignore[arg-type]


class Counting:
    """A model whose update tells, whatever the noise, how often each example was in the sum: gradient i is e_i."""

    def __init__(self, plan: Plan, **options: object) -> None:
        self.plan = plan
        self.model = nn.Linear(SIZE, 1, bias=False)
        self.optimizer = DPSGD(self.model, plan, lr=1.0, max_grad_norm=1.0, **options)
        self.before = self.model.weight.detach().clone()

    def data(self) -> Tensor:
        return torch.eye(SIZE)

    def loader(self, physical: int | None = None, **options: object) -> PoissonLoader:
        return PoissonLoader(self.data(), self.plan, optimizer=self.optimizer, physical_batch_size=physical, **options)

    def use(self, x: Tensor) -> list[int] | None:
        """The examples in the sum of the step, where it acted."""
        self.optimizer.backward(self.model(x).squeeze(1))
        return self.step()

    def step(self) -> list[int] | None:
        if not self.optimizer.step():
            return None
        counts = ((self.before - self.model.weight.detach())[0] * BATCH).round().long()
        self.before = self.model.weight.detach().clone()
        assert set(counts.tolist()) <= {0, 1}, "an example is in a sum more than once"
        return counts.nonzero().squeeze(1).tolist()


def sample(key: Key, plan: Plan, step: int) -> list[int]:
    return poisson_sample(key, step, SIZE, plan.sampling_rate).tolist()


@pytest.mark.filterwarnings("ignore:nothing is left")
@pytest.mark.parametrize("seed", range(12))
def test_no_sample_is_taken_twice_whatever_loaders_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders made anew, left at any point, peeked into and taken in turns; public steps, older states, resumed runs.

    Every step that counts as sampled has exactly the sample of its own number, which no other step has, and epsilon is
    that of the steps that were taken, or refused for those that no loader sampled.
    """
    monkeypatch.setattr(Ledger, "epsilon", lambda self, delta: float(self.steps))
    chance, plan = random.Random(seed), make_plan(steps=30)
    run, taken, foreign, acted = Counting(plan), set(), 0, 0
    states = [copy.deepcopy(run.optimizer.state_dict())]
    loaders = [run.loader()]

    def went(step: int, found: list[int] | None) -> None:
        nonlocal acted
        if found is not None:
            assert found == sample(run.optimizer.key, plan, step)
            assert (id(run.optimizer.key), step) not in taken
            taken.add((id(run.optimizer.key), step))
            acted += 1

    keys = [run.optimizer.key]  # so that no id is used again
    while run.optimizer.next_step < plan.steps:
        what = chance.choice(
            ["loop"] * 6 + ["next"] * 3 + ["anew", "peek", "take", "public", "older", "resume", "half"]
        )
        loader = chance.choice(loaders)
        step = run.optimizer.next_step
        if what in ("loop", "take"):
            batches = loader.take(chance.randrange(3)) if what == "take" else islice(loader, chance.randrange(1, 5))
            for x in batches:
                step = run.optimizer.next_step
                if chance.random() < 0.2:
                    break  # handed out and not used
                went(step, run.use(x))
        elif what == "next":
            try:
                x = next(loader)
            except (RuntimeError, StopIteration):
                continue  # within a logical batch that another loader began, or before the last batch was used
            went(step, run.use(x))
        elif what == "anew":
            loaders.append(run.loader(chance.choice([None, 1, 3, 100]), steps=chance.choice([None, 0, 1])))
            loaders = loaders[-3:]
        elif what == "peek":
            for x in islice(loader, 1):
                run.model(x)
        elif what == "public":
            run.optimizer.discard()
            found = run.use(torch.eye(SIZE)[: chance.randrange(1, 4)])
            assert found is not None
            foreign += 1
            acted += 1
        elif what == "half":
            run.optimizer.discard()
        elif what == "older":
            run.optimizer.load_state_dict(chance.choice(states))
        elif what == "resume" and not foreign:
            state, weights = copy.deepcopy(run.optimizer.state_dict()), run.model.state_dict()
            spent = run.optimizer.next_step
            run = Counting(plan)
            run.model.load_state_dict(weights)
            run.before = run.model.weight.detach().clone()
            run.optimizer.load_state_dict(state)
            assert run.optimizer.next_step == spent
            loaders, states = [run.loader()], []
            keys.append(run.optimizer.key)
        states.append(copy.deepcopy(run.optimizer.state_dict()))
        if not any(loader._limit > loader._handed for loader in loaders):
            loaders.append(run.loader())
        assert run.optimizer.next_step == acted
        if foreign:
            with pytest.raises(RuntimeError, match=f"{foreign} of {acted} steps took a batch"):
                run.optimizer.epsilon()
            assert run.optimizer.privacy_statement().startswith(f"Not private: {foreign} of {acted} steps")
        else:
            assert run.optimizer.epsilon() == acted
    assert len(taken) + foreign == acted == plan.steps
    with pytest.warns(UserWarning, match="nothing is left"):
        assert list(run.loader()) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_made_anew_goes_on_where_the_optimizer_stands(workers: int) -> None:
    """Also where workers had fetched what nobody was handed: it is drawn again, at its own step."""
    run = Counting(make_plan())
    found = []
    while run.optimizer.next_step < STEPS:
        for number, x in enumerate(run.loader(5, num_workers=workers)):
            if number == 7:
                break  # in the middle of a logical batch, or before its first use
            found.append(run.use(x))
    assert [it for it in found if it is not None] == [sample(run.optimizer.key, run.plan, s) for s in range(STEPS)]


def test_loaders_of_one_optimizer_may_take_turns() -> None:
    run = Counting(make_plan())
    pair = [run.loader(), run.loader(num_workers=1)]
    for step in range(STEPS):
        assert run.use(next(pair[step // 3 % 2])) == sample(run.optimizer.key, run.plan, step)
    assert run.optimizer.epsilon() > 0
    with pytest.raises(StopIteration):
        next(pair[0])


def test_another_loader_begins_the_logical_batch_again() -> None:
    """What was accumulated of it goes, and the loader that was left cannot go on within it."""
    run = Counting(make_plan(), seed=1)
    first, second = run.loader(3), run.loader(2)
    assert run.use(next(first)) is None
    found = None
    while found is None:
        found = run.use(next(second))
        if found is None:
            with pytest.raises(RuntimeError, match="not of the logical batch at hand"):
                next(first)
    assert found == sample(run.optimizer.key, run.plan, 0)
    for x in first:  # a new loop begins where the optimizer stands
        found = run.use(x)
    assert found == sample(run.optimizer.key, run.plan, STEPS - 1)
    assert run.optimizer.next_step == STEPS


def test_a_batch_that_was_looked_at_comes_again() -> None:
    run = Counting(make_plan())
    loader = run.loader()
    (peeked,) = islice(loader, 1)
    run.model(peeked)
    assert torch.equal(next(iter(loader)), peeked)
    assert [run.use(x) for x in loader] == [sample(run.optimizer.key, run.plan, step) for step in range(STEPS)]


def test_a_skipped_batch_and_a_missing_step_raise() -> None:
    run = Counting(make_plan(batch_size=SIZE))  # whole batches: sizes never tell
    loader = run.loader(SIZE // 2)
    next(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no backward ran on the previous batch of 20 examples"):
            next(loader)
    for x in loader:  # begun again
        run.optimizer.backward(run.model(x).squeeze(1))
        if run.optimizer._batch.announced == (20, True):
            break
    with pytest.raises(RuntimeError, match=r"step\(\) was not called"):
        next(loader)
    run.step()
    assert run.optimizer.epsilon() > 0


def test_one_key_serves_one_optimizer() -> None:
    plan, key = make_plan(), Key.fresh()
    one, other = Counting(plan), Counting(plan)
    first, second = one.loader(key=key), other.loader(key=key)
    x = next(first)
    with pytest.raises(
        RuntimeError, match=r"the sampling stream of step 0 was drawn from this key before.*key of its own"
    ):
        next(second)
    one.use(x)
    with pytest.raises(RuntimeError, match="the sampling stream of step 0"):
        next(second)
    assert other.optimizer.next_step == 0
    # without an optimizer a loader goes on where the key stands
    alone = PoissonLoader(torch.eye(SIZE), plan, key=key)
    rows = [batch.argmax(1).tolist() for batch in alone]
    assert rows == [sample(key, plan, step) for step in range(1, STEPS)]
    with pytest.raises(ValueError, match="start_step must be at least 12, got 3: key drew the samples before that"):
        PoissonLoader(torch.eye(SIZE), plan, key=key, start_step=3)


def test_loaders_without_an_optimizer_share_no_sample() -> None:
    plan, key = make_plan(), Key.fresh()
    first, second = (PoissonLoader(torch.eye(SIZE), plan, key=key) for _ in range(2))
    next(first)
    with pytest.raises(RuntimeError, match="the sampling stream of step 0"):
        next(second)


def test_a_start_that_is_not_the_optimizers_is_refused() -> None:
    run = Counting(make_plan())
    run.use(next(run.loader()))
    assert run.loader(start_step=1).next_step == 1
    for step in (0, 5):
        with pytest.raises(ValueError, match=f"start_step must be where the optimizer stands, 1, got {step}"):
            run.loader(start_step=step)


# ---- steps that no loader sampled ------------------------------------------------------------------------------------


def _shuffled(run: Counting) -> Iterator[Tensor]:
    run.loader()  # bound, and never used
    for (x,) in DataLoader(TensorDataset(run.data()), batch_size=BATCH, shuffle=True):
        yield x


def _announced_by_hand(run: Counting) -> Iterator[Tensor]:
    for rows in (3, 5):
        run.optimizer.bind(run.plan)
        run.optimizer.begin_physical_batch(rows, True)
        yield run.data()[:rows]


@pytest.mark.parametrize(("batches", "uncovered"), [(_shuffled, 5), (_announced_by_hand, 2)])
def test_a_step_without_a_loaders_batch_is_told(batches, uncovered: int) -> None:
    run = Counting(make_plan())
    for x in batches(run):
        run.use(x)
    assert run.optimizer.steps == uncovered
    with pytest.raises(RuntimeError, match=f"epsilon is unknown: {uncovered} of {uncovered} steps took a batch that"):
        run.optimizer.epsilon()
    assert f"Not private: {uncovered} of {uncovered} steps took a batch that" in run.optimizer.privacy_statement()


def test_public_batches_and_kept_batches_between_those_of_the_loader_are_told() -> None:
    run = Counting(make_plan())
    for x in run.loader().take(3):
        run.use(x)
        run.use(torch.eye(SIZE)[:2])
    run.optimizer.begin_physical_batch(1, True)
    run.use(torch.eye(SIZE)[:1])
    with pytest.raises(
        RuntimeError,
        match=r"3 of 7 steps took a batch that PoissonLoader.* did not hand out, and 1 of 7 steps took a batch that "
        r"was announced by begin_physical_batch",
    ):
        run.optimizer.epsilon()
    kept = next(run.loader())
    run.use(kept)
    run.use(kept)
    with pytest.raises(RuntimeError, match="4 of 9 steps"):
        run.optimizer.epsilon()


def test_a_logical_batch_is_of_one_origin() -> None:
    run = Counting(make_plan(), seed=1)
    loader = run.loader(1)
    next(loader)
    run.optimizer.backward(run.model(torch.eye(SIZE)[:1]).squeeze(1))
    with pytest.raises(RuntimeError, match=r"backward ran again on a batch .* physical_batch_size"):
        run.optimizer.backward(run.model(torch.eye(SIZE)[:1]).squeeze(1))
    with pytest.raises(RuntimeError, match="not of the logical batch at hand"):
        run.optimizer.begin_physical_batch(1, True)
    run.optimizer.discard()
    run.optimizer.backward(run.model(torch.eye(SIZE)[:1]).squeeze(1))
    with pytest.raises(RuntimeError, match="backward ran on a batch that the loader did not hand out, and no step"):
        next(run.loader())


@pytest.mark.parametrize("ways", [("losses", "mean"), ("mean", "losses"), ("losses", "losses"), ("mean", "mean")])
def test_a_batch_contributes_once_however_backward_is_called(ways: tuple[str, str]) -> None:
    run = Counting(make_plan())
    x = next(run.loader())

    def all_ways() -> None:
        for way in ways:
            losses = run.model(x).squeeze(1)
            if way == "losses":
                run.optimizer.backward(losses)
            else:
                losses.mean().backward()
        run.optimizer.step()

    with pytest.raises(RuntimeError, match="contribute twice"):
        all_ways()
    assert run.optimizer.next_step == 0


def test_an_optimizer_with_the_ledger_of_another_knows_what_that_did_not_cover() -> None:
    run = Counting(make_plan())
    run.use(torch.eye(SIZE)[:2])
    run.optimizer.clipper.detach()
    later = Counting(run.plan, ledger=run.optimizer.ledger)
    assert later.use(next(later.loader())) == sample(later.optimizer.key, run.plan, 1)
    with pytest.raises(RuntimeError, match="1 of 2 steps"):
        later.optimizer.epsilon()


# ---- states ----------------------------------------------------------------------------------------------------------


def test_without_a_plan_noise_is_not_repeated_after_an_older_state() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = DPSGD(model, lr=1.0, max_grad_norm=1.0, noise_multiplier=1.0, batch_size=1)
    state, moves = copy.deepcopy(optimizer.state_dict()), []
    for _ in range(3):
        optimizer.load_state_dict(state)
        before = model.weight.detach().clone()
        optimizer.backward(model(torch.zeros(1, 4)).squeeze(1))
        optimizer.step()
        moves.append(model.weight.detach() - before)
    assert optimizer.steps == 1
    assert optimizer.key.free(Domain.NOISE) == 3
    assert not any(torch.equal(a, b) for a, b in pairwise(moves))


def test_a_seeded_run_repeats_its_steps_after_an_older_state() -> None:
    """The same samples with the same noise: the same release, in the same process too."""
    for planned in (True, False):
        plan = make_plan()
        model = nn.Linear(SIZE, 1, bias=False)
        options = {"lr": 1.0, "max_grad_norm": 1.0, "seed": 4}
        if planned:
            optimizer = DPSGD(model, plan, **options)  # type: ignore[arg-type]
        else:
            optimizer = DPSGD(model, noise_multiplier=0.08, batch_size=BATCH, **options)  # type: ignore[arg-type]
        ends = []
        states = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
        for _ in range(2):
            model.load_state_dict(states[0][0])
            optimizer.load_state_dict(states[0][1])
            batches = (
                PoissonLoader(torch.eye(SIZE), plan, optimizer=optimizer, steps=4) if planned else [torch.eye(SIZE)]
            )
            for x in batches:
                optimizer.backward(model(x).squeeze(1))
                optimizer.step()
            ends.append(model.weight.detach().clone())
        assert torch.equal(*ends)
        optimizer.clipper.detach()


@pytest.mark.parametrize("steps", [(20, 20), (5, 20), (20, 5)])
def test_the_state_of_another_run_forgets_nothing(steps: tuple[int, int]) -> None:
    """Also with as many steps: what this optimizer spent and what the state says was spent both stay."""

    def spend(size: int, count: int) -> PrivateOptimizer:
        plan = make_plan(dataset_size=size, steps=3000, noise_multiplier=1.0)
        optimizer = DPSGD(nn.Linear(3, 1), plan, lr=0.1, max_grad_norm=1.0)
        for _ in range(count):
            optimizer.begin_physical_batch(0, True, Sample(optimizer.key, optimizer.next_step))
            optimizer.step()
        return optimizer

    dear, cheap = spend(400, steps[0]), spend(2000, steps[1])
    alone = dear.epsilon(), cheap.epsilon()
    cheap.load_state_dict(dear.state_dict())
    assert sorted(event.sampling_rate for event in cheap.ledger.events()) == [0.004, 0.02]  # type: ignore[union-attr]
    assert cheap.epsilon() > max(alone)
    again = cheap.epsilon()
    cheap.load_state_dict(dear.state_dict())
    cheap.load_state_dict(cheap.state_dict())
    assert cheap.epsilon() == again  # it is known by now


def test_a_dearer_state_than_the_budget_is_refused_and_changes_nothing() -> None:
    dear = Counting(make_plan(dataset_size=SIZE, steps=100))
    dear.optimizer.begin_physical_batch(0, True, Sample(dear.optimizer.key, 0))
    dear.optimizer.step()
    state = dear.optimizer.state_dict()
    state["privacy"]["spent"] = [SampledGaussian(0.08, 0.2, 100).to_dict()]
    run = Counting(make_plan(), momentum=0.9)
    with pytest.raises(RuntimeError, match="steps are spent"):
        run.optimizer.load_state_dict(state)


def test_the_ledger_on_disk_must_know_what_a_state_spent(tmp_path: Path) -> None:
    plan = make_plan(steps=100)
    other = Counting(plan)
    for _ in range(3):
        other.optimizer.begin_physical_batch(0, True, Sample(other.optimizer.key, other.optimizer.next_step))
        other.optimizer.step()
    with Ledger(tmp_path / "ledger.json", plan) as ledger:
        run = Counting(plan, ledger=ledger)
        with pytest.raises(ValueError, match=r"more was spent than .* knows of .* 3 times.*not the ledger of that run"):
            run.optimizer.load_state_dict(other.optimizer.state_dict())


def test_steps_without_a_plan_stay_unaccounted_under_one() -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = DPSGD(model, lr=1.0, max_grad_norm=1.0, noise_multiplier=0.08, batch_size=BATCH)
    optimizer.backward(model(torch.eye(SIZE)).squeeze(1))
    optimizer.step()
    run = Counting(make_plan())
    run.optimizer.load_state_dict(optimizer.state_dict())
    run.use(next(run.loader()))
    with pytest.raises(RuntimeError, match="steps were taken without a privacy plan"):
        run.optimizer.epsilon()
