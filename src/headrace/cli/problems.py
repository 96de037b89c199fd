"""How a failed command says so: what happened, what was seen, what is accepted; then `hint:` with the next step."""

import errno
import re
import sys
from typing import Final

from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnusedCliTokensError,
)

from headrace.config_values import nearest

FAILED: Final = 1
USAGE: Final = 2
_OUTSIDE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)  # who may do what on this machine, no defect of ours
_INNER_HINT: Final = re.compile(r"[.;]? hint: ")


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
        command = " ".join(("headrace", *(error.command_chain or ())))
        say(_usage_problem(error, command), f"{command} --help")
        return USAGE
    if isinstance(error, ConfigError):
        say(f"the configuration has {len(error.problems)} problem{'s' if len(error.problems) > 1 else ''}:")
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        # Not `config explain`: it reads the same configuration, and would stop at the same problems.
        print("hint: headrace serve --help lists every setting; README.md shows a file", file=sys.stderr)
        return USAGE
    if isinstance(error, StartError):
        say(error.message, error.hint)
        return FAILED
    if isinstance(error, PublishError | LoadError):
        say(str(error), _next_step(str(error)))
        return FAILED
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OUTSIDE:
        say(
            f"{error.filename}: {error.strerror}",
            "run it as the user who serves, or name another folder: --home FOLDER",
        )
        return FAILED
    raise error


def _next_step(message: str) -> str:
    if "is not a model name" in message:
        return "copy or link the file under a plain name: ln -s 'my model.onnx' my-model.onnx"
    return "headrace serve model.onnx, or --home FOLDER" if "nothing was served" in message else ""


def _usage_problem(error: CycloptsError, command: str) -> str:
    """What is wrong with the command line: the word seen, and what would be accepted in its place."""
    unused = list(error.unused_tokens or ())
    if isinstance(error, UnknownCommandError) and unused:
        word, names = unused[0], _commands(error)
        if word.startswith("-"):
            return f"{word} stands before the command; accepted: after it, as in {command} {names[0]} {word} …"
        return f"{command} has no command {word!r}{nearest(word, names)}; accepted: {', '.join(names)}"
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        meaning = (error.argument.parameter.help or "").rstrip(".")
        return f"{command} needs {error.argument.name}{': ' + meaning if meaning else ''}"
    if isinstance(error, CoercionError) and error.target_type is int and error.token is not None:
        return f"{error.token.keyword} is {error.token.value!r}; accepted: a whole number"
    if isinstance(error, UnusedCliTokensError) and unused:
        return f"{command} cannot use {' '.join(unused)!r}; quote a name that holds spaces"
    return str(error)


def _commands(error: CycloptsError) -> list[str]:
    return [name for name in error.app or () if not name.startswith("-")]


def say(message: str, *hints: str) -> None:
    """A message on standard error, and every hint, also those inside it, on a line of its own."""
    said, found = [], list(hints)
    for line in message.splitlines():
        what, *inner = _INNER_HINT.split(line)
        said.append(what)
        found += inner
    print("headrace: " + "\n".join(said), file=sys.stderr)
    for hint in dict.fromkeys(hint for hint in found if hint):
        print(f"hint: {hint}", file=sys.stderr)
