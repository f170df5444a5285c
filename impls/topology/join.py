"""A worker of another host: `python -m impls.topology.join <address>:<port> --name decode0`.

It dials in where a router listens (`topology.listen`), is what that one tells it to be, in a process of its own for
each trial, and then dials again. The key (`meeting.KEY`) opens this account to whoever knows it: what travels is
pickle, and the router says what is run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence as Seq

from impls.topology.handles import exit_name, worker_context
from impls.topology.meeting import Refused, address_of, dial, key_of
from impls.topology.worker import WorkerPlan, run_worker

RETRY_S = 0.5


def main(arguments: Seq[str] | None = None) -> int:
    """0: `--once`, and that is done; 1: the router will not have us; 2: a mistake in the command; 130: Ctrl-C."""
    parser = argparse.ArgumentParser("python -m impls.topology.join", description="Be a worker of another host's run.")
    parser.add_argument("address", help="<address>:<port> of the router: its topology.listen")
    parser.add_argument("--name", required=True, help="which of its workers to be: decode0")
    parser.add_argument("--once", action="store_true", help="end with the first trial; otherwise Ctrl-C ends it")
    options = parser.parse_args(arguments)
    try:
        address, key = address_of(options.address), key_of(os.environ)
    except (ValueError, RuntimeError) as error:
        return _say(f"{options.address}: {error}" if isinstance(error, ValueError) else str(error), 2)
    try:
        while True:
            ended = _work(address, options.name, key)
            if options.once:
                return ended
    except Refused as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _work(address: tuple[str, int], name: str, key: bytes) -> int:
    """One trial, from waiting for its router to the end of the worker."""
    told = ""
    while True:
        try:
            connection = dial(address, name, key)
            break
        except (OSError, EOFError) as error:  # nobody listens there, or nobody who waits for this name
            why = str(error) if isinstance(error, OSError) else f"it is not waiting for {name}"
            if isinstance(error, BlockingIOError | ConnectionResetError):
                why = "it has not come to greet us"
            if why != told:
                _say(f"waiting for a router at {address[0]}:{address[1]} ({why})")
            told = why
            time.sleep(RETRY_S)
    with connection:
        try:
            plan: WorkerPlan = connection.recv()
        except (OSError, EOFError):
            return _say("the router has gone before all of its workers had come")
        process = worker_context(plan.clock).Process(target=run_worker, args=(plan, connection), name=name, daemon=True)
        process.start()
    _say(f"working as {name}")
    try:
        process.join()
    except BaseException:
        process.kill()
        raise
    return _say(f"the worker has ended ({exit_name(process.exitcode)})")


def _say(text: str, status: int = 0) -> int:
    print(text, file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
