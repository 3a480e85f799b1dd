"""Selected weights as a model's only trainable ones: through the engine and optimizers, and back."""

import pytest
import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels.transfer.sparse import SparseConv2d, SparseLinear, densify, sparsify
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop


class Block(nn.Module):
    """A residual block with group norm, whose second convolution is not selected from."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut = nn.Conv2d(channels, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU())
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, Block(8, 12), pooled, nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))


def masks_of(model: nn.Module, share: float) -> dict[str, Tensor]:
    """Weights of the convolutions but one, and of the first linear layer; no weight of the first outputs."""
    masks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and name not in ("1.conv2", "5"):
            mask = torch.rand(module.weight.shape) < share
            mask[0] = share >= 1
            masks[f"{name}.weight"] = mask
    return masks


def prepared(share: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Classifier, normalization and selected weights trainable; all else frozen, biases of convolutions too."""
    model = network()
    masks = masks_of(model, share)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.requires_grad_(True)
    model[5].requires_grad_(True)
    sparsify(model, masks)
    return model, masks


@pytest.mark.parametrize("share", [0.05, 0.4, 1, 0])
def test_the_engine_clips_what_is_selected(share: float) -> None:
    model, masks = prepared(share)
    model.double()
    x, y = torch.randn(6, 3, 9, 8).double(), torch.randint(0, 3, (6,))
    _, norms = one_example_loop(model, cross_entropy, x, y, 1.0)
    bound = float(norms.median())
    expected, norms = one_example_loop(model, cross_entropy, x, y, bound)
    assert sum(p.numel() for name, p in model.named_parameters() if "values" in name) == sum(
        int(m.sum()) for m in masks.values()
    )
    with dpk.GhostClipper(model, bound) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert {name for name in result.grads if "values" in name} == {n.replace("weight", "values") for n in masks}
    assert "1.conv2.weight" not in result.grads
    assert deviation(result.grads, expected) < 1e-10
    torch.testing.assert_close(result.norms, norms, rtol=1e-10, atol=0)


def test_an_example_that_is_not_finite_is_left_out() -> None:
    model, _ = prepared(0.3)
    x, y = torch.randn(6, 3, 9, 8), torch.randint(0, 3, (6,))
    with dpk.GhostClipper(model, 0.5) as clipper:
        without = clipper.backward(cross_entropy(model, x[[0, 1, 3, 4, 5]], y[[0, 1, 3, 4, 5]]))
        x[2, 0, 3, 3] = torch.nan
        result = clipper.backward(cross_entropy(model, x, y))
    assert not result.norms[2].isfinite()
    assert deviation(result.grads, without.grads) < 1e-6


@pytest.mark.parametrize("share", [0.1, 0])
@pytest.mark.parametrize("optimizer", ["sgd", "wrapped"])
def test_only_what_is_selected_is_trained_and_densify_goes_back(share: float, optimizer: str) -> None:
    model = network()
    names, weights = list(model.state_dict()), {name: p.clone() for name, p in model.state_dict().items()}
    masks = masks_of(model, share)
    x, y = torch.randn(6, 3, 9, 8), torch.randint(0, 3, (6,))
    output = model(x)
    sparsify(model, masks)
    assert torch.equal(model(x), output)
    model[1].conv2.requires_grad_(False)
    settings = {"noise_multiplier": 1.0, "batch_size": 6, "max_grad_norm": 0.5}
    private = (
        dpk.DPSGD(model, lr=0.3, momentum=0.9, **settings)
        if optimizer == "sgd"
        else dpk.DPOptimizer(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]), **settings)
    )
    for _ in range(2):
        private.backward(cross_entropy(model, x, y))
        private.step()
        private.zero_grad()
    trained = model(x)
    private.clipper.detach()
    densify(model)
    assert list(model.state_dict()) == names
    assert {type(m) for m in model.modules()}.isdisjoint({SparseConv2d, SparseLinear})
    torch.testing.assert_close(model(x), trained)
    for name, weight in model.state_dict().items():
        moved = weight != weights[name]
        frozen = name == "1.conv2.weight"
        assert torch.equal(moved, masks.get(name, torch.full_like(moved, not frozen))), name


def test_state_dicts_go_between_models_of_one_selection() -> None:
    torch.manual_seed(0)
    model = network()
    masks = masks_of(model, 0.2)
    sparsify(model, masks)
    other = network()
    sparsify(other, masks)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 9, 8)
    assert torch.equal(other(x), model(x))


def test_names_that_do_not_fit_are_refused() -> None:
    model = network()
    mask = torch.ones(12, 8, 3, 3, dtype=torch.bool)
    for name in ("1.conv1", "1.norm1.weight", "1.conv1.bias", "9.weight", "weight"):
        with pytest.raises(ValueError, match=f"masks must name weights of .*, got '{name}'"):
            sparsify(model, {"1.conv1.weight": mask, name: mask})
    with pytest.raises(ValueError, match=r"1\.conv1\.weight: mask must have the weight's shape \(12, 8, 3, 3\), got"):
        sparsify(model, {"1.conv1.weight": mask[:3]})
    with pytest.raises(TypeError, match=r"1\.conv1\.weight: mask must be bool"):
        sparsify(model, {"1.conv1.weight": mask.float()})
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="of one module each"):
        sparsify(tied, {"0.weight": torch.ones(4, 4, dtype=torch.bool)})
    assert not any(isinstance(m, SparseConv2d | SparseLinear) for m in [*model.modules(), *tied.modules()])


def test_a_module_under_two_names_stays_one() -> None:
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    sparsify(model, {"0.weight": torch.eye(4, dtype=torch.bool)})
    assert isinstance(model[0], SparseLinear)
    assert model[2] is model[0]
    densify(model)
    assert type(model[2]) is nn.Linear
    assert model[2] is model[0]
