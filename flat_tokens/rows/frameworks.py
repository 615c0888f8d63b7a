"""Arrays of numpy, torch and jax: operations that they name differently, and memory that they can share."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import AnyArray, UInt8s
from flat_tokens.extras import extra

Array: TypeAlias = Any
"""A numpy array, a torch tensor, or a jax array or tracer."""
Framework = Literal["numpy", "torch", "jax"]
Fields: TypeAlias = Sequence[str] | None
"""Names of the fields that a row is a dict of; None: a row is the tuple of its stored fields."""
REUSED_BYTES = range(1 << 20, (64 << 20) + 65)
"""Arrays of 1 to 64 MiB are recycled. The allocator keeps smaller ones by itself."""
KEPT_BYTES = 256 << 20
"""At most this many bytes of unused arrays are kept: those that were freed last."""


def room_for(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint32) -> AnyArray:
    """Uninitialized dtype[shape] at a multiple of 64 bytes: jax takes over only such arrays without a copy."""
    wanted, count = np.dtype(dtype), math.prod(shape)
    spare = 64 // wanted.itemsize
    size = (count + spare) * wanted.itemsize
    room = _reused(size).view(wanted) if size in REUSED_BYTES else np.empty(count + spare, wanted)
    skipped = -room.ctypes.data % 64 // wanted.itemsize
    return room[skipped : skipped + count].reshape(shape)


class _Lent:
    """Memory of a large array. It is kept for the next one when the array and all its slices are gone."""

    __slots__ = ("__array_interface__", "_memory")
    left: ClassVar[deque[UInt8s]] = deque()

    def __init__(self, memory: UInt8s) -> None:
        self._memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self) -> None:
        self.left.append(self._memory)
        while sum(map(len, self.left.copy())) > KEPT_BYTES:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self.left.popleft()

    @classmethod
    def memory(cls, size: int) -> UInt8s:
        """Unused memory of this size, else fresh one. The arrays of a batch have several sizes."""
        for _ in range(len(cls.left)):
            try:
                memory = cls.left.popleft()
            except IndexError:
                break
            if len(memory) == size:
                return memory
            cls.left.append(memory)
        return np.empty(size, np.uint8)


def _reused(size: int) -> UInt8s:
    """Uninitialized uint8[size]. Pages of fresh memory cost several times as much as the computation that fills them."""
    lent: Any = _Lent(_Lent.memory(size))
    return np.asarray(lent)


def namespace_of(array: Array) -> Any:
    """The module that an array belongs to: numpy, torch or jax.numpy."""
    if (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        return torch
    try:
        return array.__array_namespace__()
    except AttributeError:
        raise TypeError(f"encoded tokens are an array of numpy, torch or jax, but this is a {type(array).__name__}") from None


def bits(encoded: Array) -> Array:
    """uint32 as int32, bit for bit: torch computes with hardly any unsigned type."""
    namespace = namespace_of(encoded)
    if encoded.dtype.itemsize != 4:
        raise TypeError(f"encoded tokens are uint32, or its bits as int32, but these are {encoded.dtype}")
    return encoded.view(namespace.int32)


def as_int64(array: Array) -> Array:
    """Cast to int64 for torch's ``cross_entropy``. jax arrays are returned unchanged (no int64 by default)."""
    if (namespace := namespace_of(array)) is np:
        return array.astype(np.int64)
    return array.long() if namespace.__name__ == "torch" else array


def places_along(array: Array) -> Array:
    """0, 1, 2 ... along the last axis: int32[length]."""
    namespace = namespace_of(array)
    device = {"device": array.device} if namespace.__name__ == "torch" else {}
    return namespace.arange(array.shape[-1], dtype=namespace.int32, **device)


def running_max(array: Array) -> Array:
    """The largest so far along the last axis."""
    namespace = namespace_of(array)
    if namespace is np:
        return np.maximum.accumulate(array, axis=-1)
    if namespace.__name__ == "torch":
        return namespace.cummax(array, -1).values
    return extra("jax", "a jax array").lax.cummax(array, axis=array.ndim - 1)


def converted(array: AnyArray, framework: Framework) -> Array:
    """The array as one of *framework*, in the same memory where possible."""
    if framework == "torch":
        return extra("torch", "framework='torch'").as_tensor(array)
    return extra("jax", "framework='jax'").device_put(array)
