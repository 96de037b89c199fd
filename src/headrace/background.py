"""Work beside traffic: a thread of its own that takes what the traffic leaves, and ends with the work.

A pooled thread will not do: without privileges a priority that was lowered cannot be raised again.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["run_in_background", "step_back"]

NICENESS: Final = 15
"""What the traffic leaves, and a little more: at 19 a busy machine would keep a load waiting for minutes."""

Result = TypeVar("Result")


def step_back() -> None:
    """Lower the priority of the calling thread, for good."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


async def run_in_background(name: str, function: Callable[..., Result], *arguments: object) -> Result:
    """Run something long on a thread of its own at low priority.

    Args:
        name: Of the thread.
        function: What is run.
        arguments: Of the function.

    Returns:
        What the function returns; what it raises is raised here. Once the waiting is cancelled the result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def run() -> None:
        step_back()
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = function(*arguments)
        except Exception as error:  # whoever waits deals with it
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop has been closed: nobody waits any more

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
