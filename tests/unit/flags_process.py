"""Either end of the flags of announced updates in a process of its own.

``python flags_process.py rank DESCRIPTION RANK`` takes lines ``wait TURN PATIENCE_S``, ``done TURN`` and ``failed TURN``, and answers
each with one line of JSON; ``wait TURN PATIENCE_S soon`` also with how often it was told that the word comes soon.
``python flags_process.py trainer RANKS`` prints a description, arms, and prints the turn; with ``forks`` behind it, it prints before
that the id of a child that lives on.
"""

import itertools
import json
import os
import sys
import time
from functools import partial

from e2e_fp8.sync.flags import EngineFlags, TrainerFlags


def rank(description: str, number: str) -> None:
    flags = EngineFlags(json.loads(description), int(number))
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        verb, turn, *more = line.split()
        calls = itertools.count()
        answer = flags.wait(int(turn), float(more[0]), partial(next, calls)) if verb == "wait" else getattr(flags, verb)(int(turn))
        print(json.dumps([answer, next(calls)] if "soon" in more else answer), flush=True)


def trainer(ranks: str, *more: str) -> None:
    flags = TrainerFlags(int(ranks))
    print(json.dumps(flags.describe()), flush=True)
    turn = flags.arm()
    if more == ("forks",):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
    print(turn, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    {"rank": rank, "trainer": trainer}[sys.argv[1]](*sys.argv[2:])
