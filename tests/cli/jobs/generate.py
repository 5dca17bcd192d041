"""A program of a user: one model of transformers on one prompt, or what goes wrong with it."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
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
        context = multiprocessing.get_context("fork")
        child = context.Process(target=lambda: (queue.put(signal.getsignal(signal.SIGTERM)), signal.pause()))
        child.start()
        # What a Python function handles would wait for the end of the pause.
        assert queue.get() == signal.SIG_DFL
        child.terminate()
        child.join()
        model.generate(ids, max_new_tokens=2, do_sample=False)
    case ["fork and run"]:  # a child that inherits the recording, and goes on with the model
        context = multiprocessing.get_context("fork")
        child = context.Process(target=lambda: model.generate(ids, max_new_tokens=2, do_sample=False))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    case ["fork and leave"]:  # by the front door, where Python frees what there is
        child = os.fork()
        if not child:
            sys.exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    case ["beams"]:
        model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3)
    case ["compiled"]:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            print("compiled", compiled(ids, use_cache=False).logits.shape[1], flush=True)
    case ["delete"]:  # one model after the other: each is freed
        for _ in range(3):
            gone = weakref.ref(model)
            del model
            gc.collect()
            assert gone() is None
            model = tiny.build("tiny-qwen3")
            model.generate(ids, max_new_tokens=2, do_sample=False)
    case ["place"]:  # nothing of the recording knows where such a model stands
        other = tiny.build("tiny-qwen3")
        other._tp_size = "many"
        print(other.generate(ids, max_new_tokens=3, do_sample=False).tolist())
    case ["spawn"]:
        command = [sys.executable, __file__, "8,9"]
        sys.exit(subprocess.run(command, check=False).returncode)
    case ["exec"]:  # another program in the place of this one, with its number
        os.execv(sys.executable, [sys.executable, __file__, "8,9"])
    case ["wait", file]:
        Path(file).write_text(str(os.getpid()))
        signal.pause()
