"""vLLM for tools: `LLM` and `SamplingParams`, imported with the engine in this process and no hub.

vLLM reads its environment when it is imported, so whoever needs it imports it from here.
"""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
