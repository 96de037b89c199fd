"""What `/metrics` says."""

import subprocess
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from headrace.clock import ManualClock
from headrace.records import Record
from headrace.telemetry.exposition import SlotsCollector, render
from headrace.telemetry.metrics import BY_NAME, CATALOGUE, PREFIX, SECONDS_BUCKETS, Meter, RecordFold, by_version
from headrace.telemetry.slots import ALIVE_S_MAX, SlotWriter, settle
from headrace.types import Ending


def a_record(total_s: float = 0.0012, version: str = "1") -> Record:
    return Record(
        "r", "0" * 32, 1e9, "snap", "flower", "iris", version, "", "baseline", 1.0, "http", "answered", "", 200, "", "",
        "", "", 1, 4, 1, 10, 20, 0.1, total_s, 0.001, 0.002, 0.003, 0.004,
    )  # fmt: skip


class Fleet:
    """Workers of one machine, and what a scrape of them says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(now_s=100.0)
        self.workers: list[SlotWriter] = []

    def start(self, number: int) -> SlotWriter:
        worker = SlotWriter.open(self.folder / f"worker-{number}.slots", clock=self.clock)
        self.workers.append(worker)
        return worker

    def scrape(self, accept: str = "") -> tuple[str, str]:
        body, content_type = render(SlotsCollector(lambda: self.folder.glob("*.slots"), self.clock), accept)
        return body.decode(), content_type

    def samples(self) -> dict[str, float]:
        """Sample name with its labels, as text, without the prefix → value."""
        return {
            line.rsplit(" ", 1)[0].removeprefix(PREFIX): float(line.rsplit(" ", 1)[1])
            for line in self.scrape()[0].splitlines()
            if not line.startswith("#")
        }


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def fill(worker: SlotWriter) -> None:
    """Give every metric of the catalogue a sample."""
    meter = Meter(worker)
    for metric in CATALOGUE:
        values = tuple(f'a "{name}"\n\\' for name in metric.labels)
        if metric.source in ("ledger", "reader"):
            continue
        if metric.kind == "counter":
            meter.counter(metric.name, *values).add()
        elif metric.kind == "gauge":
            meter.gauge(metric.name, *values).set(1.0)
        else:
            meter.histogram(metric.name, *values).observe(0.2)
    worker.ledger("flower").received()


@pytest.mark.service("promtool")
def test_promtool_has_nothing_to_say_about_it(fleet: Fleet) -> None:
    """With every metric of the catalogue present, `promtool check metrics` is silent (O1, O2)."""
    fill(fleet.start(1))
    finished = subprocess.run(
        ["promtool", "check", "metrics"], input=fleet.scrape()[0], capture_output=True, text=True, timeout=30
    )

    assert (0, "") == (finished.returncode, (finished.stdout + finished.stderr).strip())


@pytest.mark.parametrize("accept", ["", "*/*", "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"])
def test_every_metric_of_the_catalogue_is_exposed_in_the_format_asked_for(fleet: Fleet, accept: str) -> None:
    """Text by default, OpenMetrics by Accept; a parser that is not ours finds every catalogued metric with its kind and
    labels, and nothing else (O1, O2)."""
    fill(fleet.start(1))
    body, content_type = fleet.scrape(accept)
    is_openmetrics = "openmetrics" in accept
    families = list((parse_openmetrics if is_openmetrics else parse_text)(body))

    assert is_openmetrics == content_type.startswith("application/openmetrics-text")
    assert is_openmetrics == body.endswith("# EOF\n")
    assert [metric.name.removesuffix("_total") for metric in CATALOGUE] == [
        family.name.removeprefix(PREFIX) for family in families
    ]
    for metric, family in zip(CATALOGUE, families, strict=True):
        assert metric.kind == family.type
        assert metric.help == family.documentation
        assert all(set(metric.labels) == set(sample.labels) - {"le"} for sample in family.samples)


def test_workers_are_added_up(fleet: Fleet) -> None:
    """Counters, histograms and ledgers of all workers become one number; other gauges merge as declared (O1)."""
    for number in (1, 2, 3):
        worker = fleet.start(number)
        RecordFold(worker).fold(by_version([a_record()] * number))
        ledger = worker.ledger("flower")
        for _ in range(number):
            ledger.received()
        ledger.ended(Ending.ANSWERED)
        meter = Meter(worker)
        meter.gauge("records_writable").set(float(number != 2))
        meter.gauge("snapshot_info", "new" if number == 1 else "old").set(1.0)
        meter.gauge("snapshot_info", "older").set(0.0)
        worker.connections.add(number)
    samples = fleet.samples()

    assert samples['requests_total{code="",ending="answered",endpoint="flower",model="iris",version="1"}'] == 6
    assert samples['request_seconds_count{endpoint="flower",model="iris",version="1"}'] == 6
    assert samples['request_seconds_sum{endpoint="flower",model="iris",version="1"}'] == pytest.approx(0.0072)
    assert samples['received_total{endpoint="flower"}'] == 6
    assert samples['in_flight{endpoint="flower"}'] == 3
    assert samples['conservation_difference{endpoint="flower"}'] == 0
    assert samples["records_writable"] == 0
    assert {"new", "old"} == {name.split('"')[1] for name in samples if name.startswith("snapshot_info")}
    assert [1, 2, 3] == [samples[f'connections{{worker="{number}"}}'] for number in (1, 2, 3)]


def test_buckets_are_cumulative(fleet: Fleet) -> None:
    """Each bucket counts what is at or below its bound, +Inf counts all (O1)."""
    times_s = [0.00001, 0.00005, 0.0012, 0.3, 10.0, 99.0]
    RecordFold(fleet.start(1)).fold(by_version([a_record(total_s) for total_s in times_s]))
    samples = fleet.samples()

    for bound in (*SECONDS_BUCKETS, float("inf")):
        le = "+Inf" if bound == float("inf") else repr(bound)
        name = f'request_seconds_bucket{{endpoint="flower",le="{le}",model="iris",version="1"}}'
        assert sum(total_s <= bound for total_s in times_s) == samples[name]


def test_what_a_killed_worker_held_is_failed_with_worker_lost(fleet: Fleet) -> None:
    """Its requests end, in the ledger and in requests_total, and the law holds before and after (O1)."""
    worker = fleet.start(1)
    worker.ledger("flower").received()
    worker.ledger("flower").received()
    worker.ledger("flower").ended(Ending.ANSWERED)
    assert fleet.samples()['in_flight{endpoint="flower"}'] == 1
    worker.close()
    settle(worker.path)
    samples = fleet.samples()

    assert samples['requests_total{code="worker_lost",ending="failed",endpoint="flower",model="",version=""}'] == 1
    assert samples['in_flight{endpoint="flower"}'] == 0
    assert samples['conservation_difference{endpoint="flower"}'] == 0


def test_a_silent_worker_is_down_and_its_gauges_are_not_believed(fleet: Fleet) -> None:
    """Without a heartbeat a worker is down: its state is not shown, its counts are; one that stopped on purpose is not
    missed (O1)."""
    silent, stopped = fleet.start(1), fleet.start(2)
    for number, worker in enumerate((silent, stopped), start=1):
        Meter(worker).gauge("memory_bytes", str(number)).set(1e8)
        Meter(worker).counter("cpu_seconds_total", str(number)).add(2.5)
    stopped.close()
    fleet.clock.advance(ALIVE_S_MAX + 1)
    samples = fleet.samples()

    assert samples['worker_up{worker="1"}'] == 0
    assert samples['cpu_seconds_total{worker="1"}'] == samples['cpu_seconds_total{worker="2"}'] == 2.5
    assert not {'worker_up{worker="2"}', 'memory_bytes{worker="1"}', 'memory_bytes{worker="2"}'} & set(samples)


def test_a_file_that_cannot_be_read_does_not_end_the_scrape(fleet: Fleet) -> None:
    """The others are shown, and the trouble is a metric (O1)."""
    fleet.start(1)
    (fleet.folder / "worker-2.slots").write_bytes(b"rubbish")
    samples = fleet.samples()

    assert samples["slots_unreadable"] == 1
    assert samples['worker_up{worker="1"}'] == 1


def test_counts_under_an_earlier_releases_bounds_are_kept(fleet: Fleet) -> None:
    """When the bounds of a histogram change, old counts move to the next bound above: the total stays exact (O1)."""
    worker = fleet.start(1)
    labels = {"endpoint": "flower", "model": "iris", "version": "1"}
    histogram = worker.histogram("batch_rows", labels, (3.0, 5000.0))
    for rows in (2.0, 3.0, 4.0, 9000.0):
        histogram.observe(rows)
    worker.histogram("batch_rows", labels, BY_NAME["batch_rows"].buckets).observe(2.0)
    samples = fleet.samples()
    bucket = 'batch_rows_bucket{{endpoint="flower",le="{}",model="iris",version="1"}}'

    assert [1, 3, 3, 5] == [samples[bucket.format(le)] for le in ("2.0", "4.0", "1024.0", "+Inf")]
    assert samples['batch_rows_sum{endpoint="flower",model="iris",version="1"}'] == 9011


def test_slots_of_other_processes_count_and_are_no_worker(fleet: Fleet) -> None:
    """What the supervisor counts is shown; it is not taken for a worker that fell silent (O1)."""
    supervisor = SlotWriter.open(fleet.folder / "supervisor.slots", clock=fleet.clock)
    Meter(supervisor).counter("replica_restarts_total", "flower", "iris", "1").add()
    fleet.clock.advance(ALIVE_S_MAX + 1)
    samples = fleet.samples()

    assert samples['replica_restarts_total{endpoint="flower",model="iris",version="1"}'] == 1
    assert not [name for name in samples if name.startswith(("worker_", "connections"))]


@pytest.mark.parametrize("version", ["x.y", "", "..", "1.0.0.0.0"])
def test_a_version_that_is_none_is_answered_in_the_plain_format(fleet: Fleet, version: str) -> None:
    """O2: whoever asks for a format that does not exist is told the metrics, not an internal error."""
    body, content_type = fleet.scrape(f"text/plain;version={version}")

    assert "headrace_build_info" in body
    assert content_type.startswith("text/plain")
