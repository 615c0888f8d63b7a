"""Types for annotations: numpy arrays by their items, whose shape a docstring says, such as int64[n]; and values of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = npt.NDArray[Any]
Bools: TypeAlias = npt.NDArray[np.bool_]
ByteStrings: TypeAlias = npt.NDArray[np.bytes_]
Floats: TypeAlias = npt.NDArray[np.float64]
Int8s: TypeAlias = npt.NDArray[np.int8]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
UInt8s: TypeAlias = npt.NDArray[np.uint8]
UInt32s: TypeAlias = npt.NDArray[np.uint32]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
Structs: TypeAlias = npt.NDArray[np.void]
UInts: TypeAlias = npt.NDArray[np.unsignedinteger]
DType: TypeAlias = np.dtype[Any]
Integers: TypeAlias = npt.NDArray[np.integer]
Int64Pair: TypeAlias = tuple[Int64s, Int64s]
"""Two arrays of one length, such as starts and lengths."""
IntPair: TypeAlias = tuple[int, int]
"""Two numbers, such as start and stop of a range."""

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON."""
JsonFacts: TypeAlias = Mapping[str, Any]
"""The same, which nobody changes."""
