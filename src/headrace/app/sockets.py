"""Listening sockets, opened once by the supervisor and inherited by whoever serves on them.

One socket for all workers, not SO_REUSEPORT: a closing SO_REUSEPORT listener resets the connections in its queue, and
hashing gives a few connections to few workers. The queue of the shared socket survives any worker.
"""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from headrace.app.start import StartError

BACKLOG = 4096


def listen(host: str, port: int, setting: str) -> socket.socket:
    """Open a listening socket.

    Args:
        host: Address or name; `0.0.0.0` and `::` are every interface.
        port: 0 takes a free one.
        setting: `http` or `admin`, for messages.

    Raises:
        StartError: With the next step.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise _bad_host(host, setting, str(getattr(error, "strerror", error))) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(min(BACKLOG, somaxconn()))
    except OSError as error:
        listener.close()
        raise _explain(error, host, port, setting) from error
    listener.setblocking(False)
    return listener


def _bad_host(host: str, setting: str, reason: str) -> StartError:
    return StartError(
        f"{setting}_host {host!r} is not an address of this machine: {reason}",
        f"use 127.0.0.1 (this machine only) or 0.0.0.0 (every interface): --{setting}-host 0.0.0.0",
    )


def _explain(error: OSError, host: str, port: int, setting: str) -> StartError:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        return StartError(
            f"{setting}_port {port} on {host} is in use" + (f" by {owner}" if owner else " by another program"),
            f"stop it, or take another port: --{setting}-port {port + 1 if port < 65535 else 0}",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartError(
            f"{setting}_port {port} needs privileges that this process does not have",
            f"take a port from 1024 up, for example --{setting}-port {8000 + port if port < 1024 else 8080}",
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return _bad_host(host, setting, error.strerror or str(error))
    return StartError(f"cannot listen on {host}:{port}: {error.strerror or error}")


def somaxconn() -> int:
    """Longest queue of connections that the kernel grants."""
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return BACKLOG


def port_owner(port: int) -> str:
    """Who listens on a port, as `python3 (pid 12)`; empty when /proc does not tell."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return ""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if any(target in inodes for target in _targets(folder)):
            try:
                return f"{_name(folder.parent)} (pid {folder.parent.name})"
            except OSError:
                continue
    return ""


def _name(process: Path) -> str:
    # The kernel's name for it stops after 15 characters; our own processes write a title over their arguments.
    title = (process / "cmdline").read_text(errors="replace").rstrip("\0 ")
    return title if title.startswith("headrace:") else (process / "comm").read_text().strip()


def _targets(folder: Path) -> Iterator[str]:
    """What a process has open; nothing of a process that may not be looked into."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:
            continue  # closed since it was listed, as is the descriptor that listed it


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield f"socket:[{fields[9]}]"
