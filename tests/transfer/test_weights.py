"""A public model's weights find their places by name, and what does not fit is told."""

from __future__ import annotations

import codecs
import copy
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dpkernels.transfer import load_weights
from tests.damage import COUNTS, mutations, one_outcome, outcomes


def net(classes: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.GroupNorm(2, width), nn.Flatten(), nn.Linear(4 * width, classes))


def body(model: nn.Module) -> list[torch.Tensor]:
    return [tensor for name, tensor in model.state_dict().items() if not name.startswith("3.")]


def wrapped(key: str) -> Callable[[nn.Module, Path], None]:
    return lambda model, path: torch.save({"step": 3, key: model.state_dict()}, path)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.safetensors", lambda model, path: save_model(model, str(path))),
        ("a.pt", lambda model, path: torch.save(model.state_dict(), path)),
        ("a.pt", wrapped("model")),
        ("a.pth", wrapped("state_dict")),
        ("a.pt", lambda model, path: torch.save(nn.DataParallel(model).state_dict(), path)),
        ("a.pt", lambda model, path: torch.save(AveragedModel(model).state_dict(), path)),
    ],
)
def test_every_usual_file_is_read(tmp_path: Path, name: str, save: Callable[[nn.Module, Path], None]) -> None:
    public, private = net(7), net(3)
    save(public, tmp_path / name)
    head = private[3].weight.clone()
    report = load_weights(private, tmp_path / name)
    assert all(torch.equal(mine, its) for mine, its in zip(body(private), body(public), strict=True))
    assert torch.equal(private[3].weight, head)
    assert report.complete
    assert report.matched == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert report.fresh == ("3.weight", "3.bias")
    assert report.unused == ()
    assert "4 tensors loaded" in str(report)


def test_the_classifier_too_where_nothing_is_fresh(tmp_path: Path) -> None:
    public, private = net(3), net(3)
    torch.save(public.state_dict(), tmp_path / "a.pt")
    load_weights(private, tmp_path / "a.pt", fresh=())
    assert torch.equal(private[3].weight, public[3].weight)


def test_what_does_not_fit_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    state = net(3, width=6).state_dict() | {"extra": torch.zeros(2)}
    state["1.weight"] = torch.zeros(4)
    del state["1.bias"]
    torch.save(state, tmp_path / "a.pt")
    model = net(3)
    before = [tensor.clone() for tensor in body(model)]
    with pytest.raises(ValueError, match="do not fit the model") as failure:
        load_weights(model, tmp_path / "a.pt")
    for words in ("1 tensors loaded", "0.weight 4x1x3x3, in the file 6x1x3x3", "missing in the file: 1.bias", "extra"):
        assert words in str(failure.value)
    assert all(torch.equal(now, then) for now, then in zip(body(model), before, strict=True))
    report = load_weights(model, tmp_path / "a.pt", strict=False)
    assert not report.complete
    assert report.missing == ("1.bias",)
    assert [name for name, _, _ in report.other_shape] == ["0.weight", "0.bias"]
    assert not model[1].weight.any()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        first = nn.Linear(3, 3)
        return nn.Sequential(first, nn.ReLU(), first, nn.Linear(3, 2))

    public, private = tied(), tied()
    save_model(public, str(tmp_path / "a.safetensors"))
    assert load_weights(private, tmp_path / "a.safetensors").complete
    assert torch.equal(private[2].weight, public[0].weight)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of the file was run",)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    model = net(3)
    with pytest.raises(FileNotFoundError, match="expected a file of weights"):
        load_weights(model, tmp_path / "none.pt")
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_bytes(b"no weights at all")
        with pytest.raises(ValueError, match=f"{name} must .* cannot be read"):
            load_weights(model, tmp_path / name)
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Harm(), protocol=2))
    with pytest.raises(ValueError, match="cannot be read"):
        load_weights(model, tmp_path / "b.pt")
    torch.save({"epoch": 3, "accuracy": torch.ones(())}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"must hold a state dict.*got epoch, accuracy"):
        load_weights(model, tmp_path / "c.pt")
    torch.save({"conv.weight": torch.ones(2)}, tmp_path / "d.pt")
    with pytest.raises(ValueError, match="0 tensors loaded"):
        load_weights(model, tmp_path / "d.pt", strict=False)
    broken = net(3).state_dict()
    broken["0.weight"][0] = torch.nan
    torch.save(broken, tmp_path / "e.pt")
    with pytest.raises(ValueError, match=r"must hold finite weights, got others in 0\.weight"):
        load_weights(model, tmp_path / "e.pt")
    with pytest.raises(ValueError, match="no module or parameter 'head'"):
        load_weights(model, tmp_path / "e.pt", fresh=("head",))


class Makes:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def archive(path: Path, change: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> None:
    """A file of torch.save with its parts changed."""
    torch.save(net(3).state_dict(), path)
    with zipfile.ZipFile(path) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    change(parts)
    with zipfile.ZipFile(path, "w", compression) as whole:
        for name, content in parts.items():
            whole.writestr(name, content)


def described(content: bytes) -> Callable[[dict[str, bytes]], None]:
    """Another pickle that describes the tensors."""

    def change(parts: dict[str, bytes]) -> None:
        (name,) = (name for name in parts if name.endswith("/data.pkl"))
        parts[name] = content

    return change


def numbers(size: int) -> Callable[[dict[str, bytes]], None]:
    def change(parts: dict[str, bytes]) -> None:
        (name,) = (name for name in parts if name.endswith("/data/0"))
        parts[name] = bytes(size)

    return change


def overlapping(path: Path) -> None:
    """Many entries of the archive's directory lead to the same large part."""
    archive(path, numbers(2**20))
    with zipfile.ZipFile(path, "a") as whole:
        (large,) = (entry for entry in whole.infolist() if entry.file_size == 2**20)
        for index in range(1000):
            again = copy.copy(large)
            again.filename = f"{large.filename}{index}"
            whole.filelist.append(again)
        whole._didModify = True


BOMBS: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (lambda path: archive(path, numbers(10**8), zipfile.ZIP_DEFLATED), "it is compressed"),
    "overlapping": (overlapping, "its parts are larger than the file"),
    "bytes": (
        lambda path: archive(path, described(pickle.dumps({"a": Makes(bytearray, 10**11)}, 2))),
        "it calls __builtin__.bytearray, as files of weights do not",
    ),
    "tensor": (
        lambda path: archive(path, described(pickle.dumps({"a": Makes(torch.FloatTensor, 10**11)}, 2))),
        "it calls torch.FloatTensor",
    ),
    "texts": (
        lambda path: archive(path, described(pickle.dumps({"a": Makes(codecs.encode, "a" * 10**6, "latin1")}, 2))),
        "it calls _codecs.encode",
    ),
    "instructions": (
        lambda path: archive(path, described(b"\x80\2" + b"]0" * 600_000 + b".")),
        "more than 1,048,576 instructions",
    ),
    "another protocol": (lambda path: archive(path, described(pickle.dumps({"a": OrderedDict()}, 4))), "protocol"),
    "legacy": (lambda path: path.write_bytes(pickle.dumps({"a": Makes(bytearray, 10**11)}, 2)), "bytearray"),
    "not ended": (lambda path: path.write_bytes(b"\x80\2" + b"]" * 10**6), "cannot be read"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_files_take_little_memory(tmp_path: Path, kind: str) -> None:
    make, words = BOMBS[kind]
    make(tmp_path / "a.pt")
    assert words in one_outcome(lambda: load_weights(net(3), tmp_path / "a.pt"), "a.pt", seconds=15)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    assert f"{name}: expected a regular file, got a {kind}" in one_outcome(lambda: load_weights(net(3), path), name)


def test_files_of_old_versions_are_read(tmp_path: Path) -> None:
    public, private = net(3), net(3)
    torch.save(public.state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert load_weights(private, tmp_path / "a.pt", fresh=()).complete
    assert torch.equal(private[3].weight, public[3].weight)


@pytest.mark.parametrize(
    "strange",
    [torch.zeros(4, 1, 3, 3).to_sparse(), torch.zeros(4, 1, 3, 3) * 1j, torch.zeros(4, 1, 3, 3, device="meta")],
)
def test_only_plain_tensors_are_weights(tmp_path: Path, strange: torch.Tensor) -> None:
    torch.save(net(3).state_dict() | {"0.weight": strange}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt must hold plain real tensors, got others in 0\.weight"):
        load_weights(net(3), tmp_path / "a.pt")


FILES: dict[str, tuple[str, Callable[[nn.Module, Path], None]]] = {
    "safetensors": ("a.safetensors", lambda model, path: save_model(model, str(path))),
    "torch": ("a.pt", lambda model, path: torch.save(model.state_dict(), path)),
    "torch before 1.6": (
        "a.pt",
        lambda model, path: torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False),
    ),
}


@COUNTS
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(tmp_path: Path, kind: str, count: int) -> None:
    name, save = FILES[kind]
    path = tmp_path / name
    save(net(3), path)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_weights(net(3), path)

    good = path.read_bytes()
    read(good)
    counts, wrong = outcomes(read, mutations(good, count), name)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == count
    assert counts["refused"]
