"""Pickles as values: what is plain comes back, and nothing else is done."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkernels.data import load_dataset
from dpkernels.data.pickled import PickledArray, PickleError, unpickled
from tests.damage import one_outcome

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.binary(max_size=9) | st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=30,
)


@settings(deadline=None)
@given(value=values, protocol=st.sampled_from([2, 3, 4]))
def test_pickles_of_plain_values(value: object, protocol: int) -> None:
    assert unpickled(pickle.dumps(value, protocol)) == value


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["u1", "i1", "<i4", ">i8", "<u2", "<f4", "<f8"]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    protocol=st.sampled_from([2, 3, 4]),
    fortran=st.booleans(),
)
def test_pickles_of_arrays(dtype: str, shape: list[int], protocol: int, fortran: bool) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype, order="F" if fortran else "C")
    found = unpickled(pickle.dumps({b"data": [array]}, protocol))[b"data"][0]
    assert isinstance(found, PickledArray)
    np.testing.assert_array_equal(found.values, array)
    assert found.values.dtype == array.dtype


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def batch(**changes: object) -> bytes:
    content = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}
    return pickle.dumps(content | {key.encode(): value for key, value in changes.items()}, 2)


def shared_lists() -> object:
    """2^60 numbers in a file of a few bytes."""
    value: list[object] = [0, 1]
    for _ in range(60):
        value = [value, value]
    return value


PICKLES: dict[str, Callable[[], bytes]] = {
    "a program": lambda: batch(data=Call(os.mkdir, "made")),
    "a lookup": lambda: batch(data=Call(getattr, "x", "__class__")),
    "an array of terabytes": lambda: batch(data=Call(np.ndarray, (10**12,), "d")),
    "an array of objects": lambda: batch(data=np.array([Call(os.mkdir, "made")], dtype=object)),
    "an array of text": lambda: batch(data=np.array(["x" * 1000])),
    "a dtype of thousands": lambda: batch(data=Call(np.dtype, "i4," * 20_000 + "i4")),
    "shared lists": lambda: batch(labels=shared_lists()),
    "deep tuples": lambda: b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    "a memo of gigabytes": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
    "a string of gigabytes": lambda: b"\x80\x02T\xff\xff\xff\x7fabc.",
    "bytes of exabytes": lambda: b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"abc.",
    "texts made bytes again and again": lambda: (
        b"\x80\x02c_codecs\nencode\nq\0X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\1X\6\0\0\0latin1q\2"
        + 2000 * b"h\0h\1h\2\x86R" + b"."
    ),
    "millions of lists": lambda: b"\x80\x02" + b"]" * 10_000_000 + b".",
    "a shape that is none": lambda: batch().replace(b"K\x01M\x00\x0c\x86", b"J\xff\xff\xff\xffM\x00\x0c\x86"),
    "an empty stack": lambda: b"\x80\x02.",
    "text": lambda: b"<!DOCTYPE html>",
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_that_are_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (tmp_path / name).write_bytes(batch())
    assert len(load_dataset(tmp_path).train) == 5
    (tmp_path / "data_batch_2").write_bytes(PICKLES[kind]())
    words = one_outcome(lambda: load_dataset(tmp_path), "data_batch_2")
    assert "data_batch_2: expected a pickled CIFAR-10 batch" in words
    assert len(words) < 1000
    assert not (tmp_path / "made").exists()


def test_a_pickle_cannot_make_more_than_it_has() -> None:
    with pytest.raises(PickleError, match="makes more bytes than it has"):
        unpickled(PICKLES["texts made bytes again and again"]())
    with pytest.raises(PickleError, match="more than 524,288 instructions"):
        unpickled(PICKLES["millions of lists"]())
