"""A program of a user: one model of transformers on one prompt, or what goes wrong with it."""

import os
import signal
import sys
from pathlib import Path

import torch

from tracekit.engines import tiny

prompt, then = sys.argv[1], sys.argv[2:]
torch.set_num_threads(1)
model = tiny.build("tiny-qwen3")
ids = torch.tensor([[int(token) for token in prompt.split(",")]])
print(model.generate(ids, max_new_tokens=3, do_sample=False).tolist(), flush=True)
match then:
    case ["exit", code]:
        sys.exit(int(code))
    case ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    case ["wait", file]:
        Path(file).write_text(str(os.getpid()))
        signal.pause()
