"""Arrays of numpy, torch and jax: operations that they name differently, memory that they can share, and attention.

Attention is within documents, as kernels want it: masks of torch's flex attention, and bounds of segments. It is derived from
*segments*, integers along the last axis. Neighbours with the same number are one segment, and a token attends to those of its
segment up to itself.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import AnyArray, UInt8s
from flat_tokens.extras import extra
from flat_tokens.options import at_least

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
    lent: Any = _ArrayMemory(_ArrayMemory.memory(size)) if size in REUSED_BYTES else np.empty(size, np.uint8)
    room = np.asarray(lent).view(wanted)
    skipped = -room.ctypes.data % 64 // wanted.itemsize
    return room[skipped : skipped + count].reshape(shape)


class _ArrayMemory:
    """Memory of a large array. It is kept for the next one when the array and all its slices are gone: pages of fresh memory cost
    several times as much as the computation that fills them.
    """

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
    module = extra(framework, f"framework={framework!r}")
    return module.as_tensor(array) if framework == "torch" else module.device_put(array)


def causal(segments: Array, places: Array) -> Array:
    """Whether a token (row) is of the same segment as another (column) and not before it: bool[..., length, length]."""
    return (segments[..., :, None] == segments[..., None, :]) & (places[:, None] >= places[None, :])


MAX_TOKENS = (1 << 31) - 1
MaskMod = Callable[[Any, Any, Any, Any], Any]
"""``mask_mod(batch, head, query, key)`` of torch's flex attention: whether the query's token attends to the key's."""


class Attention:
    """Attention within the documents of rows, one or many: of numpy arrays, torch tensors and jax arrays alike. The masks of flex
    attention are of torch; numpy arrays give them on the CPU, tensors on their device.
    """

    __slots__ = ()
    _padding_segment: int | None = None
    """The segment whose tokens attend to themselves alone."""

    def _segments(self) -> Array:
        """The segment of each token: int[..., length]."""
        raise NotImplementedError

    @property
    def cu_seqlens(self) -> Array:
        """Bounds of the segments of attention: int32[k + 1], 0 first, the number of tokens last.

        For kernels that take sequences of variable length. A batch counts as one row of ``n * length`` tokens, and no
        segment goes from one row into the next. Padding of a pack is a segment of its own, so that every token is in one and no
        output stays undefined; an empty document is none.
        """
        segments = self._segments()
        begins = _begins(segments).reshape(-1)
        if begins.shape[0] > MAX_TOKENS:
            raise ValueError(f"cu_seqlens is int32, but the batch has {begins.shape[0]} tokens. Take fewer rows at a time.")
        edges = namespace_of(begins).concatenate([begins, places_along(segments)[:1] == 0])  # the end of the last is an edge, too
        return places_along(edges)[edges]

    @property
    def max_seqlen(self) -> int:
        """Tokens in the longest segment of ``cu_seqlens``, be it padding."""
        edges = self.cu_seqlens
        return int((edges[1:] - edges[:-1]).max()) if len(edges) > 1 else 0

    def padded_cu_seqlens(self, count: int | None = None) -> Array:
        """The bounds of each row's own segments: int32[..., count], ``length + 1`` by default, which is always enough.

        After a row's last bound, *length*, that bound is repeated, so that further segments are empty: rows can be stacked, and
        compiled kernels see one shape. These are the ``cu_seqlens`` of Megatron's ``inter_document_masking``. ValueError, with
        the number that is needed, if a row has more bounds.
        """
        begins = _begins(self._segments())
        namespace, length = namespace_of(begins), begins.shape[-1]
        count = length + 1 if count is None else at_least(2, "count", count)
        most = int(begins.sum(-1).max()) + 1 if begins.shape[0] else 2
        if most > count:
            raise ValueError(f"count is {count}, but a row has {most} bounds of segments. Take count={most} or more.")
        bounds = namespace.sort(namespace.where(begins, places_along(begins), length))
        bounds = getattr(bounds, "values", bounds)  # of torch, whose sort gives the order, too
        ends = namespace.zeros_like(bounds[..., :1]) + length
        return namespace.concatenate([bounds[..., :count], *[ends] * (count - length)], -1)

    def mask(self) -> Array:
        """The block-causal mask: bool[..., length, length], true where a token (row) attends to another (column).

        ``scaled_dot_product_attention`` wants an axis for the heads: ``batch.mask()[:, None]``.
        """
        segments, places = self._segments(), places_along(self._segments())
        attends = causal(segments, places)
        if self._padding_segment is None:
            return attends
        return attends & ((segments[..., :, None] != self._padding_segment) | (places[:, None] == places[None, :]))

    @property
    def mask_mod(self) -> MaskMod:
        """The mask as a function for ``torch.nn.attention.flex_attention``, of one row or of the rows of a batch."""
        segments, padding = self._rows_of_segments(), self._padding_segment

        def attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
            segment = segments[batch, query]
            same = (segment == segments[batch, key]) & (query >= key)
            return same if padding is None else same & ((segment != padding) | (query == key))

        return attends

    def block_mask(self, block_size: int = 128) -> Any:
        """The ``BlockMask`` of ``flex_attention`` for ``mask_mod``: that of ``create_block_mask``, made of the segments' bounds
        without a dense mask, in time and memory of the number of blocks. It needs torch 2.6 or newer.
        """
        size, segments = at_least(1, "block_size", block_size), self._rows_of_segments()
        torch, flex = extra("torch", "block_mask()"), extra("torch.nn.attention.flex_attention", "block_mask()")
        length = segments.shape[-1]
        places = places_along(segments).expand(segments.shape)
        begins = running_max(places * _begins(segments))  # of each token's segment
        if self._padding_segment is not None:
            begins = torch.where(segments == self._padding_segment, places, begins)
        # Begins do not decrease, so that of a block's first token says where its keys begin, that of its last where all attend.
        block = torch.arange(-(-length // size), dtype=torch.int32, device=segments.device)
        first = begins[:, ::size] // size
        last = begins[:, torch.clamp((block.long() + 1) * size, max=length) - 1]
        full_from = torch.maximum((last + size - 1) // size, first)
        # Of the last query block, if it is not full, and of the diagonal no key block is full.
        full_to = torch.where((block + 1) * size > length, full_from, torch.maximum(block, full_from))
        key, query = block[None, None, :], block[None, :, None]
        is_full = (key >= full_from[..., None]) & (key < full_to[..., None])
        is_partial = (key >= first[..., None]) & (key <= query) & ~is_full
        arguments = [*_listed(torch, is_partial), *_listed(torch, is_full)]
        return flex.BlockMask.from_kv_blocks(*arguments, BLOCK_SIZE=size, mask_mod=self.mask_mod, seq_lengths=(length, length))

    def _rows_of_segments(self) -> Any:
        """The segments as a torch tensor: int[rows, length]."""
        segments = self._segments()
        is_tensor = namespace_of(segments).__name__ == "torch"
        tensor = extra("torch", "flex attention").as_tensor(segments if is_tensor else np.array(segments))
        return tensor.reshape(-1, tensor.shape[-1])


def _begins(segments: Array) -> Array:
    """Where segments begin: bool[..., length]."""
    concatenate = namespace_of(segments).concatenate
    return concatenate([segments[..., :1] == segments[..., :1], segments[..., 1:] != segments[..., :-1]], -1)


def _listed(torch: Any, chosen: Any) -> tuple[Any, Any]:
    """How many key blocks each query block has, and which, then the others: int32[rows, 1, n], int32[rows, 1, n, n]."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()
