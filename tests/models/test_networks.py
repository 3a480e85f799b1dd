"""The networks have the papers' sizes and shapes, and take empty batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpkernels import models

GRAY, COLOUR = (81, 7, 7), (243, 8, 8)


def count(model: nn.Module, *kinds: type[nn.Module]) -> int:
    """Parameters of the model, or only those of the modules of `kinds`."""
    if not kinds:
        return sum(p.numel() for p in model.parameters())
    return sum(p.numel() for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False))


@pytest.mark.parametrize(
    ("model", "exact", "printed"),
    [
        (models.mnist_cnn(), 26_010, "26K"),
        (models.cifar10_cnn(), 550_570, "551K"),
        (models.cifar10_cnn("small"), 167_642, "168K"),
        (models.scatternet_linear(GRAY), 39_700, "40K"),
        (models.scatternet_linear(COLOUR, 27), 155_530, "156K"),
        (models.scatternet_cnn(GRAY), 33_066, "33K"),
        (models.scatternet_cnn(COLOUR, 27), 187_210, "187K"),
    ],
)
def test_parameter_counts_of_tramer_and_boneh(model: nn.Module, exact: int, printed: str) -> None:
    # Table 4 prints 155K for the linear model on (243, 8, 8), which is 155,520 weights cut off and 155,530 in all.
    assert count(model) == exact
    assert f"{round(exact / 1000)}K" == printed


def test_the_architecture_of_table_7_is_the_simple_vgg_of_appendix_h() -> None:
    vgg, cnn = models.simple_vgg((32, 64, 128), 2, 128), models.cifar10_cnn("large")
    assert [repr(layer) for layer in vgg] == [repr(layer) for layer in cnn]
    assert [layer.out_channels for layer in vgg if isinstance(layer, nn.Conv2d)] == [32, 32, 64, 64, 128, 128]


@pytest.mark.parametrize(
    ("channels", "depth", "convolutions", "flat"),
    [((32, 64), 2, 4, 64 * 8 * 8), ((8,), 3, 3, 8 * 16 * 16), ((4, 8, 16, 32), (1, 2, 1, 3), 7, 32 * 2 * 2)],
)
def test_simple_vgg_width_and_depth(
    channels: tuple[int, ...], depth: int | tuple[int, ...], convolutions: int, flat: int
) -> None:
    model = models.simple_vgg(channels, depth, hidden=24, num_classes=7)
    assert sum(isinstance(layer, nn.Conv2d) for layer in model) == convolutions
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in model) == len(channels)
    heads = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [(head.in_features, head.out_features) for head in heads] == [(flat, 24), (24, 7)]


def test_resnet_sizes_agree_with_the_published_networks() -> None:
    # Convolutions and classifier are those of version 1 (11,689,512 and 25,557,032 parameters, of which 9,600 and
    # 53,120 belong to normalization layers); only the places and sizes of the normalization layers differ.
    weights = (nn.Conv2d, nn.Linear)
    with torch.device("meta"):
        small, large = models.resnet18(), models.resnet50()
    assert count(small, *weights) == 11_689_512 - 9_600
    assert count(large, *weights) == 25_557_032 - 53_120
    # One normalization stands before each of the 16 3x3 convolutions, of its input channels, and one before the mean.
    normalized = [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4
    assert count(small, nn.GroupNorm) == 2 * sum(normalized)
    assert count(small) == count(small, *weights, nn.GroupNorm)
    # ResNet-20 has 0.27M; 1x1 projections in the two shortcuts that change shape are ours.
    assert round(count(models.cifar_resnet(20)) - 16 * 32 - 32 * 64, -4) == 270_000
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in [*small.modules(), *large.modules()])


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        (models.mnist_cnn(), (1, 28, 28), 10),
        (models.cifar10_cnn("large"), (3, 32, 32), 10),
        (models.cifar10_cnn("small", num_classes=4), (3, 32, 32), 4),
        (models.simple_vgg((4, 8), 1, input_shape=(1, 8, 8)), (1, 8, 8), 10),
        (models.scatternet_linear(GRAY, 9), GRAY, 10),
        (models.scatternet_cnn(GRAY, nn.Identity()), GRAY, 10),
        (models.scatternet_cnn(COLOUR, 81), COLOUR, 10),
        (models.scatternet_cnn(COLOUR, variant="cifar10-small"), COLOUR, 10),
        (models.scatternet_cnn((81, 8, 8)), (81, 8, 8), 10),
        (models.scatternet_cnn((81, 8, 8), variant="mnist"), (81, 8, 8), 10),
        (models.scatternet_cnn((243, 8, 5)), (243, 8, 5), 10),
        (models.resnet18(10, stem="cifar"), (3, 32, 32), 10),
        (models.resnet50(5, stem="imagenet", in_channels=1), (1, 64, 64), 5),
        (models.linear((1, 8, 8)), (1, 8, 8), 10),
    ],
)
def test_output_shape_also_for_an_empty_batch(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    for rows in (2, 0):
        logits = model(torch.randn(rows, *shape))
        assert logits.shape == (rows, classes)
        logits.sum().backward()


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_resnet_maps_shrink_as_the_stem_says(stem: str) -> None:
    sizes = []
    model = models.resnet18(10, stem=stem)
    for layer in model:
        if isinstance(layer, nn.Sequential):
            layer.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-1]))
    model(torch.randn(1, 3, 64, 64))
    assert sizes == ([64, 32, 16, 8] if stem == "cifar" else [16, 8, 4, 2])


def test_resnet_tells_its_block_groups() -> None:
    """Stem with the first and last normalization with the last, as Kurakin et al. freeze them."""
    with torch.device("meta"):
        assert models.cifar_resnet(8).block_groups == (("0", "1"), ("2",), ("3", "4", "5", "6"))
        assert models.resnet18(stem="imagenet").block_groups[0] == ("0", "1", "2")
        assert models.resnet50(stem="cifar").block_groups[1:3] == (("2",), ("3",))


def test_resnet_is_pre_activation() -> None:
    """Where shapes agree, zeroing the last convolution makes a block the identity, which version 1 is not."""
    block = models.resnet18(10, stem="cifar")[1][0]
    nn.init.zeros_(block.residual[-1].weight)
    x = torch.randn(2, 64, 4, 4)
    assert torch.equal(block(x), x)


def test_every_example_stands_alone() -> None:
    """Row 0 of a batch comes out the same whatever the other rows hold."""
    for name, shape in [("mnist_cnn", (1, 28, 28)), ("cifar10_cnn_small", (3, 32, 32)), ("resnet18", (3, 32, 32))]:
        model = models.create(name, shape, 10).train()
        x = torch.randn(3, *shape)
        y = torch.cat([x[:1], 100 * torch.randn(2, *shape)])
        torch.testing.assert_close(model(x)[0], model(y)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear", (1, 8, 8)),
        ("mnist-cnn", (1, 28, 28)),
        ("MNIST_CNN", (1, 28, 28)),
        ("cifar10-cnn", (3, 32, 32)),
        ("cifar10_cnn_small", (3, 32, 32)),
        ("simple-vgg", (1, 16, 24)),
        ("resnet18", (1, 32, 32)),
        ("resnet8", (1, 14, 14)),
        ("resnet20", (3, 32, 32)),
        ("resnet50", (3, 72, 72)),
    ],
)
def test_create_by_name(name: str, shape: tuple[int, ...]) -> None:
    assert models.create(name, shape, 6)(torch.randn(1, *shape)).shape == (1, 6)


def test_create_simple_vgg_of_other_sizes() -> None:
    named = models.create("simple_vgg-16x1-32x3-64", (1, 20, 20), 7)
    built = models.simple_vgg((16, 32), (1, 3), 64, num_classes=7, input_shape=(1, 20, 20))
    assert repr(named) == repr(built)
    assert repr(models.create("Simple-VGG-32x2-64x2-128x2-128", (3, 32, 32), 10)) == repr(models.cifar10_cnn())


def test_linear_standardizes_each_example_by_itself() -> None:
    model = models.linear((1, 8, 8), 3)
    nn.init.normal_(model[-1].weight)
    x = torch.rand(4, 1, 8, 8)
    flat = x.flatten(1)
    expected = (flat - flat.mean(1, keepdim=True)) / flat.var(1, keepdim=True, correction=0).add(1e-5).sqrt()
    torch.testing.assert_close(model(x), expected @ model[-1].weight.T)
    plain = models.linear((1, 8, 8), 3, standardize=False)
    assert (count(plain), count(model), len(plain)) == (195, 195, 2)


def test_create_chooses_the_stem_by_the_image_size() -> None:
    assert models.create("resnet18", (3, 64, 64), 10)[0].kernel_size == (3, 3)
    assert models.create("resnet18", (3, 224, 224), 10)[0].kernel_size == (7, 7)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: models.create("vgg99", (3, 32, 32), 10), ValueError, "name must be one of linear, mnist_cnn"),
        (lambda: models.create("simple_vgg-32x2", (3, 32, 32), 10), ValueError, "widths, depths and hidden units"),
        (lambda: models.create("simple_vgg-0x2-9", (3, 32, 32), 10), ValueError, r"channels\[0\] must be at least 1"),
        (lambda: models.create("mnist_cnn", (1, 8, 8), 10), ValueError, r"must be \(1, 28, 28\).*got \(1, 8, 8\)"),
        (lambda: models.create("linear", (1, 8, 8), 0), ValueError, "num_classes must be at least 1, got 0"),
        (lambda: models.create("resnet18", (32, 32), 10), ValueError, "input_shape must have 3 dimensions"),
        (lambda: models.create(3, (1, 8, 8), 10), TypeError, "name must be a string, got int"),
        (lambda: models.cifar10_cnn("medium"), ValueError, "size must be 'large' or 'small', got 'medium'"),
        (lambda: models.simple_vgg((8, 8), (1,)), ValueError, "depth must be one int or one per block, got 1 for 2"),
        (
            lambda: models.simple_vgg((8,) * 4, input_shape=(1, 8, 8)),
            ValueError,
            r"input_shape \(1, 8, 8\) is too small",
        ),
        (lambda: models.simple_vgg((8, 2.5)), TypeError, r"channels\[1\] must be an int, got float"),
        (lambda: models.resnet18(10, stem="tiny"), ValueError, "stem must be 'cifar' or 'imagenet', got 'tiny'"),
        (lambda: models.resnet18(10, width=24), ValueError, "groups must divide 24.*got 32"),
        (lambda: models.cifar_resnet(18), ValueError, "depth must be 6 n [+] 2 with n at least 1, got 18"),
        (lambda: models.resnet18(10, groups=48), ValueError, "groups must divide 64.*got 48"),
        (lambda: models.scatternet_linear(GRAY, 7), ValueError, "groups that divides 81, got 7"),
        (lambda: models.scatternet_linear(GRAY, "bn"), TypeError, "normalization must be a number of groups.*got str"),
        (lambda: models.scatternet_cnn((80, 7, 7)), ValueError, "shape must have 81 or 243 channels"),
        (lambda: models.scatternet_cnn(GRAY, variant="big"), ValueError, "variant must be .*got 'big'"),
    ],
)
def test_bad_arguments_are_named(call: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("make", [models.scatternet_linear, models.scatternet_cnn])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_networks_on_features_refuse_the_shape_of_images(
    make: Callable[..., nn.Module], shape: tuple[int, int, int]
) -> None:
    with pytest.raises(ValueError, match=r"shape must be that of ScatterNet features, got .* that of images: take dpk"):
        make(shape)
