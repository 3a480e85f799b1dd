"""One family, one name; every operator has a schema, a fake, a reference of the same name and a test that names it."""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dpkernels import _native

ROOT = Path(__file__).parents[2]

# Where each family has a file. Folders of csrc that are no family: what families share, the build's own module, and
# what runs CUDA kernels in tests.
PLACES = {
    "csrc (kernels)": "csrc/{}/{}_cpu.cpp",
    "csrc (bridge)": "csrc/{}/{}.h",
    "csrc (binding)": "csrc/{}/{}_torch.cpp",
    "ops": "dpkernels/ops/{}.py",
    "reference": "dpkernels/reference/{}.py",
    "test": "tests/ops/test_{}.py",
    "C++ test": "tests/cpp/test_{}.cpp",
    "benchmark": "benchmarks/operators/{}.py",
}
NO_FAMILY = {"common", "host", "simt"}


def families(root: Path) -> list[str]:
    return (root / "csrc" / "families.txt").read_text().split()


def family_violations(root: Path) -> list[str]:
    """What breaks `one family, one name` in the checkout `root`."""
    listed = families(root)
    found = [f"csrc/families.txt lists {name} twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    for name in listed:
        for place, pattern in PLACES.items():
            path = pattern.replace("{}", name)
            if not (root / path).is_file():
                found.append(f"family {name} has no {place}: {path} is missing")
    folders = {path.name for path in (root / "csrc").iterdir() if path.is_dir()} - NO_FAMILY
    modules = {path.stem for path in (root / "dpkernels" / "ops").glob("*.py") if not path.stem.startswith("_")}
    references = {path.stem for path in (root / "dpkernels" / "reference").glob("*.py") if path.stem[0] != "_"}
    benchmarks = {path.stem for path in (root / "benchmarks" / "operators").glob("*.py") if path.stem[0] != "_"}
    for where, names in {
        "csrc": folders,
        "dpkernels/ops": modules,
        "dpkernels/reference": references,
        "benchmarks/operators": benchmarks,
    }.items():
        found += [f"{where} has {name}, which csrc/families.txt does not list" for name in sorted(names - set(listed))]
    return found


def operators(namespace: str) -> dict[str, torch._C.FunctionSchema]:
    """The registered operators that see tensors, by name; switches such as the instruction set have none."""
    result = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, name = qualified.partition("::")
        if space != namespace:
            continue
        name, _, overload = name.partition(".")
        schema = torch._C._get_schema(f"{namespace}::{name}", overload)
        if any("Tensor" in str(value.type) for value in [*schema.arguments, *schema.returns]):
            result[name] = schema
    return result


def has_fake(namespace: str, name: str) -> bool:
    registered = torch._library.simple_registry.singleton.find(f"{namespace}::{name}").fake_impl.kernel is not None
    return registered or torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "Meta")


def names_used(path: Path) -> set[str]:
    """Every identifier that the Python file names, attributes and imports included."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias):
            used.add(node.name)
    return used


def parameters(function: object) -> list[tuple[str, object]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def operator_violations(namespace: str, wrappers: dict[str, ModuleType], references: str, tests: Path) -> list[str]:
    """What the operators of `namespace` lack; `wrappers` is a module for each family, `references` a package."""
    found = []
    for name in sorted(operators(namespace)):
        if not has_fake(namespace, name):
            found.append(f"{name} has no fake implementation")
        homes = [family for family, module in wrappers.items() if inspect.isfunction(getattr(module, name, None))]
        if len(homes) != 1:
            found.append(f"{name} needs one wrapper of its name in ops/, found {homes or 'none'}")
            continue
        (family,) = homes
        wrapper = getattr(wrappers[family], name)
        if not wrapper.__doc__:
            found.append(f"{name} has a wrapper without a docstring")
        reference = getattr(importlib.import_module(f"{references}.{family}"), name, None)
        if reference is None:
            found.append(f"{name} has no reference of its name in {references}.{family}")
        elif parameters(reference) != parameters(wrapper):
            found.append(f"{name} and its reference take other parameters: {parameters(reference)}")
        test = tests / f"test_{family}.py"
        if not test.is_file() or name not in names_used(test):
            found.append(f"{name} is named by no test in {test.name}")
    return found


def wrappers() -> dict[str, ModuleType]:
    return {family: importlib.import_module(f"dpkernels.ops.{family}") for family in families(ROOT)}


def test_one_family_one_name() -> None:
    found = family_violations(ROOT)
    assert not found, "\n".join(["", *found])


def test_every_operator_is_complete() -> None:
    assert _native.isas()  # the library is loaded
    modules = wrappers()
    assert set(operators("dpkernels")) >= {"linear_squared_norms", "linear_clipped_sums"}
    found = operator_violations("dpkernels", modules, "dpkernels.reference", ROOT / "tests" / "ops")
    assert not found, "\n".join(["", *found])


def plant_family(root: Path, name: str) -> None:
    for pattern in PLACES.values():
        path = root / pattern.replace("{}", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("place", PLACES)
def test_a_family_without_one_of_its_files_is_found(tmp_path: Path, place: str) -> None:
    plant_family(tmp_path, "linear")
    (tmp_path / "csrc" / "families.txt").write_text("linear\n")
    assert family_violations(tmp_path) == []
    missing = PLACES[place].replace("{}", "linear")
    (tmp_path / missing).unlink()
    assert family_violations(tmp_path) == [f"family linear has no {place}: {missing} is missing"]


def test_a_family_that_is_not_listed_is_found(tmp_path: Path) -> None:
    for name in ("linear", "conv"):
        plant_family(tmp_path, name)
    (tmp_path / "csrc" / "families.txt").write_text("linear\nlinear\n")
    found = family_violations(tmp_path)
    assert found[0] == "csrc/families.txt lists linear twice"
    assert [words.split(",")[0] for words in found[1:]] == [
        "csrc has conv",
        "dpkernels/ops has conv",
        "dpkernels/reference has conv",
        "benchmarks/operators has conv",
    ]


def test_an_incomplete_operator_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("dpkernels_planted", "DEF") as library:
        library.define("double_it(Tensor x) -> Tensor")
        library.define("switch(int x) -> int")  # sees no tensor: no operator

        def double_it(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        ops, reference = ModuleType("planted_ops"), ModuleType("planted_reference.family")
        monkeypatch.setitem(sys.modules, "planted_reference.family", reference)
        assert operator_violations("dpkernels_planted", {"family": ops}, "planted_reference", tmp_path) == [
            "double_it has no fake implementation",
            "double_it needs one wrapper of its name in ops/, found none",
        ]
        ops.double_it = double_it
        assert operator_violations("dpkernels_planted", {"family": ops}, "planted_reference", tmp_path) == [
            "double_it has no fake implementation",
            "double_it has a wrapper without a docstring",
            "double_it has no reference of its name in planted_reference.family",
            "double_it is named by no test in test_family.py",
        ]
        double_it.__doc__ = "Twice x."
        torch.library.register_fake("dpkernels_planted::double_it", double_it, lib=library)
        reference.double_it = lambda y: 2 * y
        (tmp_path / "test_family.py").write_text("from ops import double_it\n")
        (found,) = operator_violations("dpkernels_planted", {"family": ops}, "planted_reference", tmp_path)
        assert found.startswith("double_it and its reference take other parameters: [('y',")
        reference.double_it = lambda x: 2 * x
        assert operator_violations("dpkernels_planted", {"family": ops}, "planted_reference", tmp_path) == []
