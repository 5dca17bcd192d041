"""`python -m tools.binding.schema`: write docs/schemas/attention_run.v1.json from the code."""

import json
from pathlib import Path
from typing import Any

from tracekit.contract.codes import CODES, Tier
from tracekit.contract.folder import RUN_SCHEMA, RankFile, RunHead
from tracekit.contract.identity import FIELDS
from tracekit.contract.wire import schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas" / "attention_run.v1.json"


def document() -> dict[str, Any]:
    """Return the schema of the files of a run folder, and of what `tracekit bind --json` prints."""
    head = schema(RunHead)
    head["properties"]["identity"] = {"type": "object", "required": list(FIELDS)}
    head["required"] = [*head["required"], "identity"]
    issue = {
        "type": "object",
        "properties": {
            "code": {"enum": list(CODES)},
            "tier": {"enum": [str(tier) for tier in Tier]},
            "field": {"type": "string"},
            "message": {"type": "string"},
            "rollout": {},
            "training": {},
        },
        "required": ["code", "tier", "field", "message", "rollout", "training"],
        "additionalProperties": False,
    }
    binding = {
        "type": "object",
        "properties": {
            "status": {"enum": ["passed", "refused", "not comparable", "inconclusive"]},
            "comparable": {"type": "boolean"},
            "passed": {"type": "boolean"},
            "issues": {"type": "array", "items": issue},
            "claim_boundary": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["schema_version", "status", "comparable", "passed", "issues", "claim_boundary"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{RUN_SCHEMA}: run.json (head), ranks/*.json (rank), and a binding",
        "$defs": {"head": head, "rank": schema(RankFile), "binding": binding},
    }


if __name__ == "__main__":
    PUBLISHED.write_text(json.dumps(document(), indent=1) + "\n")
