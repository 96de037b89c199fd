"""`headrace version`."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from headrace import __version__
from headrace.cli.output import Output, print_json, print_table

PACKAGES = ("numpy", "onnxruntime", "msgspec", "uvloop", "httptools")


def version(*, output: Output = "table") -> None:
    """Show the version of Headrace, Python and what answers depend on.

    For example:

      headrace version -o json
    """
    versions = {"headrace": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = installed(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    if output == "json":
        print_json(versions)
    else:
        print_table(("PACKAGE", "VERSION"), list(versions.items()))
