"""Headrace over the bare minimum and beside its peers, in one run, by one command: `scripts/bench`.

Two placements, since two questions are asked. **What does Headrace's work cost?** One worker on one core, the generator
on another, against `headrace.testing.echo`, which answers the same bytes without doing anything for them. **What does a
deployment get?** Every server has all cores, in the form its documentation recommends, and shares them with the
generator. In both the servers are measured in turn, so that what the machine does meanwhile hits all of them.

The parts: `bench_load` measures, `bench_peers` starts and checks servers, `bench_profile` looks inside, `bench_report`
judges and writes, `bench_machine` knows the machine. What is left here is long because the order of measurements is
the method: who is measured when, on which cores and how often is to be checked in one place.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.drills import goodput
from headrace.drills.bench_load import Generator, Request, Sample, spread, summary
from headrace.drills.bench_machine import available_cores, filesystem, machine_facts, pinned_to, tree, usage
from headrace.drills.bench_peers import ROOT, Contender, Task, ask, echo, headrace, install, read_peers, running
from headrace.drills.bench_profile import profile, top_functions, total
from headrace.drills.bench_report import plot, ratios, report_lines, summarise
from headrace.drills.load import binary_infer_body, json_infer_body
from headrace.tensors import Array
from headrace.testing.models import breast_cancer, breast_cancer_rows, cnn, save
from headrace.testing.server import ServerProcess

__all__ = ["available_cores", "main", "pinned_to", "summarise", "top_functions", "total"]

CONNECTIONS: Final = (1, 16, 64)
TREES: Final = 100
SLO: Final = ("--slo", "p99=50ms")
# Sixteen callers who ask again at once wait 16 runs of 10 ms on two cores, 80 ms: under the objective above Headrace
# would refuse most of them, which is right, and no comparison.
CNN_SLO: Final = ("--slo", "p99=500ms")
# A CNN whose work is large and whose input is small, so that no server is measured on reading JSON: 3 × 32 × 32 values.
CNN_SIDE: Final = 32
CNN_CHANNELS: Final = (768, 768, 640, 512)
FORM_ROWS: Final = 64
TOOLS: Final = ("py-spy==0.4.1",)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often.

    Attributes:
        seconds: Of one measurement.
        repetitions: Of each measurement; `echo_repetitions` for the pairs with the echo, `starts` for starts.
        warm_s: Load before a measurement.
        try_s: Length of the short look at each form of a peer's configuration.
        has_peers: False leaves all peers out.
    """

    seconds: float = 4.0
    repetitions: int = 3
    echo_repetitions: int = 5
    starts: int = 5
    warm_s: float = 1.0
    try_s: float = 2.0
    has_peers: bool = True


QUICK: Final = Plan(seconds=3.0, echo_repetitions=3, starts=3, has_peers=False)


class Bench:
    """One run.

    Args:
        folder: For models and scratch files.
        home: Where environments of peers are kept.
        plan: Lengths.
        peers: Names; empty means all.
        generator: Offers the load.
        progress: Told what happens.
    """

    def __init__(
        self, folder: Path, home: Path, plan: Plan, peers: Sequence[str], generator: Generator,
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder, self.home, self.plan, self.wanted = folder, home, plan, peers
        self.generator, self.say = generator, progress
        cores = available_cores()
        self.server_core: int | None = cores[0] if len(cores) > 1 else None
        self.load_core: int | None = cores[-1] if len(cores) > 1 else None
        self._count = 0

    def own_folder(self) -> Path:
        """A fresh one for a server."""
        self._count += 1
        return self.folder / f"server-{self._count}"

    # ------------------------------------------------------------------------------------------------------- one core

    def one_core(self, task: Task, *, with_echo: bool = True) -> dict[str, Any]:
        """Headrace on one core against the echo, binary against JSON, and the profile."""
        request = task.request("/v2/models/{model}/infer", "oip")
        flags = ("--workers", "1", "--threads", "1", *SLO)
        server = ServerProcess(task.model, self.own_folder(), "--name", task.name, *flags)
        with pinned_to([self.server_core] if self.server_core is not None else available_cores()):
            server.start()
        try:
            spy = self.home / "tools" / "bin" / "py-spy"
            results: dict[str, Any] = {}
            if with_echo:
                status, headers, body = ask(server.http_port, request)
                if status != 200:
                    raise RuntimeError(f"the server answered {status}: {body!r}")
                head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                answer = f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body
                with self.on_one_core(echo(answer), task) as echo_port:
                    results["echo"] = summarise(self.pairs(server.http_port, echo_port, request))
                results["forms"] = self.forms(server.http_port, task)
            self.say("profile of the worker")
            found = profile(server, self.generator, request, self.folder, self.load_core, spy if spy.exists() else None)
            return results | {"profile": found}
        finally:
            server.stop()

    @contextmanager
    def on_one_core(self, contender: Contender, task: Task) -> Iterator[int]:
        """A server pinned as Headrace is; its port."""
        cores = None if self.server_core is None else [self.server_core]
        with running(contender, task, self.own_folder(), cores) as found:
            yield found.port

    def pairs(self, port: int, echo_port: int, request: Request) -> dict[int, list[tuple[Sample, Sample]]]:
        """Headrace and echo in turn; by connections, (Headrace, echo) for each repetition."""
        found: dict[int, list[tuple[Sample, Sample]]] = {connections: [] for connections in CONNECTIONS}
        for each in (port, echo_port):
            self.generator.measure(each, request, 16, self.plan.warm_s, self.load_core)
        for number in range(self.plan.echo_repetitions):
            for connections in CONNECTIONS:
                self.say(f"one core, repetition {number + 1}, {connections} connections")
                ours, theirs = (
                    self.generator.measure(each, request, connections, self.plan.seconds, self.load_core)
                    for each in (port, echo_port)
                )
                found[connections].append((ours, theirs))
        return found

    def forms(self, port: int, task: Task) -> dict[str, Any]:
        """Many rows as JSON and as binary tensors, in turn."""
        rows = np.repeat(task.json_row, FORM_ROWS, axis=0)
        binary, headers = binary_infer_body(task.input, rows.astype(np.float32))
        path = f"/v2/models/{task.name}/infer"
        requests = {
            "json": Request(path, json_infer_body(task.input, rows, datatype="FP32")),
            "binary": Request(path, binary, headers),
        }
        samples = self.alternate({name: (port, request) for name, request in requests.items()}, 16, self.load_core)
        return {"rows": FORM_ROWS, "connections": 16, **_compared(samples, "binary", "json")}

    def alternate(
        self, servers: dict[str, tuple[int, Request]], connections: int, core: int | None
    ) -> dict[str, list[Sample]]:
        """Measure servers that run already, in turn."""
        samples: dict[str, list[Sample]] = {name: [] for name in servers}
        for port, request in servers.values():
            self.generator.measure(port, request, connections, self.plan.warm_s, core)
        for number in range(self.plan.repetitions):
            for name, (port, request) in servers.items():
                self.say(f"{name}, repetition {number + 1}, {connections} connections")
                samples[name].append(self.generator.measure(port, request, connections, self.plan.seconds, core))
        return samples

    # ------------------------------------------------------------------------------------------------------ all cores

    def durability(self, task: Task) -> dict[str, Any]:
        """Strict against buffered records, with the state on the disk that holds the benchmark's cache."""
        folder = self.home / "disk"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kind, device = filesystem(folder)
        sync_s = _sync_s(folder / "probe")
        request = task.request("/v2/models/{model}/infer", "oip")
        servers: dict[str, ServerProcess] = {}
        try:
            for durability in ("buffered", "strict"):
                config = folder / f"{durability}.yaml"
                entry = {
                    "name": task.name, "path": str(task.model), "slo": "p99=50ms", "records": {"durability": durability}
                }  # fmt: skip
                config.write_text(json.dumps({"models": [entry]}))  # JSON is YAML
                servers[durability] = ServerProcess(config, folder / f"home-{durability}")
                servers[durability].start()
            samples = self.alternate({name: (each.http_port, request) for name, each in servers.items()}, 64, None)
        finally:
            for each in servers.values():
                each.stop()
            shutil.rmtree(folder, ignore_errors=True)
        return {
            "filesystem": kind, "device": device, "sync_s": sync_s, "connections": 64,
            **_compared(samples, "strict", "buffered"),
        }  # fmt: skip

    def starts(self, contender: Contender, task: Task) -> dict[str, Any]:
        """Time to the first reply, memory and idle CPU of one server, started several times."""
        first_s: list[float] = []
        rss: list[int] = []
        totals: list[int] = []
        idle: list[float] = []
        processes = 0
        for number in range(self.plan.starts if contender.name == "headrace" else 2):
            self.say(f"start {number + 1} of {contender.title}")
            with running(contender, task, self.own_folder()) as found:
                self.generator.measure(found.port, found.request, 16, 1.0)
                time.sleep(1.0)
                before = usage(tree(found.pid))
                time.sleep(2.0)
                after = usage(tree(found.pid))
            first_s.append(found.first_reply_s)
            rss.append(after.largest_rss_bytes)
            totals.append(after.total_bytes)
            idle.append((after.cpu_s - before.cpu_s) / 2.0)
            processes = after.processes
        return {
            "name": contender.name, "variant": contender.variant, "first_reply_s": spread(first_s),
            "worker_rss_bytes": spread(rss), "total_bytes": totals, "processes": processes, "idle_cpu_share": idle,
        }  # fmt: skip

    def install_peers(self) -> tuple[list[dict[str, Any]], list[Contender]]:
        """What became of each peer's installation, and all forms of those that are there."""
        told, contenders = [], []
        for peer in read_peers():
            if self.wanted and peer.name not in self.wanted:
                continue
            self.say(f"environment of {peer.title}")
            file = f"peers/{peer.program.name}"
            row = {"name": peer.name, "title": peer.title, "file": file, "reason": "", "versions": {}, "installed": {}}
            try:
                installed = peer.install(self.home)
                pinned = [dependency.partition("==")[0] for dependency in peer.dependencies]
                row |= {"installed": installed, "versions": {name: installed.get(name, "?") for name in pinned}}
                contenders += peer.contenders(self.home)
            except (RuntimeError, OSError) as error:
                row["reason"] = str(error)
            told.append(row)
        return told, contenders

    def try_forms(
        self, task: Task, contenders: Sequence[Contender], numbers: Sequence[int]
    ) -> tuple[list[dict[str, Any]], dict[int, list[Contender]]]:
        """A short look at each form of each peer, and per number of connections each peer's best one."""
        tried: list[dict[str, Any]] = []
        for contender in contenders:
            self.say(f"{task.name}: trying {contender.title}, {contender.variant}")
            rates: dict[str, float] = {}
            reason = ""
            try:
                with running(contender, task, self.own_folder()) as found:
                    self.generator.measure(found.port, found.request, 16, self.plan.warm_s)
                    for connections in numbers:
                        sample = self.generator.measure(found.port, found.request, connections, self.plan.try_s)
                        if sample.errors:
                            reason = f"{sample.errors} requests not answered with 200 at {connections} connections"
                        else:
                            rates[str(connections)] = sample.requests_per_s
            except RuntimeError as error:
                reason = str(error)
            short = reason.splitlines()[0] if reason else ""
            tried.append({**_named(contender), "task": task.name, "requests_per_s": rates, "reason": short})
        best: dict[int, list[Contender]] = {}
        for connections in numbers:
            winners: dict[str, tuple[float, Contender]] = {}
            for contender, row in zip(contenders, tried, strict=True):
                rate = row["requests_per_s"].get(str(connections), 0.0)
                if rate > winners.get(contender.name, (0.0, contender))[0]:
                    winners[contender.name] = (rate, contender)
            best[connections] = [contender for _, contender in winners.values()]
        return tried, best

    def side_by_side(
        self, task: Task, best: dict[int, list[Contender]], yardstick: Contender, objective: Sequence[str]
    ) -> dict[str, Any]:
        """Every server in turn, started afresh for each measurement, with all cores."""
        groups: dict[str, Any] = {}
        for connections, peers in best.items():
            contenders = [yardstick, headrace(*objective, variant="defaults"), *peers]
            samples: dict[str, list[Sample]] = {each.name: [] for each in contenders}
            for number in range(self.plan.repetitions):
                turn = number % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    self.say(f"{task.name}, repetition {number + 1}, {connections} connections: {contender.title}")
                    with running(contender, task, self.own_folder()) as found:
                        self.generator.measure(found.port, found.request, connections, self.plan.warm_s)
                        sample = self.generator.measure(found.port, found.request, connections, self.plan.seconds)
                    samples[contender.name].append(sample)
            groups[str(connections)] = {
                each.name: {
                    "variant": each.variant, **summary(samples[each.name]),
                    "samples": [asdict(sample) for sample in samples[each.name]],
                }
                for each in contenders
            }  # fmt: skip
        return groups

    # ------------------------------------------------------------------------------------------------------ the whole

    def run(self) -> dict[str, Any]:
        """Measure everything that the plan asks for."""
        self.say("models")
        tabular = _task("tabular", self.folder, breast_cancer(TREES), _patient())
        results = self.one_core(tabular)
        results["durability"] = self.durability(tabular)
        results["starts"] = [self.starts(headrace(*SLO, variant="defaults"), tabular)]
        if not self.plan.has_peers:
            return results
        image = np.random.default_rng(0).integers(0, 256, (1, 3, CNN_SIDE, CNN_SIDE)).astype(np.float64)
        network = _task("cnn", self.folder, cnn(side=CNN_SIDE, channels=CNN_CHANNELS), image)
        peers, contenders = self.install_peers()
        with running(headrace(*SLO), tabular, self.own_folder()) as found:
            status, headers, body = ask(found.port, found.request)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        yardstick = echo(f"HTTP/1.1 {status} OK\r\n{head}\r\n".encode() + body)
        tried, best = self.try_forms(tabular, contenders, CONNECTIONS)
        tried_network, best_network = self.try_forms(network, contenders, (16,))
        servers = {
            "tabular": self.side_by_side(tabular, best, yardstick, SLO),
            "cnn": self.side_by_side(network, best_network, yardstick, CNN_SLO),
        }
        servers["cnn"]["16"].pop("echo")  # it runs no model
        results["starts"] += [self.starts(contender, tabular) for contender in best[16]]
        for peer in peers:
            if not peer["reason"] and not any(peer["name"] in group for group in servers["tabular"].values()):
                reasons = [row["reason"] for row in tried if row["name"] == peer["name"]]
                peer["reason"] = next((reason for reason in reasons if reason), "no form of it answered")
        once_s = _run_s(network)
        return results | {
            "peers": peers,
            "tried": tried + tried_network,
            "servers": servers,
            "tasks": {
                "tabular": f"30 features, {TREES} trees, one row a request.",
                "cnn": f"A CNN that takes {once_s * 1e3:.1f} ms a run on one thread here; 3 × {CNN_SIDE} × {CNN_SIDE} "
                "values in JSON, one image a request.",
            },
        }


def _named(contender: Contender) -> dict[str, str]:
    return {"name": contender.name, "variant": contender.variant}


def _compared(samples: dict[str, list[Sample]], ours: str, theirs: str) -> dict[str, Any]:
    raw = {name: [asdict(sample) for sample in each] for name, each in samples.items()}
    return {
        **{name: summary(each) for name, each in samples.items()},
        "ratio": ratios(raw[ours], raw[theirs], "requests_per_s"),
        "samples": raw,
    }


def _patient() -> Array:
    """One row with the digits a caller would send: a float32 printed in full has up to seventeen."""
    rows, _ = breast_cancer_rows()
    rounded: Array = (rows[:1].astype(np.float64) * 1e4).round() / 1e4
    return rounded


def _session(model: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options)


def _task(name: str, folder: Path, model: bytes, json_row: Array) -> Task:
    path = save(folder / f"{name}.onnx", model)
    session = _session(path)
    row = json_row.astype(np.float32)
    input_name = session.get_inputs()[0].name
    outputs = [np.ravel(each).astype(np.float64) for each in session.run(None, {input_name: row})]
    return Task(name, path, input_name, row, json_row, np.concatenate(outputs))


def _run_s(task: Task) -> float:
    """Median time of one run on one thread, seconds."""
    session = _session(task.model)
    took_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        session.run(None, {task.input: task.row})
        took_s.append(time.perf_counter() - began_s)
    return spread(took_s)["median"]


def _sync_s(path: Path) -> float:
    """Median time of writing 4 kB and waiting until the disk has them, seconds."""
    took_s = []
    with open(path, "wb") as file:
        for _ in range(50):
            began_s = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fdatasync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return spread(took_s)["median"]


# ------------------------------------------------------------------------------------------------------------ command


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[str], None]]:
    """Tells what happens on stderr: one line that changes on a terminal, else a line each. Data is on stdout."""
    console = Console(stderr=True)
    if not console.is_terminal:
        began_s = time.monotonic()
        yield lambda text: console.print(f"bench: {time.monotonic() - began_s:5.0f} s  {text}", highlight=False)
        return
    columns = (
        TextColumn("bench"),
        BarColumn(pulse_style="cyan"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda text: progress.update(bar, description=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `scripts/bench`."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Headrace over a bare echo and beside its peers."
    )
    parser.add_argument("--quick", action="store_true", help="five minutes, without peers")
    parser.add_argument("--profile", action="store_true", help="only the profile of a worker by stage, 20 seconds")
    parser.add_argument("--goodput", action="store_true", help="batch policies in time and in overload, 35 minutes")
    parser.add_argument("--peers", default="", metavar="A,B", help="these peers only, such as mlserver,litserve")
    parser.add_argument("--install", action="store_true", help="only make the peers' environments")
    parser.add_argument("--own", action="store_true", help="use our own generator even when wrk is installed")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="what to print on stdout")
    parser.add_argument("--folder", type=Path, help="where results go; benchmarks for a full run, else the cache")
    options = parser.parse_args(arguments)
    known = [peer.name for peer in read_peers()]
    wanted = [name for name in options.peers.split(",") if name]
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"unknown peer {', '.join(unknown)}; accepted: {', '.join(known)}")
    home = Path(os.environ.get("HEADRACE_BENCH_HOME") or ROOT / ".bench")
    is_partial = bool(options.quick or wanted or options.profile)
    target = options.folder or (home / "last" if is_partial else ROOT / "benchmarks")
    command = " ".join(["scripts/bench", *(sys.argv[1:] if arguments is None else arguments)])
    if options.goodput:
        return goodput.measure(target, is_quick=options.quick, is_json=options.output == "json", command=command)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: no server stays behind
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, progress_on_stderr() as say:
        folder = Path(name)
        bench = Bench(
            folder, home, QUICK if options.quick else Plan(), wanted,
            Generator(folder, prefers_wrk=not options.own), say,
        )  # fmt: skip
        try:
            say("environment of py-spy")
            try:
                install(home / "tools", TOOLS)
            except RuntimeError as error:  # optional: the profile then says that it is missing
                say(str(error))
            if options.install:
                sys.stdout.writelines(
                    f"{peer['title']}: {peer['reason'] or 'ready'}\n" for peer in bench.install_peers()[0]
                )
                return 0
            if options.profile:
                task = _task("tabular", folder, breast_cancer(TREES), _patient())
                found = bench.one_core(task, with_echo=False)
            else:
                found = bench.run()
        except KeyboardInterrupt:
            print("bench: stopped", file=sys.stderr)
            return 130
        except RuntimeError as error:
            print(f"bench: FAILED: {error}", file=sys.stderr)
            return 1
        results = {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "took_s": time.monotonic() - began_s,
            "machine": machine_facts(),
            "generator": bench.generator.name,
            "placement": "Nothing was pinned." if bench.load_core is None
            else f"Servers on core {bench.server_core}, generator on core {bench.load_core}.",
            "seconds": bench.plan.seconds,
            "repetitions": bench.plan.repetitions,
            **found,
        }  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    picture = plot(results)
    if picture is not None:
        (target / "throughput.svg").write_text(picture)
        results["plot"] = "throughput.svg"
    text, document = "\n".join(report_lines(results)) + "\n", json.dumps(results, indent=1) + "\n"
    (target / "results.md").write_text(text)
    (target / "results.json").write_text(document)
    sys.stdout.write(document if options.output == "json" else text)
    print(f"bench: written to {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
