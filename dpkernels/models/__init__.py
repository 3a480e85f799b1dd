"""The networks of the papers, and what makes another network fit for private training."""

from dpkernels.models.batch_norm import replace_batch_norm
from dpkernels.models.logistic import linear
from dpkernels.models.registry import create, names
from dpkernels.models.resnet import cifar_resnet, resnet18, resnet50
from dpkernels.models.scatternet import scatternet_cnn, scatternet_linear
from dpkernels.models.tanh_cnn import cifar10_cnn, mnist_cnn, simple_vgg

__all__ = [
    "cifar10_cnn",
    "cifar_resnet",
    "create",
    "linear",
    "mnist_cnn",
    "names",
    "replace_batch_norm",
    "resnet18",
    "resnet50",
    "scatternet_cnn",
    "scatternet_linear",
    "simple_vgg",
]
