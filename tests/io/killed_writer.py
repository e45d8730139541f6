"""Process that forks a child for each path on its standard input; the child writes a run there until it is killed.

Forking avoids repeated imports. The child prints each step that is guaranteed to be on disk.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter
from workbench.schema.events import Event

EVERY = 5
TERMS = {"term": np.array(["D2", "D3"])}


def monitors(step):
    return {"loss": np.sin(step), "grad_norm": 1.0 * step, "is_on": step % 3 == 0}


def attention(step):
    return {"stable_rank": step + np.arange(24.0).reshape(3, 4, 2)}


def add(output, steps):
    """Add the rows of some steps to both parts."""
    for step in steps:
        output.add("monitors", step, monitors(step))
        if step % EVERY == 0:
            output.add("attention", step, attention(step), TERMS)


def write(path: str) -> None:
    output = RunOutput(RunWriter(path, {}), rows_per_block=7, seconds_per_block=0.05)
    for step in range(100_000):
        add(output, [step])
        if step % 50 == 0:
            output.event(Event(step, "alarm", message=f"at {step}", layer=step % 7))
        if step % 40 == 39:
            assert output.flush()
            print(step, flush=True)
        time.sleep(0.0005)


def main() -> None:
    RunWriter(sys.argv[1], {})  # imports what writing needs
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            write(line.strip())
            os._exit(0)
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
