"""The catalogue and the fold of records into metrics."""

import subprocess
import sys
import timeit
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.records import Record
from headrace.telemetry import metrics
from headrace.telemetry.metrics import BY_NAME, CATALOGUE, STAGES, Meter, RecordFold, by_version
from headrace.telemetry.slots import SlotWriter, read_slots
from headrace.types import Ending


def a_record(
    *,
    endpoint: str = "flower",
    version: str = "1",
    ending: str = "answered",
    code: str = "",
    degraded: str = "",
    field: str = "",
    reason: str = "",
    batch_rows: int = 4,
    times_s: tuple[float, float, float, float, float] = (0.01, 0.001, 0.002, 0.003, 0.004),
) -> Record:
    return Record(
        "r", "0" * 32, 1e9, "snap", endpoint, "iris", version, "", "baseline", 1.0, "http", ending, code, 200, "",
        degraded, field, reason, 1, batch_rows, 1, 10, 20, 0.1, *times_s,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-1.slots"


RECORDS = st.lists(
    st.builds(
        a_record,
        endpoint=st.sampled_from(["flower", "unknown"]),
        version=st.sampled_from(["1", "2", ""]),
        ending=st.sampled_from([ending.value for ending in Ending]),
        code=st.sampled_from(["", "queue_full", "invalid_input", "model_loading"]),
        degraded=st.sampled_from(["", "smaller_model"]),
        field=st.sampled_from(["x", "x.age"]),
        reason=st.sampled_from(["", "range"]),
        batch_rows=st.integers(0, 2000),
        times_s=st.tuples(*[st.floats(0, 100)] * 5),
    ),
    max_size=20,
)


@given(records=RECORDS)
def test_every_metric_of_the_fold_can_be_recounted_from_the_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    """Metrics are a fold over records: counting the records by hand gives the same numbers (O1)."""
    path = tmp_path_factory.mktemp("slots") / "worker-1.slots"
    writer = SlotWriter.open(path)
    fold = RecordFold(writer)
    fold.fold(by_version(records[:7]))
    fold.fold(by_version(records[7:]))
    writer.close()
    values = read_slots(path)

    def counted(name: str) -> dict[tuple[str, ...], float]:
        names = BY_NAME[name].labels
        return {tuple(labels[name] for name in names): value for labels, value in values.counters(name)}

    def observed(name: str) -> dict[tuple[str, ...], float]:
        names = BY_NAME[name].labels
        counts = {tuple(labels[name] for name in names): sum(found.counts) for labels, found in values.histograms(name)}
        return {key: count for key, count in counts.items() if count}

    def by_hand(*extra: str, among: list[Record]) -> dict[tuple[str, ...], float]:
        return Counter(
            tuple(getattr(record, name) for name in ("endpoint", "model", "version", *extra)) for record in among
        )

    rejected = [record for record in records if record.ending == "rejected"]
    assert by_hand("ending", "code", among=records) == counted("requests_total")
    assert by_hand("code", among=rejected) == counted("rejected_total")
    assert by_hand("field", "reason", among=[r for r in rejected if r.reason]) == counted("validation_failures_total")
    assert by_hand(among=[r for r in rejected if r.code == "model_loading"]) == counted("cold_starts_total")
    assert by_hand("degraded", among=[r for r in records if r.degraded]) == counted("degraded_total")
    assert by_hand(among=records) == observed("request_seconds")
    assert by_hand(among=[r for r in records if r.batch_rows]) == observed("batch_rows")
    assert Counter(
        (record.endpoint, stage) for record in records for stage in STAGES if getattr(record, f"{stage}_s") > 0
    ) == observed("stage_seconds")
    assert sum(record.total_s for record in records) == pytest.approx(
        sum(found.sum for _, found in values.histograms("request_seconds"))
    )
    for labels, found in values.histograms("stage_seconds"):
        times_s = [getattr(r, f"{labels['stage']}_s") for r in records if r.endpoint == labels["endpoint"]]
        for index, bound in enumerate(found.bounds):
            assert sum(0 < value <= bound for value in times_s) == sum(found.counts[: index + 1])


def test_the_catalogue_keeps_the_naming_rules() -> None:
    """One naming and label scheme: counters end in _total, units are seconds and bytes, nothing is named twice (O1)."""
    assert len(CATALOGUE) == len(BY_NAME)
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith("."), metric.name
        assert {"endpoint", "model", "version"} <= set(metric.labels) or "model" not in metric.labels
        if metric.buckets == metrics.SECONDS_BUCKETS:
            assert (50e-6, 10.0) == (metric.buckets[0], metric.buckets[-1])
            assert metric.name.endswith("_seconds")


def test_a_meter_refuses_what_is_not_in_the_catalogue(path: Path) -> None:
    """A metric exists when it is declared; a wrong kind or a missing label is found by the first run (O1)."""
    meter = Meter(SlotWriter.open(path))
    meter.gauge("queue_requests", "flower", "iris", "1").set(3.0)

    with pytest.raises(ValueError, match="asked for counter"):
        meter.counter("queue_requests", "flower", "iris", "1")
    with pytest.raises(ValueError, match="with the labels"):
        meter.gauge("queue_requests", "flower")
    with pytest.raises(KeyError):
        meter.gauge("made_up")


def test_the_fold_stays_bounded_when_versions_come_and_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-ups it remembers have a bound, and forgetting them loses no count (O1)."""
    monkeypatch.setattr(metrics, "_SERIES_MAX", 3)
    fold = RecordFold(SlotWriter.open(path))
    fold.fold(by_version([a_record(version=str(index % 10)) for index in range(100)]))

    assert len(fold._series) <= 3
    assert [10.0] * 10 == [value for _, value in read_slots(path).counters("requests_total")]


def test_folding_a_record_is_cheap(path: Path) -> None:
    """About 2 µs per record on the reference machine, one at a time or many; ten times that is wrong anywhere (O1)."""
    fold = RecordFold(SlotWriter.open(path))
    records = [a_record()] * 16

    assert min(timeit.repeat(lambda: fold.fold(by_version(records)), number=20, repeat=20)) / 20 / 16 < 20e-6


def test_the_reference_pages_say_what_the_code_says() -> None:
    """Metrics, records, errors, settings and commands are documented as they are: drift fails the build (O1)."""
    script = Path(__file__).parents[2] / "scripts" / "generate-docs"
    finished = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=30)

    assert (0, "") == (finished.returncode, finished.stderr)
