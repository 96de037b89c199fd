"""`headrace serve`: the main job, from a model file to an endpoint."""

import inspect
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter

from headrace.app import start
from headrace.cli.problems import USAGE, CommandFailed, say
from headrace.config import SETTINGS, Configuration, Setting, load
from headrace.config_values import closest, show_value
from headrace.control_plane.publish import Source

LARGE_BYTES: Final = 1 << 29  # a second or so


def serve(
    source: Annotated[str | None, Parameter(help="A model file, a folder of models, or a configuration file.")] = None,
    /,
    *,
    name: Annotated[str, Parameter(help="Name in the URL; else that of the file.", show_default=False)] = "",
    slo: Annotated[str, Parameter(help="Latency objective, such as p99=50ms.", show_default=False)] = "",
    config: Annotated[str | None, Parameter(help="Configuration file; else headrace.yaml when there is one.")] = None,
    home: Annotated[str | None, Parameter(help="State folder; else HEADRACE_HOME, else .headrace.")] = None,
    **settings: str,
) -> None:
    """Serve models until Ctrl-C.

    Loads the model, measures how fast it is on this machine, and answers the Open Inference Protocol over HTTP.
    Ctrl-C or SIGTERM finishes requests in flight; twice stops at once. SIGHUP looks again at files and configuration.

    For example:

      headrace serve model.onnx --slo p99=50ms

      headrace serve models/ --workers 4 --http-host 0.0.0.0

      headrace serve headrace.yaml

    Exit status: 0 stopped as asked, 1 could not serve, 2 wrong configuration, 130 or 143 after a second signal.
    """
    configuration = read(source, name, slo, config, home, settings)
    for entry in configuration.models:
        if source is not None and entry.origin == source and not Path(entry.path).exists():
            raise _missing(source, Path(os.path.normpath(entry.path)))
    if not configuration.models:
        raise CommandFailed(
            "no model is named; accepted: a model file, a folder of models, or models: in headrace.yaml",
            "headrace serve model.onnx",
            USAGE,
        )
    prepared, lock_fd = prepare(configuration, source, name, slo, config)
    start.exec_module(
        "headrace.app.supervisor", "--home", str(prepared), "--lock-fd", str(lock_fd), keep_fds=(lock_fd,)
    )


def _missing(source: str, path: Path) -> CommandFailed:
    """What to say about a path that does not exist: the likely one, else what is there."""
    try:
        found = [each for each in path.parent.iterdir() if each.suffix == ".onnx" or each.is_dir()]
    except OSError:
        found = []
    # Files before folders: most folders that lie about hold no models.
    found.sort(key=lambda each: (each.suffix != ".onnx", each.name))
    there = {each.stem: each.name for each in found if not each.name.startswith(".")}
    hint = ""
    if likely := closest(path.stem, there, 0.7):
        hint = f"headrace serve {shlex.quote(str(Path(source).with_name(there[likely])))}"
    elif there:
        hint = f"{path.parent} has {', '.join(list(there.values())[:5])}" + (", …" if len(there) > 5 else "")
    return CommandFailed(
        f"{path} does not exist; accepted: an .onnx file, a folder of models, or a configuration file",
        hint or "headrace serve model.onnx",
    )


def read(
    source: str | None, name: str, slo: str, config: str | None, home: str | None, settings: dict[str, str]
) -> Configuration:
    """Merge every source of configuration."""
    return load(source, flags=settings, config=config, name=name, slo=slo, home=home)


def prepare(
    configuration: Configuration, source: str | None, name: str, slo: str, config: str | None
) -> tuple[Path, int]:
    """Publish what shall be served.

    Returns:
        The home folder and the descriptor of its lock.
    """
    sizes = [_bytes_of(Path(entry.path)) for entry in configuration.models]
    if sum(sizes) >= LARGE_BYTES:
        # Their digests are taken before anything is started, and a screen that stands still looks like a fault.
        say(f"reading {sum(sizes) / 2**30:.1f} GiB of model files")
    remembered = Source(folder=str(Path.cwd()), source=source, config=config, name=name, slo=slo)
    home, lock_fd, notices = start.stage(configuration, remembered)
    for notice in notices:
        say(notice)
    return home.root, lock_fd


def _bytes_of(path: Path) -> int:
    """Size of the artefacts at a path; what cannot be read counts as nothing."""
    try:
        # As deep as models are looked for: <folder>/<name>/<version>/model.onnx, with its external data.
        files = (
            [path] if path.is_file() else [file for depth in ("", "*/", "*/*/") for file in path.glob(depth + "*.*")]
        )
        return sum(file.stat().st_size for file in files if file.is_file() and not file.name.startswith("."))
    except OSError:
        return 0


def with_settings(function: Any) -> Any:
    """Give a command one flag per entry of `SETTINGS`, so that no flag is ever missing or described twice."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    group = Group("Settings", sort_key=10)
    for setting in SETTINGS:
        kind = _flag(setting, group)
        parameters.append(
            inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
        function.__annotations__[setting.name] = kind
    function.__signature__ = signature.replace(parameters=parameters)
    return function


def _flag(setting: Setting, group: Group) -> Any:
    def show(_value: object) -> str:
        return show_value(setting.default, setting.unit) or "none"

    return Annotated[str | None, Parameter(help=setting.help, group=group, show_default=show)]


with_settings(serve)
