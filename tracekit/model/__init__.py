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
from tracekit.model.reduction import (
    TKA1_REDUCTION,
    Downcast,
    MergeOrder,
    PartialState,
    ReductionSpec,
    SinkPlace,
    Tree,
    parse_reduction,
)
from tracekit.model.rows import RequestKey, RowId, Rows
from tracekit.model.selection import Lists, Ranges, Selection
from tracekit.model.share import Share

__all__ = [
    "TKA1_REDUCTION",
    "Array",
    "AttentionCall",
    "Bits",
    "Block",
    "Conventions",
    "DType",
    "Downcast",
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
    "MergeOrder",
    "Mode",
    "Origin",
    "Output",
    "PartialState",
    "Provenance",
    "Ranges",
    "Recording",
    "ReductionSpec",
    "Request",
    "RequestKey",
    "RowId",
    "Rows",
    "Selection",
    "Share",
    "SinkPlace",
    "StepRecord",
    "Tag",
    "Tree",
    "blocks",
    "parse_reduction",
    "scale_to_bits",
]
