"""Record the same tiny Qwen3 and the same tokens in vLLM and in transformers, for `tracekit diff`.

Run it in the environment of `make test-engines`, as `python -m tools.findings.two_engines FOLDER`. With
`--tka1` both engines run their attention on TKA-1.
"""

import argparse
from pathlib import Path

from tools.goldens_vllm_paged import Golden, engine
from tools.make_goldens import ids
from tracekit.engines import vllm_backend
from tracekit.engines.driver import run_transformers
from tracekit.recorder.api import record

PROMPTS = (ids(70, 7), ids(9, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tka1", action="store_true", help="attention of both engines on TKA-1")
    options = parser.parse_args()
    from vllm import SamplingParams

    options.folder.mkdir(parents=True, exist_ok=True)
    if options.tka1:
        vllm_backend.register()
    llm = engine(Golden("two-engines", "tiny-qwen3", (), (0, 1)))
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    with record(options.folder / "vllm.h5", engine="vllm", llm=llm, force=True):
        answers = llm.generate(prompts, sampling, use_tqdm=False)
    # transformers is fed what vLLM chose, so that both read the same tokens whatever they would have chosen.
    run_transformers(
        "tiny-qwen3",
        PROMPTS,
        out=options.folder / "transformers.h5",
        max_new_tokens=4,
        attn_implementation="tracekit" if options.tka1 else None,
        forced=[list(answer.outputs[0].token_ids) for answer in answers],
        force=True,
    )


if __name__ == "__main__":
    main()
