"""Features that an image has in common with its mirror image."""

from __future__ import annotations

import hashlib

from torch import Tensor, nn

from dpkernels.features.scatternet import ScatterNet

VERSION = 1
"""Changes whenever the same image gets other features."""


class Mirrored(nn.Module):
    """The mean of the features of an image and of its mirror image: [batch, channels, height, width] -> [batch,
    *feature_shape].

    For classes that know no left and right, as photographs of objects do not and digits do. What an example teaches a
    linear model on these features it teaches of the mirror image as well, and the part that mirroring turns around,
    which would take its share of the clipped gradient, is gone. The right half of the mean mirrors the left one but
    for a pixel, so that the left one is kept, with the middle.

    It has no parameters, depends on each example alone and costs no privacy. net: makes the features.
    """

    def __init__(self, net: ScatterNet) -> None:
        super().__init__()
        self.net = net

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one example's features; of 8 columns 5 are left, of 7 there are 4."""
        channels, height, width = self.net.feature_shape
        return channels, height, width // 2 + 1

    def forward(self, images: Tensor) -> Tensor:
        """Features of images [batch, channels, height, width]. Raises what ``net`` raises."""
        columns = self.feature_shape[2]
        mine, mirrored = (self.net(view)[..., :columns] for view in (images, images.flip(-1)))
        return (mine + mirrored) / 2

    @property
    def fingerprint(self) -> str:
        """Names the features: another one for other features of ``net``."""
        return hashlib.sha256(f"Mirrored {VERSION} {self.net.fingerprint}".encode()).hexdigest()
