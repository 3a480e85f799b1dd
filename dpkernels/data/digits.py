"""scikit-learn's handwritten digits: real data that needs no download."""

from __future__ import annotations

import numpy as np

from dpkernels.data.raw import RawImages

TEST_SIZE = 360


def read_digits() -> RawImages:
    """1,797 images of 8x8 from 0 to 16 (UCI, Optical Recognition of Handwritten Digits), 1,437 train and 360 test.

    The split is fixed: the first 360 of numpy.random.RandomState(0).permutation(1797) are the test images, in that
    order (what scikit-learn's train_test_split(test_size=360, random_state=0) gives). In the order of the file writers
    follow each other, so a split by position would test on writers that training never saw.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return RawImages(images[train], labels[train], images[test], labels[test], tuple("0123456789"), largest=16)
