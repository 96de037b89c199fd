"""`headrace worker`: one data-plane process without a supervisor."""

from typing import Annotated

from cyclopts import Parameter

from headrace.app import start
from headrace.cli.serve import prepare, read, with_settings


def worker(
    source: Annotated[str | None, Parameter(help="A model file, a folder of models, or a configuration file.")] = None,
    /,
    *,
    name: Annotated[str, Parameter(help="Name in the URL; else that of the file.", show_default=False)] = "",
    slo: Annotated[str, Parameter(help="Latency objective, such as p99=50ms.", show_default=False)] = "",
    config: Annotated[str | None, Parameter(help="Configuration file; else headrace.yaml when there is one.")] = None,
    home: Annotated[str | None, Parameter(help="State folder; else HEADRACE_HOME, else .headrace.")] = None,
    **settings: str,
) -> None:
    """Run one worker that listens itself and serves its own metrics on the admin port.

    For places that already restart and count processes, such as Kubernetes. SIGTERM and SIGHUP do what they do to
    `headrace serve`. Without a SOURCE and without models: in
    a configuration file it serves what the home folder says.

    For example:

      headrace worker model.onnx --http-host 0.0.0.0 --admin-host 0.0.0.0
    """
    settings.setdefault("workers", "1")
    configuration = read(source, name, slo, config, home, settings)
    if configuration.models:
        root, lock_fd = prepare(configuration, source, name, slo, config)
    else:
        prepared = start.prepare_home(configuration.home)
        lock_fd = start.take_lock(prepared, configuration.settings.drain_s_max + 5.0)
        start.write_settings(prepared, start.effective_settings(configuration.settings))
        root = prepared.root
    start.exec_module("headrace.app.worker", "--standalone", "--home", str(root), keep_fds=(lock_fd,))


with_settings(worker)
