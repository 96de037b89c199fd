"""`headrace`: the table of commands, and what every command does when it fails.

Commands are named by import path, so that `headrace --help` imports none of them.

Exit status: 0 done; 1 it failed; 2 the command line or the configuration is wrong; 130 interrupted.
Data goes to standard output, everything else to standard error.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App

from headrace import __version__
from headrace.cli.help import PlainHelp

COMMANDS: Final = (
    ("serve", "headrace.cli.serve:serve", "Serve models: from a model file to an endpoint."),
    ("predict", "headrace.cli.predict:predict", "Ask an endpoint for one prediction and show it."),
    ("get", "headrace.cli.get:app", "Show what is served: `get endpoints`."),
    ("model", "headrace.cli.model:app", "Versions of models: `model list`, `model alias`."),
    ("records", "headrace.cli.records:app", "The record of every request: `records tail`."),
    ("config", "headrace.cli.config:app", "Settings and where they come from: `config explain`."),
    ("doctor", "headrace.cli.doctor:doctor", "What this machine has, what is missing, one fix per line."),
    ("worker", "headrace.cli.worker:worker", "Run one worker alone, as Kubernetes does."),
    ("control", "headrace.cli.control:control", "Run the control process alone: metrics and health of a home."),
    ("version", "headrace.cli.version:version", "Show versions."),
)

HELP: Final = """Runs a trained model in production: from a model file and an SLO to an endpoint.

For example:

  headrace serve model.onnx --slo p99=50ms

  headrace predict model --data '[[5.1, 3.5, 1.4, 0.2]]'

  headrace doctor

Exit status: 0 done, 1 failed, 2 wrong command line or configuration."""


def build(arguments: Sequence[str] = ()) -> App:
    """The command line as an object, commands in the order in which they are met; none of them is imported.

    Args:
        arguments: The command that they name is left to describe itself, at length; the others have a line each.
    """
    # Boxes and colours cost 30 ms, and help is read in pipes as often as in terminals.
    app = App(
        name="headrace",
        help=HELP,
        help_format="plaintext",
        help_formatter=PlainHelp(),
        version=__version__,
        result_action="return_value",
    )
    for place, (name, path, help_text) in enumerate(COMMANDS):
        app.command(path, name=name, help=None if name in arguments[:1] else help_text, sort_key=place)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit status.
    """
    try:
        status = build(arguments)(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `headrace … | head` is no failure; the interpreter must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        from headrace.cli.problems import explain

        return explain(error)
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
