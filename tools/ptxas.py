"""Compiles kernels for every target and reads what ptxas says of them.

    python tools/ptxas.py compile csrc/norm/norm.cu build/norm.json
    python tools/ptxas.py table build/cpp/ptxas/csrc docs/gpu_kernels.md

``compile`` fails on a warning, and on a kernel that spills registers, uses local memory or gives no
``__launch_bounds__``. What a kernel's source cannot say is in the comment above it: ``Dynamic shared memory: 4096
bytes`` (at most; needed where it uses any), and ``Cold: why`` where its local memory does not matter. CMakeLists.txt
runs it for every .cu file where nvcc is found. ``table`` writes registers, shared memory and occupancy of all kernels.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# As setup.py compiles them; fused operations are those that kernels write.
FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]
# Of one multiprocessor: (registers, bytes of shared memory, threads, blocks), CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
TARGETS = {"sm_80": (65536, 164 << 10, 2048, 32), "sm_90": (65536, 228 << 10, 2048, 32)}
SYSTEM_SHARED = 1 << 10  # bytes that the system takes of each block's shared memory
DYNAMIC = re.compile(r"Dynamic shared memory: (\d+) +bytes")
COLD = re.compile(r"Cold: \S")


@dataclass
class Kernel:
    """One kernel, compiled for one target. Sizes in bytes."""

    name: str
    target: str
    threads: int
    registers: int
    static_shared: int
    dynamic_shared: int
    stack: int
    spills: int
    cold: bool

    @property
    def occupancy(self) -> float:
        """Resident threads over the most that a multiprocessor holds."""
        registers, shared, threads, blocks = TARGETS[self.target]
        warps = -(-self.threads // 32)
        of_warp = -(-self.registers * 32 // 256) * 256  # registers are given to warps in units of 256
        fitting = min(
            blocks,
            threads // (warps * 32),
            registers // of_warp // warps,
            shared // (self.static_shared + self.dynamic_shared + SYSTEM_SHARED),
        )
        return fitting * warps * 32 / threads

    def faults(self) -> list[str]:
        at = f"{self.name} ({self.target})"
        found = [] if self.threads else [f"{at} gives no __launch_bounds__"]
        if (self.stack or self.spills) and not self.cold:
            found.append(f"{at} uses {self.stack} bytes of local memory, {self.spills} of them for spilled registers")
        if self.threads and not self.occupancy:
            found.append(f"{at} does not fit on a multiprocessor")
        return found


def short(mangled: str) -> str:
    """``group_norm_backward_kernel<8, half>`` from the name that the compiler gave it."""
    name = subprocess.run(["c++filt", mangled], check=True, capture_output=True, text=True).stdout.strip()
    match = re.search(r"(\w+)(<.*>)?\(", name)
    return re.sub(r"\b(\w+|\(anonymous namespace\))::", "", match[1] + (match[2] or "")) if match else name


def comments(source: str) -> dict[str, tuple[str, str]]:
    """Kernel -> (the comment above it, its text up to the next kernel)."""
    found = {}
    heads = list(re.finditer(r"((?:^//.*\n)*)(?:^template.*\n)?^__global__[^{]*?(\w+)\s*\([^()]*\)\s*\{", source, re.M))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = source[head.end() : following.start() if following else len(source)]
        found[head[2]] = " ".join(line.removeprefix("//") for line in head[1].splitlines()), body
    return found


def parse(report: str, ptx: str, source: str) -> list[Kernel]:
    """The kernels of ptxas's report (-v), with the block sizes from the PTX and the words of the source."""
    threads = {name: int(count) for name, count in re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", ptx)}
    said = comments(source)
    kernels = []
    for part in report.split("Compiling entry function ")[1:]:
        head = re.match(r"'(\w+)' for '(\w+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if not (head and used and memory):
            raise ValueError(f"cannot read ptxas's report: {part[:300]}")
        name = short(head[1])
        comment, body = said[name.partition("<")[0]]
        dynamic = DYNAMIC.search(comment)
        if "DPK_DYNAMIC_SHARED" in body and not dynamic:
            raise ValueError(f"{name} uses dynamic shared memory: say above it 'Dynamic shared memory: N bytes'")
        static = re.search(r"(\d+) bytes smem", part)
        kernels.append(
            Kernel(
                name,
                head[2],
                threads=threads.get(head[1], 0),
                registers=int(used[1]),
                static_shared=int(static[1]) if static else 0,
                dynamic_shared=int(dynamic[1]) if dynamic else 0,
                stack=int(memory[1]),
                spills=max(int(memory[2]), int(memory[3])),
                cold=bool(COLD.search(comment)),
            )
        )
    return kernels


def compile_file(source: Path, to: Path, nvcc: str) -> list[str]:
    """Compiles one file for all targets and writes what it found to the JSON file `to`; returns the faults."""
    targets = [f"-gencode=arch=compute_{t[3:]},code={t}" for t in TARGETS]
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        depends = ["-MD", "-MT", str(to), "-MF", f"{to}.d"]
        keep = ["--keep", "--keep-dir", kept, "-c", str(source), "-o", f"{kept}/object.o"]
        includes = [f"-I{ROOT / 'csrc'}", f"-I{source.parent}"]
        command = [nvcc, *FLAGS, *targets, "-Xptxas", "-v", *includes, *depends, *keep]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            return [result.stdout + result.stderr]
        ptx = "\n".join(path.read_text() for path in Path(kept).glob("*.ptx"))
    shared = (ROOT / "csrc" / "common").glob("*.cuh")
    text = "".join(path.read_text() for path in sorted([*source.parent.glob("*.cu*"), *shared]))
    kernels = parse(result.stdout + result.stderr, ptx, text)
    faults = [fault for kernel in kernels for fault in kernel.faults()]
    if not faults:
        to.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n")
    return faults


def table(reports: list[Path]) -> str:
    """Markdown; a row for each kernel, its targets beside each other."""
    lines = [
        "# What the CUDA kernels use",
        "",
        "Written by `python tools/ptxas.py table build/cpp/ptxas/csrc docs/gpu_kernels.md` from ptxas's report.",
        "Occupancy is the share of a multiprocessor's threads that can be resident, as registers and shared memory",
        "allow. No kernel spills registers or uses local memory, but for those marked cold. Shared memory in bytes.",
        "",
        "| kernel | threads | shared memory | " + " | ".join(f"registers, occupancy ({t})" for t in TARGETS) + " |",
        "| --- | ---: | ---: | " + " | ".join("---:" for _ in TARGETS) + " |",
    ]
    written: set[str] = set()  # kernels of common/ may be in several reports
    for report in sorted(reports):
        kernels = [Kernel(**fields) for fields in json.loads(report.read_text())]
        for name in sorted({kernel.name for kernel in kernels} - written):
            written.add(name)
            of = {kernel.target: kernel for kernel in kernels if kernel.name == name}
            one = next(iter(of.values()))
            cells = [f"{of[t].registers}, {of[t].occupancy:.0%}" if t in of else "-" for t in TARGETS]
            cold = " (cold)" if one.cold else ""
            shared = one.static_shared + one.dynamic_shared
            lines.append(f"| `{name}`{cold} | {one.threads} | {shared} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compile")
    one.add_argument("source", type=Path)
    one.add_argument("report", type=Path)
    one.add_argument("--nvcc", default=shutil.which("nvcc") or "nvcc")
    all_of_them = commands.add_parser("table")
    all_of_them.add_argument("folder", type=Path)
    all_of_them.add_argument("document", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        given.document.write_text(table(list(given.folder.rglob("*.json"))))
    elif faults := compile_file(given.source, given.report, given.nvcc):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
