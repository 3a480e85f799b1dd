"""Pickles of dictionaries, lists, strings, numbers and NumPy arrays, as the values that they describe.

A pickle is a program for a machine that can call anything. Here only the instructions that make such values are known:
nothing of the file is imported or called, and no more is allocated than a small multiple of its size.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

_MOST = 2**19  # instructions; a batch of CIFAR-10 has 40,000
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_EMPTY: dict[int, type] = {0x7D: dict, 0x5D: list, 0x29: tuple}
_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_ARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
_ENCODE, _BYTES = ("_codecs", "encode"), ("__builtin__", "bytes")
_KNOWN = {*_RECONSTRUCT, _ARRAY, _DTYPE, _ENCODE, _BYTES}
_DTYPES = {f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)} - {"f1"}


class PickleError(ValueError):
    """The pickle is damaged, or asks for something else than values."""


class _Global:
    """A function or class by its name."""

    def __init__(self, module: str, name: str) -> None:
        self.name = (module, name)
        if self.name not in _KNOWN:
            raise PickleError(f"it asks for {module}.{name}, which is no part of an array")


class _Dtype:
    def __init__(self, name: object) -> None:
        text = name.decode("latin1") if isinstance(name, bytes) else name
        if text not in _DTYPES:
            raise PickleError(f"it has an array of {str(text)[:20]!r}, where numbers were expected")
        self.code, self.order = str(text), "|"

    def build(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise PickleError("it has numbers in an unknown byte order")
        self.order = order


class PickledArray:
    """An array as a pickle describes it, until `values` is asked for."""

    def __init__(self) -> None:
        self._state: tuple[tuple[int, ...], _Dtype, bool, bytes] | None = None

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise PickleError("it has an array that is no array of numbers")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise PickleError("it has an array of an impossible shape")
        self._state = (shape, dtype, bool(fortran), data)

    @property
    def values(self) -> np.ndarray:
        """Raises PickleError where shape and bytes do not fit."""
        if self._state is None:
            raise PickleError("it has an array without values")
        shape, dtype, fortran, data = self._state
        kind = np.dtype(dtype.order + dtype.code)
        if math.prod(shape) * kind.itemsize != len(data):
            raise PickleError(f"it has an array of {len(data)} bytes, and another size in its shape")
        return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")


def unpickled(content: bytes) -> Any:
    """The value that a pickle of protocol 2, 3 or 4 describes; Python 2's strings as bytes, arrays as `PickledArray`.

    Raises PickleError.
    """
    try:
        return _run(content)
    except PickleError:
        raise
    except IndexError:  # a position behind the end, or an empty stack
        raise PickleError("it is truncated or damaged") from None
    except Exception as error:
        raise PickleError(f"it is damaged: {type(error).__name__}: {error}") from None


def _run(content: bytes) -> Any:
    at = 0
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    encoded = 0  # bytes made of texts: one text may be used any number of times

    def number(size: int) -> int:
        """Of `size` bytes. A position behind the end is found at the next instruction."""
        nonlocal at
        at += size
        return int.from_bytes(content[at - size : at], "little")

    def data(size: int) -> bytes:
        nonlocal at
        at += size
        return content[at - size : at]

    def line() -> str:
        nonlocal at
        begin, at = at, content.index(b"\n", at) + 1
        return content[begin : at - 1].decode("ascii")

    def above_mark() -> list[Any]:
        begin = marks.pop()
        values = stack[begin:]
        del stack[begin:]
        return values

    for _ in range(_MOST):
        code = content[at]
        at += 1
        if code == 0x71:  # BINPUT
            memo[content[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[number(4)] = stack[-1]
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x4B:  # BININT1
            stack.append(content[at])
            at += 1
        elif code in (0x55, 0x43):  # SHORT_BINSTRING, SHORT_BINBYTES
            stack.append(data(number(1)))
        elif code in (0x54, 0x42):  # BINSTRING, BINBYTES
            stack.append(data(number(4)))
        elif code == 0x8E:  # BINBYTES8
            stack.append(data(number(8)))
        elif code == 0x8C:  # SHORT_BINUNICODE
            stack.append(data(number(1)).decode("utf-8", "surrogatepass"))
        elif code == 0x58:  # BINUNICODE
            stack.append(data(number(4)).decode("utf-8", "surrogatepass"))
        elif code == 0x8D:  # BINUNICODE8
            stack.append(data(number(8)).decode("utf-8", "surrogatepass"))
        elif code == 0x68:  # BINGET
            stack.append(memo[number(1)])
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[number(4)])
        elif code == 0x4D:  # BININT2
            stack.append(number(2))
        elif code == 0x4A:  # BININT
            stack.append(int.from_bytes(data(4), "little", signed=True))
        elif code == 0x8A:  # LONG1
            stack.append(int.from_bytes(data(number(1)), "little", signed=True))
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", data(8))[0])
        elif code in (0x4E, 0x88, 0x89):  # NONE, NEWTRUE, NEWFALSE
            stack.append(_CONSTANTS[code])
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code in (0x7D, 0x5D, 0x29):  # EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE
            stack.append(_EMPTY[code]())
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            begin = len(stack) - (code - 0x84)
            if begin < 0:
                raise PickleError("it is damaged: a tuple lacks values")
            stack[begin:] = [tuple(stack[begin:])]
        elif code == 0x74:  # TUPLE
            stack.append(tuple(above_mark()))
        elif code in (0x61, 0x65):  # APPEND, APPENDS
            values = [stack.pop()] if code == 0x61 else above_mark()
            _expect(stack[-1], list).extend(values)
        elif code in (0x73, 0x75):  # SETITEM, SETITEMS
            pairs = [stack.pop(-2), stack.pop()] if code == 0x73 else above_mark()
            keys = [_expect(key, (bytes, str)) for key in pairs[::2]]
            _expect(stack[-1], dict).update(zip(keys, pairs[1::2], strict=True))
        elif code == 0x63:  # GLOBAL
            stack.append(_Global(line(), line()))
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(_Global(_expect(module, str), _expect(name, str)))
        elif code == 0x52:  # REDUCE
            arguments, function = stack.pop(), stack.pop()
            stack.append(_made(_expect(function, _Global).name, _expect(arguments, tuple)))
            encoded += len(stack[-1]) if isinstance(stack[-1], bytes) else 0
            if encoded > len(content):
                raise PickleError("it makes more bytes than it has")
        elif code == 0x62:  # BUILD
            state = stack.pop()
            _expect(stack[-1], (_Dtype, PickledArray)).build(state)
        elif code == 0x80:  # PROTO
            if (protocol := number(1)) not in (2, 3, 4):
                raise PickleError(f"it is of protocol {protocol}, where 2, 3 or 4 was expected")
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            raise PickleError(f"it has the instruction {bytes([code])!r}, which makes no plain value")
    raise PickleError(f"it has more than {_MOST:,} instructions")


def _expect(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise PickleError(f"it is damaged: {type(value).__name__} in the wrong place")
    return value


def _made(function: tuple[str, str], arguments: tuple[Any, ...]) -> Any:
    """What the call of a known function makes. NumPy describes an array by an empty one and its state, and Python 3
    writes bytes for protocol 2 as the text of the same characters, or as a call without arguments."""
    if function in _RECONSTRUCT:
        return PickledArray()
    if function == _DTYPE:
        return _Dtype(arguments[0])
    if function == _ENCODE and arguments[1:] in (("latin1",), (b"latin1",)):
        return _expect(arguments[0], str).encode("latin1")
    if function == _BYTES and not arguments:
        return b""
    raise PickleError(f"it calls {'.'.join(function)}")
