"""Tensors that nodes saved, read before the nodes themselves read them."""

from typing import Any


class _Kept(dict[Any, Any]):
    """What a checkpoint holds for one saved tensor; it would be dropped as it is read for the first time."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


_packed: dict[type, tuple[str, ...]] = {}  # for each type of node, the attributes that show what hooks packed


def readable_twice(node: Any) -> None:
    """Let saved tensors of a node under non-reentrant checkpointing be read by the engine and then by the node."""
    kind = type(node)
    if kind not in _packed:
        _packed[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for attribute in _packed[kind]:
        try:
            held = getattr(node, attribute).data
        except (RuntimeError, AttributeError):  # nothing packs the saved tensors
            return
        handles = getattr(held, "handles", None)
        if isinstance(handles, dict) and not isinstance(handles, _Kept):
            held.handles = _Kept(handles)
