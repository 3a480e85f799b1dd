"""Learning rates over the steps of a plan."""

from __future__ import annotations

import pytest
import torch

from dpkernels.training.schedules import factor, scheduler


def rates(start_step: int, steps: int, schedule: str, warmup: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    made = scheduler(optimizer, schedule, steps=steps, warmup=warmup, start_step=start_step)
    found = []
    for _ in range(start_step, steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_constant() -> None:
    assert rates(0, 5, "constant", 0.0) == [2.0] * 5


def test_warmup_then_cosine_to_zero() -> None:
    found = rates(0, 20, "cosine", 0.2)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[4] == pytest.approx(2.0)
    assert found[12] == pytest.approx(1.0)
    assert found[4:] == sorted(found[4:], reverse=True)
    assert factor("cosine", 20, 20, 0.2) == pytest.approx(0.0)


@pytest.mark.parametrize("start", [0, 1, 7, 19, 20])
def test_a_resumed_schedule_goes_on_where_the_plan_is(start: int) -> None:
    assert rates(start, 20, "cosine", 0.25) == pytest.approx(rates(0, 20, "cosine", 0.25)[start:])


def test_each_group_keeps_its_own_rate_also_after_a_resume() -> None:
    """Also where the state that is gone on with was saved in the middle of the schedule."""

    def groups(*rates: float) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])

    optimizer = groups(0.8, 0.01)
    made = scheduler(optimizer, "cosine", steps=20, warmup=0.2)
    for step in range(7):
        now = factor("cosine", step, 20, 0.2)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.8 * now, 0.01 * now])
        optimizer.step()
        made.step()
    resumed = groups(0.8, 0.01)
    resumed.load_state_dict(optimizer.state_dict())
    scheduler(resumed, "cosine", steps=20, warmup=0.2, start_step=11)
    now = factor("cosine", 11, 20, 0.2)
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([0.8 * now, 0.01 * now])


def test_unknown() -> None:
    with pytest.raises(ValueError, match="schedule must be"):
        factor("linear", 0, 10)
