"""Which model a vLLM engine runs."""

import hashlib
import json
from pathlib import PurePath
from typing import Any

from tracekit.engines.transformers_identity import VOLATILE
from tracekit.model import Identity


def engine_identity(runner: Any) -> Identity:
    """Return name, architecture and the digest of the configuration.

    The digest is that of the same checkpoint in transformers. The weights are not hashed: vLLM fuses and
    packs them when it loads, so their bytes are not those of the checkpoint.
    """
    config = runner.model_config.hf_config
    plain = {key: value for key, value in config.to_dict().items() if key not in VOLATILE}
    text = json.dumps(plain, sort_keys=True, default=str)
    return Identity(
        model=PurePath(str(runner.model_config.model)).name,
        architecture=str((config.architectures or [""])[0]),
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
    )
