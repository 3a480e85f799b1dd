"""The group normalizations of the baseline resnet18, and a layer normalization of a sequence."""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.entry import Entry, size
from benchmarks.models import layers


def entries() -> Iterator[Entry]:
    for seen in layers(nn.GroupNorm):
        batch, channels, *image = seen.input_shape
        groups, spatial = seen.module.num_groups, image[0] * image[1]

        def arguments(batch: int = batch, channels: int = channels, groups: int = groups, spatial: int = spatial):
            x, g = torch.randn(2, batch, channels, spatial)
            statistics = torch.randn(batch, groups), torch.rand(batch, groups)
            return (x, g, *statistics, torch.randn(channels)), {}

        elements = batch * channels * spatial
        yield Entry(
            "group_norm_backward",
            f"{seen.label}: [{batch}, {channels}, {image[0]}x{image[1]}], {groups} groups",
            arguments,
            12 * elements,
            12 * elements + 8 * batch * groups + 16 * batch * channels,
        )
    batch, positions, features = 32, 128, 512
    x, g, mean = torch.randn(batch, positions, features), torch.randn(batch, positions, features), torch.randn(32, 128)
    yield Entry(
        "layer_norm_backward",
        f"sequence: [{batch}, {positions}, {features}]",
        lambda: ((x, g, mean, mean.abs() + 1, torch.randn(features)), {}),
        12 * x.numel(),
        size(x, g, x, mean, mean) + 16 * batch * features,
    )
