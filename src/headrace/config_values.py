"""Reading and showing single values of a configuration: sizes, durations, objectives, and the parts of a model's entry.

Pure functions: text or YAML goes in, a value comes out, and a wrong one raises `ValueError` with what was seen and what
is accepted. Where values come from, and which one wins, is in `config.py`.
"""

import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from headrace.snapshot import BatchingPolicy, Contract, NonFinitePolicy, RecordPolicy, RuntimeOptions, Slo

Unit = Literal["", "seconds", "bytes", "requests", "connections", "levels", "threads", "processes"]

# -------------------------------------------------------------------------------------- sizes, durations, objectives

_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30, "ti": 2**40, "tib": 2**40,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Zµ]*)\s*")


def parse_seconds(text: str) -> float:
    """Read `50ms`, `2s`, `1.5m` or a plain number of seconds.

    Raises:
        ValueError: With what is accepted.
    """
    return _quantity(text, {"": 1.0, **_SECONDS}, "a duration such as 50ms, 2s or 1.5m")


def parse_bytes(text: str) -> int:
    """Read `64MiB`, `10MB`, `512k` or a plain number of bytes.

    Raises:
        ValueError: With what is accepted.
    """
    return int(_quantity(text, {"": 1, **_BYTES}, "a size such as 64MiB, 10MB or a number of bytes"))


def _quantity(text: str, factors: Mapping[str, float], accepted: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {accepted}")
    return float(match[1].replace("_", "")) * factor


def parse_slo(text: str) -> Slo:
    """Read `p99=50ms` or `p99.9=1s`.

    A bare number is refused, although it would be seconds elsewhere: who writes `p99=50` means milliseconds, and an
    objective of 50 s refuses nothing in time.

    Raises:
        ValueError: With what is accepted.
    """
    match = re.fullmatch(r"\s*p([0-9]{1,2}(?:\.[0-9]+)?)\s*[=<]\s*(\S+)\s*", text)
    accepted = "a quantile and a duration, such as p99=50ms or p99.9=1s"
    if match is None:
        raise ValueError(f"{text!r} is not {accepted}")
    try:
        threshold_s = _quantity(match[2], _SECONDS, "a duration with its unit")
    except ValueError:
        raise ValueError(f"{text!r} is not {accepted}") from None
    quantile = float(match[1]) / 100
    if not 0 < quantile < 1 or not 0 < threshold_s < 86_400:
        raise ValueError(f"{text!r} is out of range; accepted: above p0, and more than 0 s but less than a day")
    return Slo(quantile=round(quantile, 9), threshold_s=threshold_s)


def show_value(value: object, unit: Unit) -> str:
    """A value as one would write it: `64 MiB`, `75 s`, `50 ms`; `parse_bytes` and `parse_seconds` read it back."""
    if unit == "bytes" and isinstance(value, int):
        for name, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= factor and value % factor == 0:
                return f"{value // factor:,} {name}" if value < 1000 * factor else f"{value // factor} {name}"
        return str(value)
    if unit == "seconds" and isinstance(value, int | float):
        return f"{value * 1e3:g} ms" if 0 < value < 1 else f"{value:g} s"
    return str(value)


# ---------------------------------------------------------------------------------------------- one setting


def read_value(value: object, *, kind: type, unit: Unit, least: float | None, most: float | None) -> Any:
    """Read one value from a file, the environment or a flag.

    Args:
        kind: `str`, `int` or `float`.
        unit: Says which suffixes text may have.
        least, most: Accepted bounds, inclusive; None when unbounded.

    Raises:
        ValueError: With the value seen and what is accepted.
    """
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is not text; accepted: text, in quotes if it looks like something else")
        return value
    bounds = _bounds(least, most, unit)
    number = _number(value, unit, bounds)
    if kind is int and number not in (float("inf"), float("-inf")) and number != int(number):
        raise ValueError(f"{value!r} is not a whole number{bounds}")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{value!r} is out of range{bounds}")
    return kind(number)


def _bounds(least: float | None, most: float | None, unit: Unit) -> str:
    if least is None or most is None:
        return ""
    if unit in ("bytes", "seconds"):
        return f"; accepted: {show_value(least, unit)} to {show_value(most, unit)}"
    return f"; accepted: {least:g} to {most:,.15g}"


def _number(value: object, unit: Unit, bounds: str) -> float:
    # bool is an int in Python; `workers: yes` must not mean one worker.
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value != value:
            raise ValueError(f"{value!r} is not a number that can be used{bounds}")
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a number{bounds}")
    if unit == "seconds":
        return parse_seconds(value)
    if unit == "bytes":
        return parse_bytes(value)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number{bounds}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """A ` (did you mean …?)` for an unknown word; empty when nothing is close."""
    close = closest(word, known, 0.6)
    return f" (did you mean {close!r}?)" if close else ""


def closest(word: str, known: Iterable[str], cutoff: float) -> str:
    """The known word that is most like `word`; empty when none is."""
    import difflib  # only mistakes need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


# ------------------------------------------------------------------------------------ one key of an entry of models:

_ENTRY_TYPES: Final[dict[str, Any]] = {
    "contract": Contract,
    "records": RecordPolicy,
    "batching": BatchingPolicy,
    "runtime": RuntimeOptions,
    "nonfinite": NonFinitePolicy,
    "labels": tuple[str, ...],
    "name": str,
}


# Bounds inside an entry that no type says; those of a contract need the model and are checked when it is loaded.
ENTRY_BOUNDS: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("records", "payload_rate"): (0, 1),
    ("batching", "rows_max"): (1, 1 << 20),
    ("batching", "delay_s"): (0, 60),
    ("runtime", "threads"): (1, 256),
}


class PartError(ValueError):
    """Something inside a value is wrong.

    Attributes:
        path: Keys and positions that lead to it, for the line in the file.
    """

    def __init__(self, message: str, path: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.path = path


def entry_value(key: str, value: object, folder: Path) -> Any:
    """Read the value of one key of an entry of `models:`.

    Args:
        folder: Against which `path` is read.

    Raises:
        KeyError: There is no such key.
        ValueError: With the value seen and what is accepted; a `PartError` when it is inside the value.
    """
    if key == "path":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{value!r} is not a path; accepted: a model file or a folder")
        return str((folder / Path(value).expanduser()).absolute())
    if key == "slo":
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is not an objective; accepted: such as p99=50ms")
        return parse_slo(value)
    if key in ("version", "default_version"):
        # `version: 3` is a number in YAML and a name to us; 1.10 would already have lost its zero.
        if isinstance(value, bool | float) or not isinstance(value, str | int):
            raise ValueError(f"{value!r} is not a version; put it in quotes")
        if value != "" and not valid_name(str(value).removeprefix("_")):
            raise ValueError(f"{value!r} is not a version; accepted: letters, digits, - _ . and no /")
        return str(value)
    if key == "name" and isinstance(value, str) and not valid_name(value):
        raise ValueError(f"{value!r} is not a name; accepted: letters, digits, - _ . and no /")
    if key == "batching" and isinstance(value, dict) and isinstance(value.get("delay_s"), str):
        value = {**value, "delay_s": parse_seconds(value["delay_s"])}
    kind = _ENTRY_TYPES[key]
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _part_error(kind, value, error) from error
    for (entry_key, name), (least, most) in ENTRY_BOUNDS.items():
        number = getattr(converted, name) if entry_key == key else None
        if number is not None and not least <= number <= most:
            raise PartError(f"{name} is {number:g}; accepted: {least:g} to {most:,.15g}", (name,))
    return converted


def valid_name(name: str) -> bool:
    """True when the name can stand in a URL path and in a metric label without quoting."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


def _part_error(kind: Any, value: object, error: msgspec.ValidationError) -> PartError:
    """Say what msgspec found in the words of the file: ``Expected `int`, got `str` - at `$.fields[0].min```."""
    kind, value, path = _failing(kind, value, ())
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    if _is_struct(kind) and isinstance(value, dict):
        known = kind.__struct_fields__
        for unknown in (name for name in value if name not in known):
            message = f"{place + ' has an ' if place else ''}unknown key {unknown!r}{nearest(str(unknown), known)}"
            return PartError(f"{message}; accepted: {', '.join(known)}", (*path, str(unknown)))
        return PartError(f"{place + ': ' if place else ''}{str(error).partition(' - at ')[0].replace('`', '')}", path)
    return PartError(f"{place + ' is ' if place else ''}{value!r}; accepted: {_accepted(kind)}", path)


def _failing(kind: Any, value: object, path: tuple[str | int, ...]) -> tuple[Any, object, tuple[str | int, ...]]:
    """The innermost part that cannot be converted: its type, its value and where it is."""
    for step, part_kind, part in _parts(kind, value):
        try:
            msgspec.convert(part, part_kind)
        except msgspec.ValidationError:
            return _failing(part_kind, part, (*path, step))
    return kind, value, path


def _parts(kind: Any, value: object) -> list[tuple[str | int, Any, object]]:
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return [part for each in arguments for part in _parts(each, value)]
    if _is_struct(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        return [(name, hints[name], part) for name, part in value.items() if name in hints]
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return [(str(name), arguments[1], part) for name, part in value.items()]
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return [(position, arguments[0], part) for position, part in enumerate(value)]
    return []


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _accepted(kind: Any) -> str:
    """What a type takes, for a reader of the file."""
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return " or ".join(_accepted(each) for each in arguments if each is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        return ", ".join(str(each) for each in arguments)
    if typing.get_origin(kind) is tuple:
        return f"a list of {_accepted(arguments[0]).removeprefix('a ')}"
    if _is_struct(kind):
        return f"a mapping with {', '.join(kind.__struct_fields__)}"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(kind, "a mapping")
