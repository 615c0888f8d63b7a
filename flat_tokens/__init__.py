"""flat-tokens: tokenized text as one long zarr array that trainers read at random."""

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.checker import Checked, DamagedError, Verification, verify
from flat_tokens.keys import document_keys
from flat_tokens.reader import Dataset, FlatTokens, open
from flat_tokens.rows.blocks import BlocksView
from flat_tokens.rows.documents import DocumentsView, DocumentTokens
from flat_tokens.rows.loader import ShuffledLoader
from flat_tokens.rows.mixture import MixedBatch, Mixture
from flat_tokens.rows.order import ReferenceOrder
from flat_tokens.rows.packed import PackedTokens, PackedView
from flat_tokens.rows.packing import PackedDocuments, PackedDocumentsView
from flat_tokens.rows.steps import Steps
from flat_tokens.writer import write_dataset

__all__ = [
    "LAYOUTS",
    "MAX_TOKEN_ID",
    "BlocksView",
    "Checked",
    "DamagedError",
    "Dataset",
    "DocumentTokens",
    "DocumentsView",
    "FlatTokens",
    "Layout",
    "LayoutName",
    "MixedBatch",
    "Mixture",
    "PackedDocuments",
    "PackedDocumentsView",
    "PackedTokens",
    "PackedView",
    "ReferenceOrder",
    "ShuffledLoader",
    "Steps",
    "TokenBatch",
    "Verification",
    "document_keys",
    "open",
    "verify",
    "write_dataset",
]
