"""Settings of the server: declared once as data, merged from defaults, file, environment and flags.

`SETTINGS` is the one list: the loader, `headrace config explain`, the flags of `headrace serve` and
`docs/reference/settings.md` are made from it. The environment is read here and nowhere else.

    defaults  <  headrace.yaml (or .toml)  <  HEADRACE_<NAME>  <  flags

`load` merges the four, remembers where each value came from, and reports every problem at once. How the text of one
value is read is in `config_values.py`, how a file is read in `config_file.py`. This is one file although it is long:
the table is half of it, and who may set what must not drift apart from how it is merged.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.config_file import Lines, read_file
from headrace.config_values import (
    PartError,
    Unit,
    closest,
    entry_value,
    nearest,
    parse_bytes,
    parse_seconds,
    parse_slo,
    read_value,
    valid_name,
)
from headrace.errors import ConfigError
from headrace.snapshot import (
    BatchingPolicy,
    Contract,
    NonFinitePolicy,
    RecordPolicy,
    RuntimeOptions,
    Slo,
)

__all__ = [
    "BY_NAME",
    "SETTINGS",
    "Configuration",
    "ModelEntry",
    "Setting",
    "Settings",
    "divide_cores",
    "flag_name",
    "home_folder",
    "load",
    "nearest",
    "parse_bytes",
    "parse_seconds",
    "parse_slo",
    "usable_cores",
]

CONFIG_NAMES: Final = ("headrace.yaml", "headrace.yml", "headrace.toml")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values in force; one attribute per entry of `SETTINGS`, which documents each."""

    http_host: str = "127.0.0.1"
    http_port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    workers: int = 0
    threads: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    header_bytes_max: int = 16 * 1024
    body_bytes_max: int = 64 * 1024 * 1024
    bodies_bytes_max: int = 1024 * 1024 * 1024
    json_depth_max: int = 100
    connections_max: int = 4096
    pipelined_requests_max: int = 64
    idle_s_max: float = 75.0
    header_s_max: float = 10.0
    body_s_max: float = 60.0
    write_s_max: float = 30.0
    drain_s_max: float = 30.0
    run_s_max: float = 60.0
    memory_bytes_max: int = 0
    records_bytes_max: int = 1024 * 1024 * 1024
    records_flush_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """One documented setting.

    Attributes:
        name: Attribute of `Settings`; `server.<name>` in the file, `HEADRACE_<NAME>` in the environment.
        unit: Of the value.
        least, most: Accepted bounds, inclusive; None when unbounded.
        is_reloadable: Takes effect on reload without a restart.
        help: One sentence.
    """

    name: str
    unit: Unit
    least: float | None
    most: float | None
    is_reloadable: bool
    help: str

    @property
    def default(self) -> Any:
        return getattr(Settings(), self.name)

    def read(self, value: object) -> Any:
        """Read one value from a file, the environment or a flag.

        Raises:
            ValueError: With the value seen and what is accepted.
        """
        return read_value(value, kind=type(self.default), unit=self.unit, least=self.least, most=self.most)


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("http_host", "", None, None, False, "Address that the data plane listens on; 0.0.0.0 for every interface."),
    Setting("http_port", "", 0, 65535, False, "HTTP port of the data plane; 0 takes a free one."),
    Setting("admin_host", "", None, None, False, "Address of the admin port."),
    Setting("admin_port", "", 0, 65535, False, "Port of metrics, health and administration; 0 takes a free one."),
    Setting("workers", "processes", 0, 256, False, "Worker processes; 0 takes cores ÷ threads."),
    Setting("threads", "threads", 0, 256, False, "Threads that one model run may use; 0 takes cores ÷ workers."),
    Setting(
        "tls_cert", "", None, None, False, "Certificate chain (PEM); with tls_key it turns the HTTP port into HTTPS."
    ),
    Setting("tls_key", "", None, None, False, "Private key (PEM) of tls_cert."),
    Setting("header_bytes_max", "bytes", 1024, 1 << 20, False, "Most bytes of request line and headers; more is 431."),
    Setting(
        "body_bytes_max", "bytes", 1024, 1 << 31, False, "Most bytes of a body, as sent and decompressed; more is 413."
    ),
    Setting(
        "bodies_bytes_max",
        "bytes",
        1024,
        1 << 40,
        False,
        "Most bytes of all bodies that a worker has received in part; more get 503.",
    ),
    Setting("json_depth_max", "levels", 4, 1000, False, "Deepest nesting of a JSON body; deeper is 400."),
    Setting("connections_max", "connections", 1, 1 << 20, False, "Most open connections per worker; more get 503."),
    Setting(
        "pipelined_requests_max",
        "requests",
        1,
        10_000,
        False,
        "Most unanswered requests on one connection before it is read no further.",
    ),
    Setting("idle_s_max", "seconds", 0.1, 86_400, False, "Longest time a kept-alive connection may be silent."),
    Setting(
        "header_s_max",
        "seconds",
        0.1,
        3_600,
        False,
        "Longest time from a request's first byte to the end of its headers.",
    ),
    Setting(
        "body_s_max", "seconds", 0.1, 86_400, False, "Longest time from the end of the headers to the end of the body."
    ),
    Setting("write_s_max", "seconds", 0.1, 86_400, False, "Longest time a reader may take nothing of its answer."),
    Setting(
        "drain_s_max", "seconds", 0, 86_400, False, "Longest time that a stopping worker finishes requests in flight."
    ),
    Setting(
        "run_s_max", "seconds", 0.1, 86_400, False, "Longest time of one model run; a worker stuck longer is replaced."
    ),
    Setting(
        "memory_bytes_max",
        "bytes",
        0,
        1 << 50,
        False,
        "Resident memory above which a worker is drained and replaced; 0 is no limit.",
    ),
    Setting(
        "records_bytes_max",
        "bytes",
        1 << 20,
        1 << 50,
        False,
        "Disk space that record segments may take per worker; the oldest go first.",
    ),
    Setting(
        "records_flush_s", "seconds", 0.001, 10, False, "Longest time a buffered record waits before it is written."
    ),
)

BY_NAME: Final[dict[str, Setting]] = {setting.name: setting for setting in SETTINGS}


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `models:`, or the model named on the command line.

    Attributes:
        path: Artefact, or folder of models or of versions; written relative to the file, kept absolute.
        name: In the URL; empty takes the name found at the path.
        version: The only version to serve; empty serves all that are found.
        default_version: Serves requests that name no version, whatever `headrace model alias` says; empty takes the
            highest at the first start and then what that command chose.
        slo: Latency objective, such as `p99=50ms`; also the deadline of requests that bring none.
        contract: What requests may hold beyond what the artefact says.
        records: How requests are written down.
        batching: How batches are formed.
        runtime: How the model is executed.
        nonfinite: What a JSON answer does with NaN and infinity.
        labels: Class labels, in the order of the classes; empty takes those beside the artefact or in it.
        origin: Where the entry was written, for messages.
    """

    path: str
    name: str = ""
    version: str = ""
    default_version: str = ""
    slo: Slo | None = None
    contract: Contract = Contract()
    records: RecordPolicy = RecordPolicy()
    batching: BatchingPolicy = BatchingPolicy()
    runtime: RuntimeOptions = RuntimeOptions()
    nonfinite: NonFinitePolicy = "error"
    labels: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """All that was read.

    Attributes:
        settings: Values in force.
        origins: By setting: `default`, `headrace.yaml:3`, `HEADRACE_WORKERS` or `--workers`. `home` has one too.
        models: What shall be served, in the order written.
        home: State folder.
        file: The configuration file, None when there is none.
        notices: Things the operator should know that are no errors.
    """

    settings: Settings
    origins: Mapping[str, str]
    models: tuple[ModelEntry, ...]
    home: Path
    file: Path | None
    notices: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------------- the loader


@dataclass(slots=True)
class _Merge:
    """Values collected so far, later sources over earlier ones."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def take(self, setting: Setting, value: object, place: str, label: str) -> None:
        """Read one value; a wrong one becomes a problem at its place."""
        try:
            self.values[setting.name] = setting.read(value)
            self.origins[setting.name] = place
        except ValueError as error:
            self.problems.append(f"{place}: {label}: {error}" if label != place else f"{place}: {error}")


def load(
    source: str | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    config: str | None = None,
    name: str = "",
    slo: str = "",
    home: str | None = None,
    folder: Path | None = None,
) -> Configuration:
    """Merge all sources.

    Args:
        source: A model file, a folder, or a configuration file; None takes the configuration file's `models:`.
        flags: Values given as flags, by setting name; None values count as not given.
        environment: None takes the process's.
        config: Configuration file; None looks for `headrace.yaml` in the source folder, then in the working folder.
        name: Endpoint name; only with one model.
        slo: Objective for every model, as `p99=50ms`.
        home: State folder; None takes `HEADRACE_HOME`, else `.headrace`.
        folder: Working folder; None takes the process's.

    Raises:
        headrace.errors.ConfigError: With every problem that was found.
    """
    environment = os.environ if environment is None else environment
    folder = Path.cwd() if folder is None else folder
    merge = _Merge(origins={setting.name: "default" for setting in SETTINGS})
    file, model_path = _which_file(source, config or environment.get("HEADRACE_CONFIG"), folder)
    entries: list[ModelEntry] = []
    if file is not None:
        content, lines = read_file(file)
        _take_file(merge, content, lines)
        entries = _entries(merge, content.get("models"), lines, file.parent)
    _take_environment(merge, environment)
    for key, value in (flags or {}).items():
        if value is not None:
            merge.take(BY_NAME[key], value, flag_name(key), flag_name(key))
    if model_path is not None:
        if entries:
            merge.notices.append(f"serving {source} only; the models: of {file} are left out")
        entries = [ModelEntry(path=str(model_path), origin=str(source))]
    entries = _with_flags(merge, entries, name, slo)
    _check_together(merge)
    if merge.problems:
        raise ConfigError(merge.problems)
    merge.origins["home"] = "--home" if home else "HEADRACE_HOME" if environment.get("HEADRACE_HOME") else "default"
    return Configuration(
        settings=Settings(**merge.values),
        origins=merge.origins,
        models=tuple(entries),
        home=home_folder(home, environment=environment, folder=folder),
        file=file,
        notices=tuple(merge.notices),
    )


def home_folder(
    flag: str | Path | None, *, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Path:
    """The state folder: the flag, else `HEADRACE_HOME`, else `.headrace` in the working folder."""
    environment = os.environ if environment is None else environment
    chosen = flag or environment.get("HEADRACE_HOME") or ".headrace"
    return ((folder or Path.cwd()) / Path(chosen).expanduser()).absolute()


def flag_name(name: str) -> str:
    """`--http-port` for `http_port`."""
    return "--" + name.replace("_", "-")


def _which_file(source: str | None, config: str | None, folder: Path) -> tuple[Path | None, Path | None]:
    """The configuration file and the model path, either of which may be missing."""
    path = None if source is None else folder / Path(source).expanduser()
    if path is not None and path.suffix in (".yaml", ".yml", ".toml"):
        return path.absolute(), None
    if path is not None and path.is_dir() and config is None:
        for name in CONFIG_NAMES:
            if (path / name).is_file():
                return (path / name).absolute(), None
    model_path = None if path is None else path.absolute()
    if config is not None:
        return (folder / Path(config).expanduser()).absolute(), model_path
    for name in CONFIG_NAMES:
        if (folder / name).is_file():
            return (folder / name).absolute(), model_path
    return None, model_path


def _take_file(merge: _Merge, content: dict[str, Any], lines: Lines) -> None:
    for key in content:
        if key not in ("server", "models"):
            hint = nearest(str(key), ["server", "models", *BY_NAME])
            merge.problems.append(f"{lines.at(key)}: unknown section {key!r}{hint}; accepted: server, models")
    server = content.get("server") or {}
    if not isinstance(server, dict):
        merge.problems.append(f"{lines.at('server')}: server: holds {server!r}; accepted: a mapping of settings")
        return
    for key, value in server.items():
        setting = BY_NAME.get(str(key))
        if setting is None:
            merge.problems.append(
                f"{lines.at('server', str(key))}: unknown setting {key!r}{nearest(str(key), BY_NAME)}"
            )
        else:
            merge.take(setting, value, lines.at("server", str(key)), str(key))


def _take_environment(merge: _Merge, environment: Mapping[str, str]) -> None:
    for key, value in sorted(environment.items()):
        if not key.startswith("HEADRACE_") or key in ("HEADRACE_HOME", "HEADRACE_CONFIG"):
            continue
        name = key.removeprefix("HEADRACE_").lower()
        if name in BY_NAME:
            merge.take(BY_NAME[name], value, key, key)
        # Kubernetes puts HEADRACE_PORT=tcp://… and HEADRACE_SERVICE_PORT… into every pod beside a Service named
        # headrace; only what looks like a slip of the pen is a problem, the rest belongs to somebody else.
        elif "://" not in value and "_service_" not in f"_{name}_" and not re.search(r"port_\d+_", name):
            close = closest(name, BY_NAME, 0.8)
            if close:
                merge.problems.append(f"{key}: unknown setting (did you mean HEADRACE_{close.upper()}?)")


def _entries(merge: _Merge, models: object, lines: Lines, folder: Path) -> list[ModelEntry]:
    if models is None:
        return []
    if not isinstance(models, list):
        merge.problems.append(f"{lines.at('models')}: models: holds {models!r}; accepted: a list of entries with path:")
        return []
    entries = []
    for index, raw in enumerate(models):
        entry = _entry(merge, raw, lines, index, folder)
        if entry is not None:
            entries.append(entry)
    seen: dict[str, str] = {}
    for entry in entries:
        if entry.name and entry.name in seen:
            merge.problems.append(f"{entry.origin}: name {entry.name!r} is taken by {seen[entry.name]}; use another")
        seen.setdefault(entry.name, entry.origin)
    return entries


_ENTRY_KEYS: Final = tuple(name for name in ModelEntry.__struct_fields__ if name != "origin")


def _entry(merge: _Merge, raw: object, lines: Lines, index: int, folder: Path) -> ModelEntry | None:
    place = lines.at("models", index)
    if isinstance(raw, str):
        raw = {"path": raw}
    if not isinstance(raw, dict):
        merge.problems.append(f"{place}: models[{index}] is {raw!r}; accepted: a mapping with path:")
        return None
    before = len(merge.problems)
    values: dict[str, Any] = {"origin": place}
    for key, value in raw.items():
        try:
            values[key] = entry_value(str(key), value, folder)
        except KeyError:
            merge.problems.append(
                f"{lines.at('models', index, str(key))}: unknown key {key!r}{nearest(str(key), _ENTRY_KEYS)}"
            )
        except ValueError as error:
            path = error.path if isinstance(error, PartError) else ()
            merge.problems.append(f"{lines.at('models', index, str(key), *path)}: {key}: {error}")
    if "path" not in raw:
        merge.problems.append(f"{place}: models[{index}] has no path; accepted: path: of a model file or folder")
    return ModelEntry(**values) if len(merge.problems) == before else None


def _with_flags(merge: _Merge, entries: list[ModelEntry], name: str, slo: str) -> list[ModelEntry]:
    if name:
        if not valid_name(name):
            merge.problems.append(f"--name: {name!r} is not a name; accepted: letters, digits, - _ . and no /")
        elif len(entries) != 1:
            merge.problems.append(f"--name: {len(entries)} models are configured; accepted: with exactly one")
        else:
            entries = [msgspec.structs.replace(entries[0], name=name)]
    if slo:
        try:
            objective = parse_slo(slo)
            entries = [msgspec.structs.replace(entry, slo=objective) for entry in entries]
        except ValueError as error:
            merge.problems.append(f"--slo: {error}")
    return entries


def _check_together(merge: _Merge) -> None:
    """Rules that concern two settings."""
    settings = Settings(**merge.values)
    before = len(merge.problems)
    if bool(settings.tls_cert) != bool(settings.tls_key):
        given, missing = ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
        merge.problems.append(f"{merge.origins[given]}: {given} is set without {missing}; accepted: both or neither")
    for name in ("tls_cert", "tls_key"):
        path = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            merge.problems.append(f"{merge.origins[name]}: {name}: {path!r} cannot be read; accepted: a PEM file")
    if settings.tls_cert and settings.tls_key and len(merge.problems) == before:
        _check_certificate(merge, settings)
    if settings.http_port == settings.admin_port != 0:
        merge.problems.append(
            f"{merge.origins['admin_port']}: admin_port: {settings.admin_port} is http_port too; accepted: another port"
        )


def _check_certificate(merge: _Merge, settings: Settings) -> None:
    import ssl  # 20 ms that only those with a certificate pay

    try:
        # An empty password makes an encrypted key an error here instead of a question on some worker's terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=""
        )
    except (OSError, ValueError) as error:
        merge.problems.append(
            f"{merge.origins['tls_cert']}: tls_cert {settings.tls_cert!r} and tls_key {settings.tls_key!r} do not fit "
            f"together: {error}; accepted: a certificate chain and its unencrypted key, both PEM"
        )


def divide_cores(settings: Settings, cores: int) -> tuple[int, int]:
    """Workers and threads per run, so that workers × threads = cores unless both are given.

    Args:
        settings: Of which 0 means: choose.
        cores: That this process may use.

    Returns:
        Workers and threads, each at least 1.
    """
    if settings.workers and settings.threads:
        return settings.workers, settings.threads
    if settings.workers:
        return settings.workers, max(1, cores // settings.workers)
    threads = settings.threads or 1
    return max(1, cores // threads), threads


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, and the control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()[:2]
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
