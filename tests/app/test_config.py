"""The loader: four sources, one origin per value, every problem at once."""

from pathlib import Path

import pytest

from headrace.config import SETTINGS, Setting, Settings, divide_cores, home_folder, load, usable_cores
from headrace.config_values import parse_bytes, parse_seconds, parse_slo, show_value
from headrace.errors import ConfigError
from headrace.snapshot import Slo


def write(folder: Path, text: str, name: str = "headrace.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(folder: Path, **arguments: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(**{"environment": {}, "folder": folder, **arguments})  # type: ignore[arg-type]
    return caught.value.problems


def test_every_setting_is_declared_once_and_has_a_default_within_its_bounds() -> None:
    """`SETTINGS` and `Settings` are the same list (L6)."""
    names = [setting.name for setting in SETTINGS]

    assert list(Settings.__struct_fields__) == names
    for setting in SETTINGS:
        if setting.least is not None and setting.most is not None:
            assert setting.least <= setting.default <= setting.most, setting.name


def test_a_later_source_outranks_an_earlier_one_and_each_origin_is_known(tmp_path: Path) -> None:
    """defaults < file < environment < flags (L6)."""
    write(tmp_path, "server:\n  workers: 2\n  threads: 3\n  http_port: 9000\n")

    read = load(
        environment={"HEADRACE_THREADS": "4", "HEADRACE_HTTP_PORT": "9001"},
        flags={"http_port": "9002", "admin_port": None},
        folder=tmp_path,
    )

    settings = read.settings
    assert (8082, 2, 4, 9002) == (settings.admin_port, settings.workers, settings.threads, settings.http_port)
    assert "default" == read.origins["admin_port"]
    assert "headrace.yaml:2" == read.origins["workers"]
    assert "HEADRACE_THREADS" == read.origins["threads"]
    assert "--http-port" == read.origins["http_port"]


def test_sizes_and_durations_are_read_with_their_units(tmp_path: Path) -> None:
    """`64MiB`, `50ms` and plain numbers mean what people think they mean (L6)."""
    write(tmp_path, "server:\n  body_bytes_max: 8MiB\n  idle_s_max: 1.5m\n  write_s_max: 7\n")

    settings = load(environment={"HEADRACE_HEADER_S_MAX": "500ms"}, folder=tmp_path).settings

    assert 8 * 2**20 == settings.body_bytes_max
    assert 90.0 == settings.idle_s_max
    assert 7.0 == settings.write_s_max
    assert 0.5 == settings.header_s_max
    assert 64 * 2**20 == parse_bytes("64Mi") == parse_bytes(str(64 * 2**20))
    assert 0.05 == pytest.approx(parse_seconds("50ms"))


@pytest.mark.parametrize("setting", SETTINGS, ids=[setting.name for setting in SETTINGS])
def test_a_value_that_is_shown_can_be_typed(setting: Setting) -> None:
    """`64 MiB` on the screen is `64 MiB` in the file (L6)."""
    assert setting.default == setting.read(show_value(setting.default, setting.unit))


def test_sizes_and_durations_are_shown_in_the_largest_unit_that_fits() -> None:
    """Nobody counts the digits of 67108864 (L6)."""
    sizes = [show_value(value, "bytes") for value in (0, 1000, 16 * 2**10, 64 * 2**20, 2**50)]

    assert ["0", "1000", "16 KiB", "64 MiB", "1024 TiB"] == sizes
    assert ["0 s", "50 ms", "75 s"] == [show_value(value, "seconds") for value in (0.0, 0.05, 75.0)]


def test_a_number_that_is_none_says_what_is_accepted(tmp_path: Path) -> None:
    """What was seen, and the bounds in the unit of the setting (L6)."""
    found = problems(tmp_path, flags={"workers": "two", "body_bytes_max": "4GiB", "idle_s_max": "0"})

    assert [
        "--workers: 'two' is not a whole number; accepted: 0 to 256",
        "--body-bytes-max: '4GiB' is out of range; accepted: 1 KiB to 2 GiB",
        "--idle-s-max: '0' is out of range; accepted: 100 ms to 86400 s",
    ] == found


def test_all_problems_are_reported_at_once_with_line_value_and_nearest_key(tmp_path: Path) -> None:
    """One start shows everything that is wrong (L6)."""
    write(
        tmp_path,
        "server:\n"
        "  wrokers: 2\n"
        "  http_port: 99999\n"
        "  idle_s_max: soon\n"
        "  threads: yes\n"
        "sever: {}\n"
        "models:\n"
        "  - path: a.onnx\n"
        "    sloo: p99=5ms\n"
        "  - name: b\n"
        "  - path: c.onnx\n"
        "    slo: fast\n",
    )

    found = problems(tmp_path, environment={"HEADRACE_WORKRES": "2"}, flags={"admin_port": "x"})

    expected = [
        ("headrace.yaml:2", "'wrokers'", "'workers'"),
        ("headrace.yaml:3", "99999", "0 to 65,535"),
        ("headrace.yaml:4", "'soon'", "50ms"),
        ("headrace.yaml:5", "True", "not a number"),
        ("headrace.yaml:6", "'sever'", "'server'"),
        ("headrace.yaml:9", "'sloo'", "'slo'"),
        ("headrace.yaml:10", "no path", "path:"),
        ("headrace.yaml:12", "'fast'", "p99=50ms"),
        ("HEADRACE_WORKRES", "unknown setting", "HEADRACE_WORKERS"),
        ("--admin-port", "'x'", "whole number"),
    ]
    for parts in expected:
        assert any(all(part in problem for part in parts) for problem in found), (parts, found)
    assert len(expected) == len(found), found


def test_variables_that_kubernetes_adds_are_no_problem(tmp_path: Path) -> None:
    """A Service named headrace must not stop the pods behind it (S5)."""
    environment = {
        "HEADRACE_PORT": "tcp://10.0.0.1:8080",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT": "8080",
        "HEADRACE_SERVICE_PORT_HTTP": "8080",
        "HEADRACE_PORT_8080_TCP_PORT": "8080",
    }

    assert Settings() == load(environment=environment, folder=tmp_path).settings


def test_a_models_entry_becomes_typed_parts(tmp_path: Path) -> None:
    """Everything an endpoint can be told is said in the file (P3, S1)."""
    write(
        tmp_path,
        "models:\n"
        "  - name: churn\n"
        "    path: models/churn.onnx\n"
        "    slo: p99.9=1s\n"
        "    version: 3\n"
        "    records: {durability: strict, payload_rate: 0.1}\n"
        "    batching: {policy: fixed_delay, delay_s: 2ms}\n"
        "    runtime: {threads: 2}\n"
        "    nonfinite: 'null'\n"
        "    labels: [stay, leave]\n"
        "    contract:\n"
        "      inputs:\n"
        "        X: {min: 0, fields: [{name: age, max: 130}]}\n",
    )

    entry = load(environment={}, folder=tmp_path).models[0]

    assert str(tmp_path / "models/churn.onnx") == entry.path
    assert Slo(quantile=0.999, threshold_s=1.0) == entry.slo
    assert "3" == entry.version
    assert "strict" == entry.records.durability
    assert 0.002 == pytest.approx(entry.batching.delay_s)
    assert ("stay", "leave") == entry.labels
    assert "age" == entry.contract.inputs["X"].fields[0].name
    assert "headrace.yaml:2" == entry.origin


def test_a_wrong_contract_names_the_place_inside_it(tmp_path: Path) -> None:
    """Typed parts give readable errors, not library jargon (P3)."""
    write(
        tmp_path,
        "models:\n  - path: a.onnx\n    contract: {inputs: {X: {mni: 0}}}\n"
        "  - path: b.onnx\n    records: {durability: eventual}\n",
    )

    found = problems(tmp_path)

    assert 2 == len(found), found
    assert "mni" in found[0]
    assert "'min'" in found[0]
    assert found[0].startswith("headrace.yaml:3: contract:")
    assert "eventual" in found[1]
    assert "durability" in found[1]


def test_a_wrong_part_says_its_line_its_value_and_what_is_accepted(tmp_path: Path) -> None:
    """The words of the file, not of a library (P3)."""
    write(
        tmp_path,
        "models:\n"
        "  - path: a.onnx\n"
        "    labels: setosa\n"
        "    contract:\n"
        "      inputs:\n"
        "        X: {min: 0}\n"
        "        Y:\n"
        "          min: a\n"
        "    records:\n"
        "      durability: always\n"
        "    batching: {rows_max: 0}\n"
        "  - path: b.onnx\n"
        "    records:\n"
        "      payload_rate: 5\n"
        "    contract:\n"
        "      inputs:\n"
        "        X:\n"
        "          fields:\n"
        "            - {name: age, mni: 0}\n",
    )

    found = problems(tmp_path)

    assert [
        "headrace.yaml:3: labels: 'setosa'; accepted: a list of text",
        "headrace.yaml:8: contract: inputs.Y.min is 'a'; accepted: a number",
        "headrace.yaml:10: records: durability is 'always'; accepted: buffered, strict",
        "headrace.yaml:11: batching: rows_max is 0; accepted: 1 to 1,048,576",
        "headrace.yaml:14: records: payload_rate is 5; accepted: 0 to 1",
        "headrace.yaml:19: contract: inputs.X.fields[0] has an unknown key 'mni' (did you mean 'min'?); "
        "accepted: name, index, min, max, categories, required, default",
    ] == found


def test_a_configuration_file_that_is_missing_is_said_plainly(tmp_path: Path) -> None:
    """The path once, no errno (L6)."""
    path = tmp_path / "other.yaml"

    assert [f"{path}: cannot be read: No such file or directory; accepted: a YAML or TOML file"] == problems(
        tmp_path, source="other.yaml"
    )


def test_a_key_that_is_given_twice_is_a_problem(tmp_path: Path) -> None:
    """YAML would silently take the last (L6)."""
    write(tmp_path, "server:\n  workers: 1\n  workers: 2\n")

    assert ["headrace.yaml:3: workers is given twice; keep one"] == problems(tmp_path)


def test_broken_yaml_says_the_line(tmp_path: Path) -> None:
    """A syntax error is found without guessing (L6)."""
    write(tmp_path, "server:\n  workers: [1\nmodels: x\n")

    assert problems(tmp_path)[0].startswith("headrace.yaml:3: is not YAML")


def test_toml_says_the_same(tmp_path: Path) -> None:
    """Both formats carry the same content (L6)."""
    write(tmp_path, '[server]\nworkers = 3\n\n[[models]]\npath = "a.onnx"\nslo = "p50=5ms"\n', "headrace.toml")

    read = load(environment={}, folder=tmp_path)

    assert 3 == read.settings.workers
    assert "headrace.toml:2" == read.origins["workers"]
    assert Slo(quantile=0.5, threshold_s=0.005) == read.models[0].slo


@pytest.mark.parametrize(
    ("text", "quantile", "threshold_s"),
    [("p99=50ms", 0.99, 0.05), ("p99.9=1s", 0.999, 1.0), (" p50 = 800us ", 0.5, 0.0008), ("p95<20ms", 0.95, 0.02)],
)
def test_an_objective_is_read(text: str, quantile: float, threshold_s: float) -> None:
    """`p99=50ms` is how people say it (S1)."""
    slo = parse_slo(text)

    assert (quantile, threshold_s) == (pytest.approx(slo.quantile), pytest.approx(slo.threshold_s))


@pytest.mark.parametrize("text", ["p99=50ms", "p99.9=1s", "p50=0.8ms", "p95=1.5s"])
def test_an_objective_is_shown_as_it_can_be_written(text: str) -> None:
    """S1: what the start screen says can be typed."""
    assert text == str(parse_slo(text))


@pytest.mark.parametrize(
    "text", ["", "99=50ms", "p99", "p99=", "p100=5ms", "p99=50", "p99=fast", "p0=5ms", "p99=0s", "p99=-5ms"]
)
def test_a_wrong_objective_says_what_is_accepted(text: str) -> None:
    """No objective is guessed (S1)."""
    with pytest.raises(ValueError, match=r"p99=50ms|out of range"):
        parse_slo(text)


def test_a_model_on_the_command_line_is_served_alone(tmp_path: Path) -> None:
    """What is typed outranks what is written, and it is said (L6)."""
    write(tmp_path, "models: [other.onnx]\n")

    read = load("mine.onnx", environment={}, folder=tmp_path, name="m", slo="p99=5ms")

    assert [("m", str(tmp_path / "mine.onnx"))] == [(entry.name, entry.path) for entry in read.models]
    assert 1 == len(read.notices)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    """Rules about two settings are checked before anything starts (C1)."""
    found = problems(tmp_path, flags={"tls_cert": str(tmp_path / "no.pem"), "http_port": "8082"})

    assert ["tls_cert is set without tls_key", "cannot be read", "is http_port too"] == [
        next(part for part in ("tls_cert is set without tls_key", "cannot be read", "is http_port too") if part in text)
        for text in found
    ]


def test_a_certificate_that_does_not_fit_its_key_is_found_before_a_worker_starts(tmp_path: Path) -> None:
    """One problem, not one per worker (C1)."""
    write(tmp_path, "no certificate", "cert.pem")
    write(tmp_path, "no key", "key.pem")

    found = problems(tmp_path, flags={"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")})

    assert 1 == len(found), found
    assert "do not fit together" in found[0]
    assert "accepted: a certificate chain and its unencrypted key" in found[0]


def test_the_home_comes_from_flag_then_environment_then_working_folder(tmp_path: Path) -> None:
    """`HEADRACE_HOME` is honoured everywhere (L6)."""
    environment = {"HEADRACE_HOME": "/var/lib/headrace"}

    assert Path("/srv") == home_folder("/srv", environment=environment)
    assert Path("/var/lib/headrace") == home_folder(None, environment=environment)
    assert tmp_path / ".headrace" == home_folder(None, environment={}, folder=tmp_path)


@pytest.mark.parametrize(
    ("workers", "threads", "expected"),
    [(0, 0, (8, 1)), (2, 0, (2, 4)), (0, 2, (4, 2)), (3, 3, (3, 3)), (16, 0, (16, 1)), (0, 16, (1, 16))],
)
def test_workers_times_threads_is_the_number_of_cores(workers: int, threads: int, expected: tuple[int, int]) -> None:
    """The machine is used once, not twice (X4)."""
    assert expected == divide_cores(Settings(workers=workers, threads=threads), 8)


def test_a_container_quota_limits_the_cores(tmp_path: Path) -> None:
    """A pod with half a CPU on a large node must not start 64 workers (S5)."""
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")

    assert 1 == usable_cores(quota)
