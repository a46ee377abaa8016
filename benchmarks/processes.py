"""Contenders in processes of their own, timed as their users run them: call after call.

XLA's CPU client gives the temporary memory of a step back when it ends. Between two steps in a row
the pages stay at hand; after seconds in which a peer worked, a virtual machine may have given them
back to its host, and has to fetch them anew (of a step of 1.2 s that was half a second).
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from timing import timed


class Contender:
    """`make(*arguments)()` in another process, which makes it once; only one works at a time."""

    def __init__(self, make: Callable[..., Callable[[], object]], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(
            target=serve, args=(other, make, arguments), daemon=True, name=make.__name__
        )
        self.process.start()
        other.close()

    def timed(self) -> tuple[None, float, float]:
        """Seconds of wall time and of processor time of one call that follows another, as the
        process measured them.

        Raises:
            EOFError: the process ended; it has printed why.
        """
        self.connection.send(None)
        return None, *self.connection.recv()

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()


def serve(
    connection: Connection, make: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]
) -> None:
    """Time a call whenever asked, until nobody is there to ask."""
    call = make(*arguments)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        call()
        connection.send(timed(call)[1:])
