"""The ledger's lock: whoever opens, copies, links or forks, two owners never both spend."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpkernels.accounting import Ledger, LedgerLockedError, SampledGaussian
from dpkernels.accounting import locked_file as module
from dpkernels.accounting.locked_file import LockedFile

STEP = SampledGaussian(1.0, 0.01)
LIGHT = f"""
import sys, types
package = types.ModuleType("dpkernels")  # the ledger alone: nothing heavy is imported
package.__path__ = [{str(Path(__file__).parents[2] / "dpkernels")!r}]
accounting = types.ModuleType("dpkernels.accounting")
accounting.__path__ = [package.__path__[0] + "/accounting"]
sys.modules |= {{"dpkernels": package, "dpkernels.accounting": accounting}}
from dpkernels.accounting.ledger import Ledger
from dpkernels.accounting.locked_file import LedgerLockedError
from dpkernels.accounting.mechanisms import SampledGaussian
STEP = SampledGaussian(1.0, 0.01)
"""


def elsewhere(path, code="Ledger(sys.argv[1])"):
    """The exit code and the last line of another process that opens the ledger."""
    command = [sys.executable, "-S", "-E", "-c", LIGHT + code, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return child.returncode, (child.stderr or child.stdout).strip().rpartition("\n")[2]


def refused(path):
    code, words = elsewhere(path)
    return code == 1 and "LedgerLockedError" in words and "open in another live process" in words


def shown(path):
    return sum(entry["count"] for entry in json.loads(Path(path).read_text())["entries"])


def test_the_lock_outlives_every_other_descriptor(tmp_path):
    """A lock of the process (POSIX record locks) ends when any descriptor of the file is closed in it."""
    path = tmp_path / "run" / "ledger.json"
    path.parent.mkdir()
    with Ledger(path) as ledger:
        ledger.reserve_step(STEP)
        shutil.copytree(path.parent, tmp_path / "copy")
        shutil.copy2(path, tmp_path / "backup.json")
        path.read_bytes()
        with pytest.raises(LedgerLockedError, match="already open in this process"):
            Ledger(path)
        assert refused(path)
        for _ in range(5):  # also once the file was replaced
            ledger.reserve_step(STEP)
        path.read_bytes()
        assert refused(path)
    assert elsewhere(path)[0] == 0
    assert sorted(file.name for file in path.parent.iterdir()) == ["ledger.json"]


def test_symbolic_links_lead_to_one_ledger(tmp_path):
    """Links to the file, to its folder, to links, and to a file that is not there yet."""
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "ledger.json"
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "link.json").symlink_to("b/ledger.json")
    (tmp_path / "twice.json").symlink_to(tmp_path / "link.json")
    names = [tmp_path / "twice.json", tmp_path / "b" / "ledger.json", tmp_path / "link.json", path]
    for count, opened in enumerate(names):
        with Ledger(opened) as ledger:
            assert ledger.steps == count
            assert ledger.reserve_step(STEP) == count
            for name in names:
                with pytest.raises(LedgerLockedError, match="already open in this process"):
                    Ledger(name)
                assert refused(name)
    assert [name.is_symlink() for name in names] == [True, False, True, False]
    assert (tmp_path / "b").is_symlink()
    assert shown(path) == 4


def test_hard_links_are_refused(tmp_path):
    path, other = tmp_path / "ledger.json", tmp_path / "other.json"
    ledger = Ledger(path)
    ledger.reserve_step(STEP)
    os.link(path, other)
    assert refused(other)  # the lock is of the file, not of its name
    with pytest.raises(OSError, match=r"has 2 names \(hard links\), which would become different files"):
        ledger.record(STEP, "statistics")
    assert shown(path) == shown(other) == 1
    other.unlink()
    ledger.record(STEP, "statistics")
    ledger.close()
    os.link(path, other)
    for name in (path, other):
        with pytest.raises(OSError, match="hard links"):
            Ledger(name)


@pytest.mark.parametrize("what", ["remove", "replace"])
def test_a_file_that_lost_its_place_is_not_spent_from(tmp_path, what):
    path = tmp_path / "ledger.json"
    ledger = Ledger(path)
    ledger.record(STEP, "statistics")
    if what == "remove":
        path.unlink()
        other = Ledger(path)
        other.reserve_step(STEP)
        other.close()
    else:
        shutil.copy2(path, tmp_path / "backup.json")
        os.replace(tmp_path / "backup.json", path)
    before = path.read_bytes()
    with pytest.raises(LedgerLockedError, match="was removed or replaced by somebody else"):
        ledger.reserve_step(STEP)
    assert ledger.steps == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    import fcntl

    def flock(file, how):
        raise OSError(number, os.strerror(number))

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"cannot be locked .*: keep the ledger on a local disk") as caught:
        Ledger(tmp_path / "ledger.json")
    assert caught.value.errno == number
    assert not isinstance(caught.value, LedgerLockedError)
    assert not (tmp_path / "ledger.json").exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_system_without_locks(tmp_path):
    """As on Windows: everything can be imported, and a ledger in memory be used."""
    code = "import sys; sys.modules['fcntl'] = None; import dpkernels, dpkernels.cli, dpkernels.search\n"
    code += "from dpkernels.accounting import *; Ledger().reserve_step(SampledGaussian(1.0, 0.1))\n"
    code += f"Ledger({str(tmp_path / 'ledger.json')!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.stderr.endswith(
        "OSError: a ledger on disk needs POSIX file locks (the Python module fcntl), which this system does not have: "
        "use Linux, macOS or WSL\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ends", ["clean", "killed"])
def test_forked_children_neither_hold_nor_end_the_lock(tmp_path, ends):
    """A worker that outlives a killed parent does not keep its ledger; one that ends before does not open it."""
    path = tmp_path / "ledger.json"
    code = """
import os, signal, time
ledger = Ledger(sys.argv[1])
ledger.reserve_step(STEP)
for _ in range(2):
    if os.fork() == 0:
        ledger.close()
        del ledger
        os._exit(0)
    os.wait()
    ledger.record(STEP, "statistics")
if (child := os.fork()) == 0:
    os.close(1), os.close(2)
    time.sleep(60)
print(child, flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-S", "-E", "-c", LIGHT + code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        try:
            assert refused(path)
            parent.kill() if ends == "killed" else parent.stdin.write("\n") and parent.stdin.close()
            parent.wait()
            os.kill(worker, 0)  # alive
            with Ledger(path) as ledger:
                assert ledger.steps == 1
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_fork_at_any_moment_of_a_write(tmp_path):
    """Another thread forks while the file is replaced: no child keeps a descriptor."""
    path, stop = tmp_path / "ledger.json", threading.Event()
    ledger = Ledger(path)

    def spend():
        while not stop.is_set():
            ledger.record(STEP, "statistics")

    thread = threading.Thread(target=spend)
    thread.start()
    kept, begun = [], time.monotonic()
    try:
        while time.monotonic() - begun < 1.5:
            if (child := os.fork()) == 0:
                names = []
                for descriptor in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
                os._exit(any(str(tmp_path) in name for name in names))
            kept.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        stop.set()
        thread.join()
    assert len(kept) > 5
    assert not any(kept)
    ledger.close()


def test_one_of_many_makes_the_file(tmp_path):
    """Processes that begin at once: one holds the ledger, and nothing of the others is left."""
    code = """
import time
while time.time() < float(sys.argv[2]):
    pass
try:
    ledger = Ledger(sys.argv[1])
    print("held", ledger.reserve_step(STEP), flush=True)
except LedgerLockedError:
    print("refused", flush=True)
sys.stdin.readline()
"""
    for round_ in range(4):
        path = tmp_path / f"{round_}.json"
        command = [sys.executable, "-S", "-E", "-c", LIGHT + code, str(path), str(time.time() + 1.0)]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)
        ]
        said = sorted(worker.stdout.readline().strip() for worker in workers)
        for worker in workers:
            worker.communicate("\n")
        assert said == ["held 0", *["refused"] * 4]
        assert shown(path) == 1
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def test_content_and_mode(tmp_path):
    path = tmp_path / "file"
    file = LockedFile(path, b"first")
    assert file.read() == b"first"
    path.chmod(0o600)
    file.write(b"a longer second content")
    file.write(b"third")
    assert file.read() == path.read_bytes() == b"third"
    assert path.stat().st_mode & 0o777 == 0o600
    file.close()
    file.close()
    assert LockedFile(path, b"other").read() == b"third"  # and what nobody holds any more is free
    assert LockedFile(path, b"other").read() == b"third"
    assert not module._OPEN


@pytest.mark.parametrize("closes", [False, True])
def test_a_file_that_is_replaced_between_opening_and_locking(tmp_path, monkeypatch, closes):
    import fcntl

    path, flock, calls = tmp_path / "file", fcntl.flock, []
    holder = LockedFile(path, b"old")

    def late(file, how):
        calls.append(file)
        if len(calls) == 1:
            holder.write(b"new")
            if closes:
                holder.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    if closes:
        assert LockedFile(path, b"first").read() == b"new"
    else:
        with pytest.raises(LedgerLockedError):
            LockedFile(path, b"first")
    assert len(calls) == 3


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    file = LockedFile(path, b"old")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            file.write(b"new")
    assert path.read_bytes() == file.read() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(LedgerLockedError):
        LockedFile(path, b"")
    file.write(b"new")
    assert path.read_bytes() == b"new"


WORKER = """
import os, random, shutil, time
folder, link, drawn, rng = sys.argv[1], sys.argv[2], open(sys.argv[3], "ab", buffering=0), random.Random(sys.argv[4])
path = folder + "/ledger.json"
ledger = None

def other_process():
    if os.fork() == 0:
        how = rng.randrange(4)
        try:
            if how == 0 and ledger is not None:
                drawn.write(b"%d\\n" % ledger.reserve_step(STEP))  # must not get so far
            elif how == 1:
                ledger and ledger.close()
            elif how == 2:
                open(path).close()
            else:
                time.sleep(rng.random() * 0.3)  # outlives its parent
        except Exception:
            pass
        os._exit(0)

while True:
    what = rng.randrange(12)
    try:
        if ledger is None:
            ledger = Ledger(rng.choice([path, link]))
        elif what == 0:
            Ledger(rng.choice([path, link]))  # refused while the first is open
            drawn.write(b"0\\n0\\n")  # which the test notices
        elif what == 1:
            ledger.close()
            ledger = None
        elif what == 2:
            ledger = None  # forgotten, never closed
        elif what == 3:
            shutil.copytree(folder, f"{folder}-{os.getpid()}", dirs_exist_ok=True)
        elif what == 4:
            with open(path) as file:
                file.read()
        elif what == 5:
            other_process()
        elif what == 6:
            ledger.commit()
        else:
            for _ in range(rng.randrange(30)):
                drawn.write(b"%d\\n" % ledger.reserve_step(STEP))
    except LedgerLockedError:
        time.sleep(rng.random() * 0.01)
    except OSError:
        pass  # of a copy, while the other process replaces the file
"""


@pytest.mark.parametrize("seed", range(2))
def test_random_interleavings(tmp_path, seed):
    """Of opens, second opens, copies, reads, forks, clean ends and kills, by three processes on one ledger: no index is
    handed out twice, and the file never shows fewer steps than were handed out."""
    rng = random.Random(seed)
    folder, drawn = tmp_path / "run", tmp_path / "drawn"
    folder.mkdir()
    (tmp_path / "link.json").symlink_to(folder / "ledger.json")
    drawn.touch()
    begun, workers, kills, out, before = time.monotonic(), [], 0, [], 0

    def start():
        arguments = [folder, tmp_path / "link.json", drawn, str(rng.random())]
        return subprocess.Popen([sys.executable, "-S", "-E", "-c", LIGHT + WORKER, *map(str, arguments)])

    try:
        while (kills < 15 or len(out) < 200) and time.monotonic() - begun < 120:
            workers = [worker for worker in workers if worker.poll() is None]
            while len(workers) < 3:
                workers.append(start())
            time.sleep(rng.expovariate(1 / 0.08))
            out = [int(index) for index in drawn.read_bytes().split(b"\n")[:-1]]
            if out:
                assert shown(folder / "ledger.json") > max(out)
            if len(out) > before and rng.random() < 0.7:  # on a busy machine a process takes seconds to begin
                before = len(out)
                rng.choice(workers).kill()
                kills += 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    out = [int(index) for index in drawn.read_bytes().split(b"\n")[:-1]]
    assert len(set(out)) == len(out)
    assert len(out) >= 200
    assert kills >= 15
    with Ledger(folder / "ledger.json") as ledger:
        assert ledger.steps > max(out)
    assert (tmp_path / "link.json").is_symlink()
