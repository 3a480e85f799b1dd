"""Real data sets in memory, and Poisson sampling of logical batches."""

from dpkernels.data.images import ImageDataset, ImageSplit
from dpkernels.data.load import dataset_names, load_dataset

__all__ = ["ImageDataset", "ImageSplit", "dataset_names", "load_dataset"]
