"""Runs `confide` commands in warm forked processes, and kills them where it is told to.

One JSON request a line on stdin: `argv`, `ledger`, and for a kill its `phase` and the `delay` after that phase
began. One JSON answer a line on stdout: how the process ended, and when each phase began. Fixed here, and
nothing else: the keys and the identifier of a run, so that runs can be compared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

from confide.cli import main
from confide.finetune import charge, checkpoint, run
from confide.gradients.keys import Key, Keys
from confide.merging import merge

SECRETS = Keys(Key(b"n" * 32, simulated=False), Key(b"s" * 32, simulated=False))
PHASES = (
    ("train", run, "train"),
    ("settle", charge.Charge, "settle"),
    ("release", run, "write_release"),
    ("finish", checkpoint.Unfinished, "destroy"),
    ("merge", merge, "_read"),
    ("write", merge, "write_release"),
)


def announce(pipe: int, phase: str, place: Any, name: str) -> None:
    plain, said = getattr(place, name), []

    def announced(*arguments: Any, **keywords: Any) -> Any:
        if not said:
            said.append(True)
            os.write(pipe, f"{phase}\n".encode())
        return plain(*arguments, **keywords)

    setattr(place, name, announced)


def child(request: dict[str, Any], pipe: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.environ["CONFIDE_LEDGER"] = request["ledger"]
        sys.argv = ["confide", *request["argv"]]
        Keys.fresh = lambda: SECRETS  # type: ignore[method-assign]
        run.new_run = lambda: "0123456789abcdef"  # type: ignore[attr-defined]
        for phase, place, name in PHASES:
            announce(pipe, phase, place, name)
        os.write(pipe, b"prepare\n")
        main.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    events, pipe = os.pipe()
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(events)
        os.close(said)
        os.dup2(say, 1)
        os.dup2(say, 2)
        child(request, pipe)
    os.close(pipe)
    os.close(say)
    begun: dict[str, float] = {}
    with os.fdopen(events) as lines:
        for line in lines:
            begun[line.strip()] = time.monotonic()
            if line.strip() == request.get("phase"):
                time.sleep(request["delay"])
                os.kill(pid, request.get("signal", signal.SIGKILL))
    with os.fdopen(said, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "begun": begun, "end": time.monotonic(), "said": text}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for request in sys.stdin:
        print(json.dumps(serve(json.loads(request))), flush=True)
