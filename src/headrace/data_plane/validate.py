"""What an endpoint takes beyond its signature: the `contract:` compiled into vectorised checks.

A contract is compiled once per loaded version. Whatever it does not declare costs nothing: `compile_contract` gives
None for an empty contract, and an input without rules has no entry in the checker.

While a request is decoded, `InputRules.fill` replaces missing elements (JSON null) and `InputRules.absent` stands in
for an input that was left out. The stage `validate` then calls the `ContractChecker` on the finished arrays, which are
the same whatever protocol brought them.

This is one file although it is long: what a contract may say, what is refused when it is compiled and what is checked
per request are three views of the same rules, and a rule added to one of them must not be missing in the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from headrace.data_plane.ticket import InferRequest
from headrace.errors import ConfigError, InvalidInput
from headrace.snapshot import Contract, FieldContract, InputContract
from headrace.tensors import Array, Datatype, Signature, TensorSpec

__all__ = ["ContractChecker", "InputRules", "compile_contract", "contract_problems"]

Leaf = bool | int | float | str
"""An element as JSON carries it; text for BYTES."""

QUOTE_CHARACTERS_MAX: Final = 80  # a caller's value is quoted in an error, a caller's megabyte is not
_NAMES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class _Bounds:
    """One comparison with a tensor.

    Attributes:
        low, high: Scalars, or one value per column, of the tensor's dtype; None skips the comparison.
        columns: How many leading columns the vectors cover; None when the bounds are scalars.
    """

    low: Array | None
    high: Array | None
    columns: int | None


@dataclass(frozen=True, slots=True)
class _Categories:
    """Accepted elements of a tensor, or of one column.

    Attributes:
        column: None for the whole tensor.
        accepted: Elements as `ndarray.tolist` gives them.
        text: For the error.
    """

    column: int | None
    accepted: frozenset[Any]
    text: str


@dataclass(frozen=True, slots=True)
class InputRules:
    """The compiled rules of one input.

    NaN is in no order, so it passes `min` and `max`; `nonfinite: reject` is what refuses it.
    """

    spec: TensorSpec
    is_batched: bool
    rule: InputContract
    fields: Mapping[int, FieldContract]
    defaults: Mapping[int, Leaf]
    default: Leaf | None
    bounds: tuple[_Bounds, ...]
    categories: tuple[_Categories, ...]
    template: Array | None

    def fill(self, leaves: Sequence[Leaf | None], shape: Sequence[int]) -> list[Leaf]:
        """Replace missing elements by the default of their column, else of the input.

        Args:
            leaves: Row-major elements; None is a missing one.
            shape: Of the tensor; its element count is `len(leaves)`.

        Raises:
            InvalidInput: reason `missing`: an element without a default.
        """
        columns = shape[-1] if shape else 1
        filled: list[Leaf] = []
        for at, leaf in enumerate(leaves):
            value = self.defaults.get(at % columns, self.default) if leaf is None else leaf
            if value is None:
                raise self._refusal("missing", shape, at, f"expected {self.spec.datatype.wire} (no default), got null")
            filled.append(value)
        return filled

    def absent(self, rows: int) -> Array | None:
        """What stands in for an input that the caller left out.

        Args:
            rows: Length of the batch dimension.

        Returns:
            An array of the signature's shape and dtype, possibly read-only; None when there is no default for it.
        """
        if self.template is None or not self.is_batched or rows == 1:
            return self.template
        return np.repeat(self.template, rows, axis=0)

    def check(self, array: Array) -> None:
        """Compare every element with the rules.

        Raises:
            InvalidInput: reason `range`, `category`, `nonfinite`, `size` or `shape`; names the first element found.
        """
        if self.rule.nonfinite == "reject" and self.spec.datatype.kind == "f":
            self._check_finite(array)
        for bounds in self.bounds:
            self._check_bounds(array, bounds)
        for categories in self.categories:
            self._check_categories(array, categories)
        if self.rule.element_bytes_max is not None:
            self._check_element_bytes(array, self.rule.element_bytes_max)

    def _check_finite(self, array: Array) -> None:
        at = np.isfinite(array).tobytes().find(b"\0")
        if at >= 0:
            raise self._refusal("nonfinite", array.shape, at, f"expected a finite number, got {array.reshape(-1)[at]}")

    def _check_bounds(self, array: Array, bounds: _Bounds) -> None:
        part = self._columns(array, bounds.columns)
        at = -1
        # Searching the bytes of the comparison costs a tenth of `any()` on the few rows that most requests have.
        if bounds.low is not None:
            at = (part < bounds.low).tobytes().find(b"\1")
        if at < 0 and bounds.high is not None:
            at = (part > bounds.high).tobytes().find(b"\1")
        if at < 0:
            return
        field = self.fields.get(at % part.shape[-1]) if bounds.columns is not None else None
        expected = _range_text(field or self.rule)
        raise self._refusal("range", part.shape, at, f"expected {expected}, got {part.reshape(-1)[at].item()!r}")

    def _check_categories(self, array: Array, categories: _Categories) -> None:
        part = array
        if categories.column is not None:
            part = self._columns(array, categories.column + 1)[..., categories.column]
        values = part.reshape(-1).tolist()
        if categories.accepted.issuperset(values):
            return
        at = next(at for at, value in enumerate(values) if value not in categories.accepted)
        got = quote(values[at])
        if categories.column is not None:  # the flat position counts this column only
            at = at * array.shape[-1] + categories.column
        raise self._refusal("category", array.shape, at, f"expected one of {categories.text}, got {got}")

    def _check_element_bytes(self, array: Array, bytes_max: int) -> None:
        lengths = list(map(len, array.reshape(-1).tolist()))
        if max(lengths, default=0) <= bytes_max:
            return
        at = next(at for at, length in enumerate(lengths) if length > bytes_max)
        raise self._refusal("size", array.shape, at, f"expected at most {bytes_max} bytes, got {lengths[at]}")

    def _columns(self, array: Array, columns: int | None) -> Array:
        if columns is None or columns == array.shape[-1]:
            return array
        if columns > array.shape[-1]:  # only where the signature leaves the last dimension open
            raise InvalidInput(
                f"input {self.spec.name!r}: the contract names column {columns - 1}, so it expects a last dimension "
                f"of at least {columns}, got {array.shape[-1]}",
                field=self.spec.name,
                reason="shape",
            )
        return array[..., :columns]

    def _refusal(self, reason: str, shape: Sequence[int], at: int, verdict: str) -> InvalidInput:
        """Name the element at the row-major position `at` of `shape`."""
        name = self.spec.name
        index = [int(i) for i in np.unravel_index(at, tuple(shape))] if shape else []
        field = self.fields.get(index[-1]) if index else None
        where = f"input {name!r}"
        if field is not None:
            where += f", field {field.name!r} (column {index[-1]})"
        if self.is_batched and index:
            where += f", row {index[0]}"
            if field is None and len(index) > 1:
                where += f", element {index[1:]}"
        else:
            where += f", element {index}"
        label = name if field is None else f"{name}.{field.name}"
        return InvalidInput(f"{where}: {verdict}", field=label, reason=reason)


@dataclass(frozen=True, slots=True)
class ContractChecker:
    """A compiled contract.

    Attributes:
        rows_max: Most rows in one request; None when not declared.
        rules: By input name; only inputs that have rules.
    """

    rows_max: int | None
    rules: Mapping[str, InputRules]

    def __call__(self, request: InferRequest) -> None:
        """Look at a decoded request.

        Args:
            request: With one array per input of the signature, of its dtype; nothing is changed.

        Raises:
            InvalidInput: The first rule that is broken.
        """
        if self.rows_max is not None and request.rows > self.rows_max:
            raise InvalidInput(
                f"the request has too many rows: expected at most {self.rows_max}, got {request.rows}",
                field="",
                reason="rows",
            )
        for name, rules in self.rules.items():
            rules.check(request.inputs[name])


def compile_contract(signature: Signature, contract: Contract) -> ContractChecker | None:
    """Compile a contract for a signature.

    Returns:
        None when the contract declares nothing, so that a version without a contract pays nothing.

    Raises:
        ConfigError: The contract itself is wrong; every problem at once (see `contract_problems`).
    """
    problems = contract_problems(signature, contract)
    if problems:
        raise ConfigError(problems)
    rules = {
        spec.name: _compile_input(spec, contract.inputs[spec.name], signature.is_batched)
        for spec in signature.inputs
        if contract.inputs.get(spec.name, InputContract()) != InputContract()
    }
    if not rules and contract.rows_max is None:
        return None
    return ContractChecker(contract.rows_max, rules)


def contract_problems(signature: Signature, contract: Contract) -> list[str]:
    """Every mistake in the contract itself, one line each; empty when it can be compiled."""
    problems: list[str] = []
    if contract.rows_max is not None:
        if contract.rows_max < 1:
            problems.append(f"contract.rows_max is {contract.rows_max}; expected at least 1")
        elif not signature.is_batched:
            problems.append("contract.rows_max has no effect: the model is not batched, so a request is one row")
    specs = {spec.name: spec for spec in signature.inputs}
    for name, rule in contract.inputs.items():
        if name in specs:
            problems += _input_problems(f"contract.inputs.{name}", specs[name], rule, signature.is_batched)
        else:
            problems.append(
                f"contract.inputs.{name}: the model has no such input; it has {name_list(list(specs))}"
                + nearest_hint(name, list(specs))
            )
    return problems


def quote(value: object) -> str:
    """A value for an error message: its `repr`, at most 80 characters of it."""
    if isinstance(value, str | bytes):
        value = value[:QUOTE_CHARACTERS_MAX]
    elif isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print very long ones
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= QUOTE_CHARACTERS_MAX else text[: QUOTE_CHARACTERS_MAX - 1] + "…"


def name_list(names: Sequence[str]) -> str:
    """Names for an error message; the first twenty."""
    text = ", ".join(map(repr, names[:_NAMES_MAX]))
    return text if len(names) <= _NAMES_MAX else f"{text} and {len(names) - _NAMES_MAX} more"


def nearest_hint(name: str, known: Sequence[str]) -> str:
    """`; hint: …` when a known name is close, else nothing."""
    near = [other for other in known if other.casefold() == name.casefold()]
    near += get_close_matches(name[:QUOTE_CHARACTERS_MAX], known, 1)
    return f"; hint: did you mean {near[0]!r}?" if near else ""


def _compile_input(spec: TensorSpec, rule: InputContract, is_batched: bool) -> InputRules:
    fields = {_column(field, position): field for position, field in enumerate(rule.fields)}
    default = None if rule.default is None else _leaf(spec.datatype, rule.default)
    defaults = {
        column: _leaf(spec.datatype, field.default) for column, field in fields.items() if field.default is not None
    }
    bounds: list[_Bounds] = []
    if rule.min is not None or rule.max is not None:
        bounds.append(
            _Bounds(
                None if rule.min is None else _bound(spec.datatype, rule.min, is_low=True),
                None if rule.max is None else _bound(spec.datatype, rule.max, is_low=False),
                None,
            )
        )
    if any(field.min is not None or field.max is not None for field in fields.values()):
        bounds.append(_column_bounds(spec, fields))
    categories: list[_Categories] = []
    if rule.categories is not None:
        categories.append(_compile_categories(spec.datatype, rule.categories, None))
    for column, field in fields.items():
        if field.categories is not None:
            categories.append(_compile_categories(spec.datatype, field.categories, column))
    template = _template(spec, is_batched, default, defaults)
    return InputRules(spec, is_batched, rule, fields, defaults, default, tuple(bounds), tuple(categories), template)


def _bound(datatype: Datatype, value: float, *, is_low: bool) -> Array:
    """A bound as the tensor's dtype: `0.1` bounds an FP32 at the FP32 nearest to 0.1, not just above or below it."""
    if datatype.kind in "iu":
        limits = np.iinfo(datatype.dtype)
        whole = math.ceil(value) if is_low else math.floor(value)
        return np.array(min(max(whole, limits.min), limits.max), datatype.dtype)
    return np.array(value, datatype.dtype)


def _column_bounds(spec: TensorSpec, fields: Mapping[int, FieldContract]) -> _Bounds:
    datatype = spec.datatype
    columns = spec.shape[-1] if spec.shape[-1] >= 0 else max(fields) + 1
    least: float | int = -math.inf
    most: float | int = math.inf
    if datatype.kind in "iu":
        least, most = int(np.iinfo(datatype.dtype).min), int(np.iinfo(datatype.dtype).max)
    low, high = np.full(columns, least, datatype.dtype), np.full(columns, most, datatype.dtype)
    for column, field in fields.items():
        if field.min is not None:
            low[column] = _bound(datatype, field.min, is_low=True)
        if field.max is not None:
            high[column] = _bound(datatype, field.max, is_low=False)
    has_low = any(field.min is not None for field in fields.values())
    has_high = any(field.max is not None for field in fields.values())
    return _Bounds(low if has_low else None, high if has_high else None, columns)


def _compile_categories(datatype: Datatype, values: Sequence[float | str], column: int | None) -> _Categories:
    leaves = [_leaf(datatype, value) for value in values]
    array = np.empty(len(leaves), datatype.dtype)
    array[:] = [leaf.encode() for leaf in leaves if isinstance(leaf, str)] if datatype is Datatype.BYTES else leaves
    text = ", ".join(quote(value) if isinstance(value, str) else f"{value:g}" for value in values[:_NAMES_MAX])
    if len(values) > _NAMES_MAX:
        text += f" and {len(values) - _NAMES_MAX} more"
    return _Categories(column, frozenset(array.tolist()), text)


def _template(spec: TensorSpec, is_batched: bool, default: Leaf | None, defaults: Mapping[int, Leaf]) -> Array | None:
    """One row (or the whole tensor of an unbatched model) made of defaults; None when they do not cover it."""
    shape = (1, *spec.shape[1:]) if is_batched and spec.shape else spec.shape
    if any(dimension < 0 for dimension in shape):
        return None
    if default is None and (not defaults or len(defaults) < shape[-1]):
        return None
    array = np.empty(shape, spec.datatype.dtype)
    if default is not None:
        array[...] = _element(default)
    for column, leaf in defaults.items():
        array[..., column] = _element(leaf)
    array.flags.writeable = False  # shared by every request that leaves the input out
    return array


def _element(leaf: Leaf) -> Leaf | bytes:
    return leaf.encode() if isinstance(leaf, str) else leaf


def _leaf(datatype: Datatype, value: float | str | bool) -> Leaf:
    """A default or category as an element of the datatype.

    Raises:
        ValueError: It cannot be one; the text completes "… is 'x'; expected …".
    """
    if datatype.kind == "s":
        if not isinstance(value, str):
            raise ValueError("text, since the input is BYTES")
        return value
    if datatype.kind == "b":
        if not isinstance(value, bool):
            raise ValueError("true or false, since the input is BOOL")
        return value
    if isinstance(value, bool | str) or not math.isfinite(value):
        raise ValueError(f"a finite number, since the input is {datatype.wire}")
    if datatype.kind == "f":
        if abs(value) > float(np.finfo(datatype.dtype).max):
            raise ValueError(f"a number in the range of {datatype.wire}")
        return float(value)
    limits = np.iinfo(datatype.dtype)
    if value != int(value) or not limits.min <= value <= limits.max:
        raise ValueError(f"an integer in the range of {datatype.wire} ({limits.min} to {limits.max})")
    return int(value)


def _column(field: FieldContract, position: int) -> int:
    return position if field.index is None else field.index


def _range_text(rule: InputContract | FieldContract) -> str:
    if rule.min is None:
        return f"at most {rule.max:g}"
    if rule.max is None:
        return f"at least {rule.min:g}"
    return f"{rule.min:g} to {rule.max:g}"


def _input_problems(path: str, spec: TensorSpec, rule: InputContract, is_batched: bool) -> list[str]:
    problems = _rule_problems(path, spec.datatype, rule)
    if rule.nonfinite == "reject" and spec.datatype.kind != "f":
        problems.append(f"{path}.nonfinite has no effect: {spec.datatype.wire} holds neither NaN nor infinity")
    if rule.element_bytes_max is not None:
        if spec.datatype is not Datatype.BYTES:
            problems.append(f"{path}.element_bytes_max needs a BYTES input; this one is {spec.datatype.wire}")
        elif rule.element_bytes_max < 0:
            problems.append(f"{path}.element_bytes_max is {rule.element_bytes_max}; expected at least 0")
        elif isinstance(rule.default, str) and len(rule.default.encode()) > rule.element_bytes_max:
            problems.append(f"{path}.default is longer than its own element_bytes_max of {rule.element_bytes_max}")
    dimensions = spec.shape[1:] if is_batched else spec.shape
    fields_are_sound = True
    if rule.fields and not dimensions:
        problems.append(f"{path}.fields needs a last dimension to name columns of; the shape is {list(spec.shape)}")
        fields_are_sound = False
    elif rule.fields:
        before = len(problems)
        problems += _fields_problems(path, spec, rule)
        fields_are_sound = len(problems) == before
    if not rule.required and fields_are_sound and not problems:
        problems += _optional_problems(path, spec, rule, is_batched)
    return problems


def _optional_problems(path: str, spec: TensorSpec, rule: InputContract, is_batched: bool) -> list[str]:
    """An input that may be left out needs something that stands in for it."""
    if rule.default is None and not rule.fields:
        return [f"{path}.required is false, so the input needs a default"]
    if _compile_input(spec, rule, is_batched).template is None:
        shape = list(spec.shape)
        return [
            f"{path}.required is false, but its defaults do not say what to fill in for the whole shape {shape}: every "
            "dimension but the batch must be fixed, and every column needs a default"
        ]
    return []


def _fields_problems(path: str, spec: TensorSpec, rule: InputContract) -> list[str]:
    problems: list[str] = []
    columns = spec.shape[-1]
    names: dict[str, int] = {}
    indexes: dict[int, int] = {}
    for position, field in enumerate(rule.fields):
        at = f"{path}.fields[{position}]"
        if not field.name:
            problems.append(f"{at}.name is empty; errors and metrics need it")
        elif field.name in names:
            problems.append(f"{at}.name {field.name!r} repeats fields[{names[field.name]}]")
        names.setdefault(field.name, position)
        column = _column(field, position)
        if column < 0 or (columns >= 0 and column >= columns):
            most = f"0 to {columns - 1}" if columns >= 0 else "at least 0"
            problems.append(f"{at} ({field.name}) has index {column}; expected {most}, the shape is {list(spec.shape)}")
        elif column in indexes:
            problems.append(f"{at} ({field.name}) has index {column}, which fields[{indexes[column]}] has already")
        indexes.setdefault(column, position)
        of_field = _rule_problems(f"{at} ({field.name})", spec.datatype, field)
        problems += of_field
        if not field.required and field.default is None:
            problems.append(f"{at} ({field.name}).required is false, so the field needs a default")
        if not of_field and field.default is not None:
            problems += _default_problems(f"{at} ({field.name})", "the input's", spec.datatype, field.default, rule)
    return problems


def _rule_problems(path: str, datatype: Datatype, rule: InputContract | FieldContract) -> list[str]:
    """What inputs and fields have in common: min, max, categories, default."""
    problems: list[str] = []
    for which, value in (("min", rule.min), ("max", rule.max)):
        if value is None:
            continue
        if datatype.kind in "sb":
            problems.append(f"{path}.{which} needs a number input; this one is {datatype.wire}")
        elif not math.isfinite(value):
            problems.append(f"{path}.{which} is {value}; expected a finite number")
        elif (which == "min" and value > _most(datatype)) or (which == "max" and value < _least(datatype)):
            problems.append(f"{path}.{which} is {value:g}; no {datatype.wire} is in that range")
        elif datatype.kind == "f" and abs(value) > _most(datatype):
            problems.append(f"{path}.{which} is {value:g}; expected a number in the range of {datatype.wire}")
    if rule.min is not None and rule.max is not None and rule.min > rule.max:
        problems.append(f"{path}.min is {rule.min:g}, above its max of {rule.max:g}")
    if rule.categories is not None:
        if datatype is Datatype.BOOL:
            problems.append(f"{path}.categories needs a number or BYTES input; this one is BOOL")
        elif not rule.categories:
            problems.append(f"{path}.categories is empty, which accepts nothing")
        else:
            for category in rule.categories:
                try:
                    _leaf(datatype, category)
                except ValueError as expected:
                    problems.append(f"{path}.categories has {quote(category)}; expected {expected}")
    if rule.default is not None:
        try:
            _leaf(datatype, rule.default)
        except ValueError as expected:
            problems.append(f"{path}.default is {quote(rule.default)}; expected {expected}")
        else:
            if not problems:
                problems += _default_problems(path, "its own", datatype, rule.default, rule)
    return problems


def _default_problems(
    path: str, whose: str, datatype: Datatype, default: float | str | bool, rule: InputContract | FieldContract
) -> list[str]:
    """Whether a default would itself be refused. `whose` says if the rule is the default's own or its input's."""
    if isinstance(default, str | bool):
        is_in_range = True
    else:
        value = np.array(default, datatype.dtype)
        try:
            is_in_range = not (
                (rule.min is not None and bool(value < _bound(datatype, rule.min, is_low=True)))
                or (rule.max is not None and bool(value > _bound(datatype, rule.max, is_low=False)))
            )
        except (OverflowError, ValueError):  # the bound itself is wrong, which has its own line
            is_in_range = True
    problems: list[str] = []
    if not is_in_range:
        problems.append(f"{path}.default is {quote(default)}, outside {whose} range: {_range_text(rule)}")
    if rule.categories is not None and default not in rule.categories:
        problems.append(f"{path}.default is {quote(default)}, not among {whose} categories")
    return problems


def _most(datatype: Datatype) -> float:
    return float(np.finfo(datatype.dtype).max) if datatype.kind == "f" else float(np.iinfo(datatype.dtype).max)


def _least(datatype: Datatype) -> float:
    return float(np.finfo(datatype.dtype).min) if datatype.kind == "f" else float(np.iinfo(datatype.dtype).min)
