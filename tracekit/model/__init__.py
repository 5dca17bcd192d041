"""The nouns. Frozen dataclasses over numpy; each validates itself and names the rule that it breaks."""

from tracekit.model.bits import Array, Bits, DType
from tracekit.model.call import AttentionCall, Gradients, Mode, Origin, Output
from tracekit.model.conventions import Conventions, EmptyLse, KVSource, LseBase, scale_to_bits
from tracekit.model.gather import Block, blocks
from tracekit.model.indexer import IndexerCall
from tracekit.model.kv import KVFamily, KVRows
from tracekit.model.launch_plan import LaunchPlan
from tracekit.model.provenance import ExecutedIdentity, Identity, Provenance
from tracekit.model.recording import Recording, Request, StepRecord, Tag
from tracekit.model.rows import RequestKey, RowId, Rows
from tracekit.model.selection import Lists, Ranges, Selection
from tracekit.model.share import Share

__all__ = [
    "Array",
    "AttentionCall",
    "Bits",
    "Block",
    "Conventions",
    "DType",
    "EmptyLse",
    "ExecutedIdentity",
    "Gradients",
    "Identity",
    "IndexerCall",
    "KVFamily",
    "KVRows",
    "KVSource",
    "LaunchPlan",
    "Lists",
    "LseBase",
    "Mode",
    "Origin",
    "Output",
    "Provenance",
    "Ranges",
    "Recording",
    "Request",
    "RequestKey",
    "RowId",
    "Rows",
    "Selection",
    "Share",
    "StepRecord",
    "Tag",
    "blocks",
    "scale_to_bits",
]
