"""`headrace control`: the control process without a supervisor."""

from headrace.app import start
from headrace.cli.output import HomeFlag
from headrace.config import home_folder


def control(*, home: HomeFlag = None) -> None:
    """Serve metrics, health and status of a home folder on the admin port.

    For example:

      headrace control --home /var/lib/headrace
    """
    start.exec_module("headrace.app.control", "--home", str(home_folder(home)))
