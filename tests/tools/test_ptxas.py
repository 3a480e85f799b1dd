"""tools/ptxas.py on reports as ptxas writes them."""

import pytest

from tools import ptxas

NAME = "_ZN3dpk12_GLOBAL__N_111some_kernelILi8ENS_4halfEEEvNS_6ParamsIT0_EE"
SOURCE = "// Adds.{comment}\ntemplate <int kTeam, typename T>\n__global__ void some_kernel(Params<T> q) {{ {body} }}\n"


def report(*, stack: int = 0, spills: int = 0, registers: int = 40, shared: str = ", 128 bytes smem") -> str:
    return f"""ptxas info    : Compiling entry function '{NAME}' for 'sm_80'
ptxas info    : Function properties for {NAME}
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers{shared}, 448 bytes cmem[0]
"""


def kernel(text: str, *, bounds: str = "\n.maxntid 256, 1, 1", comment: str = "", body: str = "") -> ptxas.Kernel:
    ptx = f".visible .entry {NAME}(\n\t.param .align 8 .b8 x[88]\n){bounds}\n"
    (only,) = ptxas.parse(text, ptx, SOURCE.format(comment=comment, body=body))
    return only


def test_a_report_is_read() -> None:
    found = kernel(report())
    assert found == ptxas.Kernel("some_kernel<8, half>", "sm_80", 256, 40, 128, 0, 0, 0, cold=False)
    assert found.faults() == []
    assert found.occupancy == 0.75
    assert kernel(report(shared="")).static_shared == 0


@pytest.mark.parametrize(
    ("registers", "dynamic", "occupancy"),
    [(32, 0, 1.0), (33, 0, 0.75), (128, 0, 0.25), (255, 0, 0.125), (32, 81_000, 0.25), (32, 170_000, 0.0)],
)
def test_occupancy(registers: int, dynamic: int, occupancy: float) -> None:
    comment = f" Dynamic shared memory: {dynamic} bytes."
    assert kernel(report(registers=registers, shared=""), comment=comment).occupancy == occupancy


def test_faults_are_named() -> None:
    assert kernel(report(stack=32, spills=48)).faults() == [
        "some_kernel<8, half> (sm_80) uses 32 bytes of local memory, 48 of them for spilled registers"
    ]
    assert kernel(report(stack=32), comment=" Cold: a millionth of all values.").faults() == []
    assert kernel(report(), bounds="").faults() == ["some_kernel<8, half> (sm_80) gives no __launch_bounds__"]
    assert kernel(report(), comment=" Dynamic shared memory: 170000 bytes.").faults() == [
        "some_kernel<8, half> (sm_80) does not fit on a multiprocessor"
    ]
    with pytest.raises(ValueError, match="say above it 'Dynamic shared memory: N bytes'"):
        kernel(report(), body="DPK_DYNAMIC_SHARED(float, all);")


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read ptxas's report"):
        kernel("ptxas info    : Compiling entry function 'x' for 'sm_80'\n")
