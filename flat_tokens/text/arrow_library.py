"""pyarrow, imported at its first use: it is optional, and slow to import."""

from typing import TYPE_CHECKING

from flat_tokens.extras import Later

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = Later("pyarrow", "reading source files")

__all__ = ["pa"]
