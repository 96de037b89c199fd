"""How a failed command says so: what happened, what was seen, what is accepted; then `hint:` with the next step."""

import sys

from cyclopts.exceptions import CycloptsError

FAILED = 1
USAGE = 2


class CommandFailed(Exception):
    """A command cannot do what was asked.

    Attributes:
        hint: The next step; empty when there is none.
        status: Exit status.
    """

    def __init__(self, message: str, hint: str = "", status: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status


def explain(error: Exception) -> int:
    """Print what went wrong on standard error.

    Returns:
        The exit status.

    Raises:
        Exception: The error itself when it is none that a user can do something about: a defect shows its trace.
    """
    from headrace.app.start import StartError
    from headrace.control_plane.publish import PublishError
    from headrace.errors import ConfigError, LoadError

    if isinstance(error, CommandFailed):
        say(error.message, error.hint)
        return error.status
    if isinstance(error, CycloptsError):
        # Names are said as they are typed; the full list of commands belongs to --help.
        say(str(error).split(" Available commands:")[0], "headrace --help, or --help after a command")
        return USAGE
    if isinstance(error, ConfigError):
        say(f"the configuration has {len(error.problems)} problem{'s' if len(error.problems) > 1 else ''}:")
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        print("hint: headrace config explain shows every setting", file=sys.stderr)
        return USAGE
    if isinstance(error, StartError):
        say(error.message, error.hint)
        return FAILED
    if isinstance(error, PublishError | LoadError):
        say(str(error))
        return FAILED
    raise error


def say(message: str, hint: str = "") -> None:
    """One line on standard error, and the hint on another."""
    print(f"headrace: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
