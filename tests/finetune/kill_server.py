"""Runs `confide` commands in warm forked processes, and kills them where it is told to.

One JSON request a line on stdin: `argv`, `ledger`, and for a kill its `phase`, the `delay` after that phase
began, and the `signal`. One JSON answer a line on stdout: how the process ended, when each phase began, and
what it said. Changed here, and nothing else: the keys and the identifier of a run are fixed, so that runs can
be compared; and calibration is remembered, so that it isn't what most kills hit.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import redirect_stdout, suppress
from functools import cache
from typing import Any

import torch

import confide.finetune.folder
import confide.privacy.ledger  # noqa: F401  (imported by every run, so once for all)
from confide.cli import main
from confide.finetune import charge, checkpoint, methods, run, tuned
from confide.gradients.keys import Key, Keys
from confide.merging import merge, plan

SECRETS = Keys(Key(b"n" * 32, simulated=False), Key(b"s" * 32, simulated=False))
PHASES = (
    ("train", run, "train"),
    ("settle", charge.Charge, "settle"),
    ("release", tuned, "write_release"),
    ("finish", checkpoint.Unfinished, "destroy"),
    ("merge", plan, "read_inputs"),
    ("write", merge, "write_release"),
)


def child(request: dict[str, Any], pipe: int) -> None:
    """Never returns."""
    code = 1

    def kill() -> None:
        time.sleep(request["delay"])
        os.kill(os.getpid(), request["signal"])

    def enter(phase: str) -> None:
        os.write(pipe, f"{phase}\n".encode())
        if phase == request.get("phase"):
            # A thread of the process itself: whatever else the machine does, both run side by side.
            threading.Thread(target=kill, daemon=True).start()

    def announce(phase: str, place: Any, name: str) -> None:
        plain, seen = getattr(place, name), []

        def announced(*arguments: Any, **keywords: Any) -> Any:
            if not seen:
                seen.append(True)
                enter(phase)
            return plain(*arguments, **keywords)

        setattr(place, name, announced)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        os.environ["CONFIDE_LEDGER"] = request["ledger"]
        sys.argv = ["confide", *request["argv"]]
        Keys.fresh = lambda: SECRETS  # type: ignore[method-assign]
        run.new_run = lambda: "0123456789abcdef"  # type: ignore[attr-defined]
        for phase, place, name in PHASES:
            announce(phase, place, name)
        enter("prepare")
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
    with os.fdopen(said, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "begun": begun, "end": time.monotonic(), "said": text}


def warm_up(arguments: list[str]) -> None:
    """Import and calibrate here, so that no child has to: a dry run, which differentiates nothing."""
    sys.argv = ["confide", *arguments, "--dry-run", "--json"]
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        main.main()


if __name__ == "__main__":
    torch.set_num_threads(1)
    methods.calibrate = cache(methods.calibrate)  # type: ignore[attr-defined]
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm"):
            warm_up(request["argv"])
        print(json.dumps(serve(request)), flush=True)
