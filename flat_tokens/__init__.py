"""flat-tokens: tokenized text as one long zarr array that trainers read at random."""

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.checker import CheckProgress, DamagedError, Verification, verify
from flat_tokens.keys import document_keys
from flat_tokens.reader import Dataset, open
from flat_tokens.record.ledger import Ledger
from flat_tokens.rows.buckets import BucketedLoader
from flat_tokens.rows.loader import ShuffledLoader, Steps, Visits
from flat_tokens.rows.mixture import MixedBatch, Mixture
from flat_tokens.rows.orders import BlockOrder, ReferenceOrder
from flat_tokens.rows.packing import PackedDocuments, PackedDocumentsView
from flat_tokens.rows.phases import Schedule
from flat_tokens.rows.split import FlatTokens
from flat_tokens.rows.views import BlocksView, DocumentsView, DocumentTokens, PackedTokens, PackedView
from flat_tokens.rows.virtual import FillInMiddle
from flat_tokens.writer import write_dataset

__version__ = "0.1.0"

__all__ = [
    "LAYOUTS",
    "MAX_TOKEN_ID",
    "BlockOrder",
    "BlocksView",
    "BucketedLoader",
    "CheckProgress",
    "DamagedError",
    "Dataset",
    "DocumentTokens",
    "DocumentsView",
    "FillInMiddle",
    "FlatTokens",
    "Layout",
    "LayoutName",
    "Ledger",
    "MixedBatch",
    "Mixture",
    "PackedDocuments",
    "PackedDocumentsView",
    "PackedTokens",
    "PackedView",
    "ReferenceOrder",
    "Schedule",
    "ShuffledLoader",
    "Steps",
    "TokenBatch",
    "Verification",
    "Visits",
    "document_keys",
    "open",
    "verify",
    "write_dataset",
]
