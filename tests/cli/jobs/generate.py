"""A program of a user: one model of transformers on one prompt, or what goes wrong with it."""

import multiprocessing
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
    case ["fork"]:  # a child that inherits the recording, and is terminated
        queue = multiprocessing.get_context("fork").Queue()
        child = multiprocessing.get_context("fork").Process(target=lambda: (queue.put(1), signal.pause()))
        child.start()
        queue.get()
        child.terminate()
        child.join()
        model.generate(ids, max_new_tokens=2, do_sample=False)
    case ["beams"]:
        model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3)
    case ["wait", file]:
        Path(file).write_text(str(os.getpid()))
        signal.pause()
