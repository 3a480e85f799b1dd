"""Damaged files: mutations of good ones, and the law that a reader of them keeps.

A reader ends soon, in bounded memory, with a value or with an error of the clear kinds that names the file.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import select
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CLEAR = (ValueError, TypeError, RuntimeError, OSError, ImportError)  # what the command line turns into one line
COUNTS = pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
"""Mutations of a file: a few whenever tests are run, many in the slow ones."""
MEMORY = 2**29  # bytes that reading a file of some kilobytes may add to a process
WAIT = 60  # seconds without a word from a process after which it waits for ever
MEMORY_WORDS = ("MemoryError", "allocate", "out of memory")


def mutated(content: bytes, source: random.Random) -> bytes:
    """`content` damaged in one of the ways of disks, transfers and attackers."""
    damaged = bytearray(content)
    place = source.randrange(len(damaged))
    # Headers are short: half of the damage lies in the first and last bytes, which decide how all others are read.
    if source.random() < 0.5:
        place = source.choice([source.randrange(min(256, len(damaged))), -1 - source.randrange(min(256, len(damaged)))])
        place %= len(damaged)
    how = source.choice(["flip", "flip", "flips", "byte", "bytes", "cut", "drop", "insert", "repeat", "zero", "ones"])
    length = source.randrange(1, 64)
    if how == "flip":
        damaged[place] ^= 1 << source.randrange(8)
    elif how == "flips":
        for _ in range(source.randrange(2, 9)):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
    elif how == "byte":
        damaged[place] = source.randrange(256)
    elif how == "bytes":
        for at in range(place, min(place + source.randrange(2, 9), len(damaged))):
            damaged[at] = source.randrange(256)
    elif how == "cut":
        del damaged[place:]
    elif how == "drop":
        del damaged[place : place + length]
    elif how == "insert":
        damaged[place:place] = source.randbytes(length)
    elif how == "repeat":
        damaged[place:place] = damaged[place : place + length]
    else:
        last = min(place + length, len(damaged))
        damaged[place:last] = (b"\0" if how == "zero" else b"\xff") * (last - place)
    return bytes(damaged)


def mutations(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` mutations of `content`, none of which is `content` again."""
    source = random.Random(seed)
    while count:
        damaged = mutated(content, source)
        if damaged != content:
            count -= 1
            yield damaged


def outcomes(
    reads: Callable[[bytes], object], contents: Iterator[bytes], name: str, *, seconds: int = 2
) -> tuple[Counter[str], list[str]]:
    """What `reads` makes of each of `contents`, in a forked process whose memory is bounded: how many are read and how
    many refused; and what breaks the law, as text.

    seconds: of a CPU that each may take. name: what every message must hold.
    """
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(told)
            _bound_memory()
            for content in contents:
                _bound_seconds(seconds)
                os.write(tells, (json.dumps(_outcome(reads, content, name)) + "\n").encode())
        finally:
            os._exit(0)
    os.close(tells)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for line in _lines(told):
        kind, text = json.loads(line)
        counts[kind] += 1
        if kind not in ("read", "refused"):
            wrong.append(f"{kind}: {text}")
    os.close(told)
    os.kill(child, signal.SIGKILL)  # it is over, or waits for something
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        what = "takes too long" if os.WTERMSIG(status) == signal.SIGXCPU else "crashes"
        wrong.append(f"{what}: signal {os.WTERMSIG(status)} in file {sum(counts.values())}")
    return counts, wrong


def one_outcome(read: Callable[[], object], name: str, *, seconds: int = 2) -> str:
    """The message with which `read` refuses a file, under the law of `outcomes`; AssertionError where it breaks it."""
    told, tells = os.pipe()

    def noted(_: bytes) -> object:
        try:
            return read()
        except CLEAR as error:
            os.write(tells, str(error).encode(errors="replace")[:4000])
            raise

    counts, wrong = outcomes(noted, iter([b""]), name, seconds=seconds)
    os.close(tells)
    with open(told, "rb") as file:
        message = file.read().decode()
    assert not wrong, wrong
    assert counts == {"refused": 1}, counts or f"no answer within {WAIT} seconds"
    return message


def _bound_memory() -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    warnings.simplefilter("ignore")
    status = Path("/proc/self/statm")
    if status.exists():
        limit = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_seconds(seconds: int) -> None:
    """From here on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _outcome(reads: Callable[[bytes], object], content: bytes, name: str) -> tuple[str, str]:
    try:
        reads(content)
    except CLEAR as error:
        text = f"{type(error).__name__}: {error}"[:500]
        if any(word in text for word in MEMORY_WORDS):
            return "runs out of memory", text
        return ("refused", "") if name in str(error) else ("does not name the file", text)
    except BaseException as error:
        return "raises", f"{type(error).__name__}: {error}"[:500]
    return "read", ""


def _lines(pipe: int) -> Iterator[str]:
    """Lines as the child writes them, until it ends or nothing comes any more."""
    rest = b""
    while select.select([pipe], [], [], WAIT)[0]:
        part = os.read(pipe, 2**16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode() for line in lines)
