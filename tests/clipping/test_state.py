"""State that a forward computes and keeps is refused by module path, whatever kind it is and however it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper

FEATURES, CLASSES = 5, 3


class Keeping(nn.Module):
    """Keeps a mean over the batch in the way that it is told, and goes on with a linear layer."""

    def __init__(self, keep: Callable[[Keeping, Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.stats = nn.Module()
        self.stats.register_buffer("mean", torch.zeros(FEATURES))
        self.running = torch.zeros(FEATURES)
        self.history = [torch.zeros(FEATURES)]
        self.named = {"mean": torch.zeros(FEATURES)}
        self.began = False

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x.detach().mean(0))
        return self.inner(x)


class Parent(nn.Module):
    """No parameters of its own, so that the engine does not run it example by example."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.part = Bare(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Bare(Keeping):
    def __init__(self, keep: Callable[[Keeping, Tensor], Any]) -> None:
        super().__init__(keep)
        del self.scale
        self.register_buffer("quiet", torch.zeros(()))


def once(write: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Initialization from the first batch behind a Python flag."""

    def keep(module: Any, mean: Tensor) -> None:
        if not module.began:
            write(module, mean)
            module.began = True

    return keep


def replaced(module: Any, mean: Tensor) -> None:
    module.running = 0.9 * module.running + 0.1 * mean


def listed(module: Any, mean: Tensor) -> None:
    module.history[0] = mean


def mapped(module: Any, mean: Tensor) -> None:
    module.named["mean"] = mean


def reset(module: Any, mean: Tensor) -> None:
    with torch.no_grad():
        module.inner.bias.add_(mean)


def swapped(module: Any, mean: Tensor) -> None:
    module.mean = mean


KINDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "buffer in place": (lambda m, mean: m.mean.add_(mean), r"'part'.*buffer 'mean'|buffer 'mean' of module 'part'"),
    "buffer through data": (lambda m, mean: m.mean.data.add_(mean), "buffer 'mean' of module 'part'"),
    "buffer replaced": (swapped, r"'part'.*buffer 'mean'|buffer 'mean' of module 'part'"),
    "a child's buffer": (lambda m, mean: m.stats.mean.add_(mean), r"buffer .*mean"),
    "a child's bias": (lambda m, mean: m.inner.bias.data.copy_(mean), r"parameter 'bias' of module 'part\.inner'"),
    "a child's bias in place": (reset, r"parameter 'bias' of module 'part\.inner'"),
    "a bias at the first batch": (
        once(lambda m, mean: m.inner.bias.data.copy_(mean)),
        r"parameter 'bias' of module 'part\.inner'.*Initialize",
    ),
    "a plain attribute": (replaced, "tensor attribute 'running' of module 'part'.*local variable"),
    "an attribute in place": (lambda m, mean: m.running.add_(mean), "tensor attribute 'running' of module 'part'"),
    "a list": (listed, r"tensor attribute 'history\[0\]' of module 'part'"),
    "a dictionary": (mapped, "tensor attribute \"named\\['mean'\\]\" of module 'part'"),
}


def step(clipper: GhostClipper, model: nn.Module) -> None:
    clipper.backward(model(torch.randn(6, FEATURES) + 3).sum(1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_what_a_forward_keeps_is_refused_at_the_first_step(name: str, training: bool) -> None:
    keep, words = KINDS[name]
    model = Parent(keep).train(training)
    with GhostClipper(model, 1.0) as clipper:
        with pytest.raises(RuntimeError, match=rf"(?s){words}"):
            step(clipper, model)
        assert all(p.grad is None for p in model.parameters())


def test_hooks_that_write_are_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES))
    model[0].register_buffer("seen", torch.zeros(4))
    model.register_buffer("last", torch.zeros(CLASSES))
    for path, name in (("0", "seen"), ("", "last")):
        module = model.get_submodule(path)
        hook = module.register_forward_hook(
            lambda m, _, output, name=name: setattr(m, name, getattr(m, name) + output.detach().sum(0))
        )
        with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match=rf"buffer '[\w.]*{name}'"):
            step(clipper, model)
        hook.remove()


def test_a_module_of_its_own_parameters_that_writes_to_them() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.add_(x.mean(0))
            return x * self.weight

    model = nn.Sequential(Projected(), nn.Linear(FEATURES, CLASSES))
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match="module '0'"):
        step(clipper, model)


def test_parts_of_a_model_called_one_by_one() -> None:
    model = nn.ModuleDict({"body": Parent(lambda m, mean: m.running.add_(mean)), "head": nn.Linear(FEATURES, CLASSES)})
    with GhostClipper(model, 1.0) as clipper, pytest.raises(RuntimeError, match=r"'running' of module 'body\.part'"):
        clipper.backward(model["head"](model["body"](torch.randn(6, FEATURES))).sum(1))


def test_what_begins_later_is_found_at_a_later_check() -> None:
    calls = []

    def late(module: Any, mean: Tensor) -> None:
        calls.append(1)
        if len(calls) > 5:
            module.running.add_(mean)

    model = Parent(late)
    with GhostClipper(model, 1.0) as clipper:
        for _ in range(7):
            step(clipper, model)
        with pytest.raises(RuntimeError, match="tensor attribute 'running'"):
            step(clipper, model)


def test_a_buffer_that_is_written_later_is_found_at_the_next_step() -> None:
    calls: list[int] = []

    def late(module: Any, mean: Tensor) -> None:
        calls.append(1)
        if len(calls) > 21:
            module.mean.add_(mean)

    model = Parent(late)
    with GhostClipper(model, 1.0) as clipper:
        for _ in range(22):
            step(clipper, model)
        with pytest.raises(RuntimeError, match="buffer 'mean' of module 'part'"):
            step(clipper, model)


def test_what_others_change_between_the_steps_is_theirs() -> None:
    """An optimizer's step, a loaded state, a schedule in a buffer, a cache of what depends on no data."""

    def cache(module: Any, mean: Tensor) -> None:
        if not hasattr(module, "table"):
            module.table = torch.arange(FEATURES)

    model = Parent(cache)
    state = copy.deepcopy(model.state_dict())
    with GhostClipper(model, 1.0) as clipper:
        for _ in range(9):
            model(torch.randn(2, FEATURES))  # nothing comes of it
            model.load_state_dict(state)
            model.part.mean.add_(0.1)
            step(clipper, model)
            with torch.no_grad():
                model.part.inner.weight.mul_(0.9)
            model.part.stats.mean += 1


def test_random_states_and_other_models_are_left_alone() -> None:
    other, before = Parent(replaced), set(torch.nn.modules.module._global_forward_pre_hooks)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))
    with GhostClipper(model, 1.0) as clipper:
        other(torch.randn(4, FEATURES))
        step(clipper, model)
        other(torch.randn(4, FEATURES))
    assert set(torch.nn.modules.module._global_forward_pre_hooks) <= before
