"""The contract of an endpoint: what it refuses, what it says, and which contracts are themselves wrong."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.data_plane.ticket import InferRequest
from headrace.data_plane.validate import compile_contract, contract_problems
from headrace.errors import ConfigError, InvalidInput
from headrace.snapshot import Contract, FieldContract, InputContract
from headrace.tensors import Array, Datatype, Signature, TensorSpec

FLOATS = TensorSpec("X", Datatype.FP32, (-1, 3))


def signature(*inputs: TensorSpec, is_batched: bool = True) -> Signature:
    return Signature(inputs, (), is_batched, "test")


def validate(spec: TensorSpec, rule: InputContract, array: Array, **others: Any) -> None:
    check = compile_contract(signature(spec), Contract(inputs={spec.name: rule}, **others))
    assert check is not None
    check(InferRequest(None, {}, {spec.name: array}, len(array), []))


def refusal(spec: TensorSpec, rule: InputContract, values: Any, **others: Any) -> InvalidInput:
    array = np.empty(np.shape(values), spec.datatype.dtype)
    array[...] = values
    with pytest.raises(InvalidInput) as caught:
        validate(spec, rule, array, **others)
    return caught.value


def test_an_empty_contract_compiles_to_nothing() -> None:
    """Where nothing is declared, nothing is run (P3)."""
    assert compile_contract(signature(FLOATS), Contract()) is None
    assert compile_contract(signature(FLOATS), Contract(inputs={"X": InputContract()})) is None


@pytest.mark.parametrize(
    ("rule", "values", "field", "reason", "message"),
    [
        (
            InputContract(min=0),
            [[0, 1, 2], [3, -1, 5]],
            "X",
            "range",
            "row 1, element [1]: expected at least 0, got -1.0",
        ),
        (InputContract(max=2), [[0, 1, 2.5]], "X", "range", "row 0, element [2]: expected at most 2, got 2.5"),
        (InputContract(min=-1, max=1), [[np.inf, 0, 0]], "X", "range", "expected -1 to 1, got inf"),
        (InputContract(nonfinite="reject"), [[0, 0, np.nan]], "X", "nonfinite", "expected a finite number, got nan"),
        (InputContract(categories=(0, 0.1)), [[0, 0.1, 2]], "X", "category", "expected one of 0, 0.1, got 2.0"),
        (
            InputContract(fields=(FieldContract("age", index=1, min=0, max=120),)),
            [[-9, 5, 999], [0, 121, 0]],
            "X.age",
            "range",
            "input 'X', field 'age' (column 1), row 1: expected 0 to 120, got 121.0",
        ),
        (
            InputContract(fields=(FieldContract("a"), FieldContract("sex", categories=(0, 1)))),
            [[7, 0, 7], [7, 2, 7]],
            "X.sex",
            "category",
            "input 'X', field 'sex' (column 1), row 1: expected one of 0, 1, got 2.0",
        ),
    ],
)
def test_a_broken_rule_names_field_row_expected_and_got(
    rule: InputContract, values: Any, field: str, reason: str, message: str
) -> None:
    """The error and its metric label say which field of which row was what instead of what (P3)."""
    error = refusal(FLOATS, rule, values)

    assert (field, reason) == (error.field, error.reason)
    assert reason in InvalidInput.REASONS
    assert message in error.message


def test_values_on_the_bounds_are_accepted_in_the_tensors_own_precision() -> None:
    """A bound of 0.1 accepts the FP32 that stands for 0.1, and NaN is no matter of range (P3)."""
    array = np.array([[0.1, 0.1, np.nan]], np.float32)

    validate(FLOATS, InputContract(min=0.1, max=0.1), array)
    validate(FLOATS, InputContract(fields=(FieldContract("a", min=0.1, max=0.1),)), array)
    validate(FLOATS, InputContract(fields=(FieldContract("c", index=2, min=0),)), array)


def test_integer_bounds_are_exact() -> None:
    """Fractional bounds round inwards, bounds beyond the type's range are no bounds, 64-bit values do not blur (P3)."""
    spec = TensorSpec("n", Datatype.INT64, (-1, 1))
    big = 2**53

    validate(spec, InputContract(min=0.5, max=1e30), np.array([[1], [2**63 - 1]]))
    error = refusal(spec, InputContract(max=float(big)), [[big + 1]])

    assert str(big + 1) in error.message
    assert "range" == refusal(spec, InputContract(min=0.5), [[0]]).reason
    assert "range" == refusal(spec, InputContract(fields=(FieldContract("a", max=1.5),)), [[2]]).reason


def test_text_is_checked_by_category_and_length() -> None:
    """BYTES elements are compared as UTF-8 and measured in bytes (P3)."""
    spec = TensorSpec("s", Datatype.BYTES, (-1,))
    good = np.array(["é".encode(), b"b"], object)

    validate(spec, InputContract(categories=("é", "b"), element_bytes_max=2), good)
    unknown = refusal(spec, InputContract(categories=("a", "b")), [b"b", b"c" * 500])
    long = refusal(spec, InputContract(element_bytes_max=1), good)

    assert ("s", "category") == (unknown.field, unknown.reason)
    assert "row 1: expected one of 'a', 'b', got b'ccc" in unknown.message
    assert len(unknown.message) < 200
    assert ("size", "input 's', row 0: expected at most 1 bytes, got 2") == (long.reason, long.message)


def test_rows_are_bounded() -> None:
    """A request of more rows than declared is refused (P3)."""
    error = refusal(FLOATS, InputContract(), np.zeros((3, 3)), rows_max=2)

    assert ("", "rows") == (error.field, error.reason)
    assert "expected at most 2, got 3" in error.message


def test_zero_rows_break_no_rule() -> None:
    """An empty tensor has no element to refuse (P3)."""
    rule = InputContract(
        min=1, max=2, categories=(1,), nonfinite="reject", fields=(FieldContract("a", min=1, categories=(1,)),)
    )

    validate(FLOATS, rule, np.empty((0, 3), np.float32))


def test_columns_of_an_open_last_dimension_are_checked_where_they_exist() -> None:
    """Where the signature leaves the width open, a column that the contract names must be there (P3)."""
    spec = TensorSpec("X", Datatype.FP32, (-1, -1))
    rule = InputContract(fields=(FieldContract("b", index=1, min=0),))

    validate(spec, rule, np.zeros((2, 5), np.float32))
    narrow = refusal(spec, rule, [[0]])
    low = refusal(spec, rule, [[0, 0, 0], [0, -1, 0]])

    assert ("X", "shape") == (narrow.field, narrow.reason)
    assert "at least 2, got 1" in narrow.message
    assert ("X.b", "range") == (low.field, low.reason)
    assert "row 1" in low.message


def test_an_unbatched_tensor_is_addressed_by_element() -> None:
    """Without rows, the error gives the element's index (P3)."""
    spec = TensorSpec("t", Datatype.FP64, ())
    check = compile_contract(signature(spec, is_batched=False), Contract(inputs={"t": InputContract(min=0)}))
    assert check is not None

    with pytest.raises(InvalidInput, match=r"input 't', element \[\]: expected at least 0, got -1.0"):
        check(InferRequest(None, {}, {"t": np.array(-1.0)}, 1, []))


def test_an_omitted_input_is_made_of_defaults() -> None:
    """Defaults of columns and of the input make up a whole tensor of the request's rows (P3)."""
    rule = InputContract(required=False, default=0.0, fields=(FieldContract("b", index=1, default=5.0),))
    check = compile_contract(signature(FLOATS), Contract(inputs={"X": rule}))
    assert check is not None

    array = check.rules["X"].absent(2)

    assert array is not None
    assert [[0, 5, 0], [0, 5, 0]] == array.tolist()
    assert (np.float32, True) == (array.dtype, array.flags.c_contiguous)


def test_nothing_stands_in_where_the_shape_is_open_or_a_column_has_no_default() -> None:
    """A partial default fills nulls but not a whole input (P3)."""
    partial = InputContract(fields=(FieldContract("b", index=1, default=5.0),))
    wide = TensorSpec("X", Datatype.FP32, (-1, -1))

    for spec, rule in ((FLOATS, partial), (wide, InputContract(default=0.0))):
        check = compile_contract(signature(spec), Contract(inputs={"X": rule}))
        assert check is not None
        assert check.rules["X"].absent(1) is None


PROBLEMS: list[tuple[TensorSpec, InputContract, str]] = [
    (FLOATS, InputContract(min=2, max=1), "contract.inputs.X.min is 2, above its max of 1"),
    (FLOATS, InputContract(min=float("nan")), "X.min is nan; expected a finite number"),
    (FLOATS, InputContract(max=1e300), "X.max is 1e+300; expected a number in the range of FP32"),
    (FLOATS, InputContract(min=1e300), "X.min is 1e+300; no FP32 is in that range"),
    (FLOATS, InputContract(categories=()), "X.categories is empty"),
    (
        FLOATS,
        InputContract(categories=("a",)),
        "X.categories has 'a'; expected a finite number, since the input is FP32",
    ),
    (FLOATS, InputContract(element_bytes_max=5), "X.element_bytes_max needs a BYTES input; this one is FP32"),
    (FLOATS, InputContract(default="x"), "X.default is 'x'; expected a finite number"),
    (FLOATS, InputContract(default=True), "X.default is True; expected a finite number"),
    (FLOATS, InputContract(default=1e39), "X.default is 1e+39; expected a number in the range of FP32"),
    (FLOATS, InputContract(default=5.0, max=1), "X.default is 5.0, outside its own range: at most 1"),
    (FLOATS, InputContract(default=5.0, categories=(1,)), "X.default is 5.0, not among its own categories"),
    (FLOATS, InputContract(required=False), "X.required is false, so the input needs a default"),
    (
        TensorSpec("X", Datatype.FP32, (-1, -1)),
        InputContract(required=False, default=0.0),
        "X.required is false, but its defaults do not say what to fill in for the whole shape [-1, -1]",
    ),
    (FLOATS, InputContract(fields=(FieldContract("a", index=3),)), "X.fields[0] (a) has index 3; expected 0 to 2"),
    (FLOATS, InputContract(fields=(FieldContract("a", index=-1),)), "has index -1; expected 0 to 2"),
    (
        FLOATS,
        InputContract(fields=(FieldContract("a"), FieldContract("b", index=0))),
        "X.fields[1] (b) has index 0, which fields[0] has already",
    ),
    (FLOATS, InputContract(fields=(FieldContract("a"), FieldContract("a"))), "fields[1].name 'a' repeats fields[0]"),
    (FLOATS, InputContract(fields=(FieldContract(""),)), "fields[0].name is empty"),
    (FLOATS, InputContract(fields=(FieldContract("a", min=2, max=1),)), "X.fields[0] (a).min is 2, above its max of 1"),
    (
        FLOATS,
        InputContract(fields=(FieldContract("a", required=False),)),
        "X.fields[0] (a).required is false, so the field needs a default",
    ),
    (
        FLOATS,
        InputContract(min=0, fields=(FieldContract("a", default=-1.0),)),
        "X.fields[0] (a).default is -1.0, outside the input's range: at least 0",
    ),
    (
        TensorSpec("X", Datatype.FP32, (-1,)),
        InputContract(fields=(FieldContract("a"),)),
        "X.fields needs a last dimension",
    ),
    (TensorSpec("X", Datatype.INT8, (-1,)), InputContract(default=1.5), "expected an integer in the range of INT8"),
    (TensorSpec("X", Datatype.INT8, (-1,)), InputContract(categories=(300,)), "X.categories has 300"),
    (TensorSpec("X", Datatype.INT8, (-1,)), InputContract(min=128), "X.min is 128; no INT8 is in that range"),
    (TensorSpec("X", Datatype.INT8, (-1,)), InputContract(nonfinite="reject"), "X.nonfinite has no effect"),
    (TensorSpec("X", Datatype.BOOL, (-1,)), InputContract(min=0), "X.min needs a number input; this one is BOOL"),
    (
        TensorSpec("X", Datatype.BOOL, (-1,)),
        InputContract(categories=(1,)),
        "X.categories needs a number or BYTES input",
    ),
    (TensorSpec("X", Datatype.BOOL, (-1,)), InputContract(default=1.0), "expected true or false"),
    (TensorSpec("X", Datatype.BYTES, (-1,)), InputContract(max=1), "X.max needs a number input; this one is BYTES"),
    (TensorSpec("X", Datatype.BYTES, (-1,)), InputContract(categories=(1,)), "expected text, since the input is BYTES"),
    (TensorSpec("X", Datatype.BYTES, (-1,)), InputContract(element_bytes_max=-1), "expected at least 0"),
    (
        TensorSpec("X", Datatype.BYTES, (-1,)),
        InputContract(element_bytes_max=1, default="ab"),
        "X.default is longer than its own element_bytes_max of 1",
    ),
]


@pytest.mark.parametrize(("spec", "rule", "problem"), PROBLEMS)
def test_a_mistake_in_the_contract_is_reported_at_load(spec: TensorSpec, rule: InputContract, problem: str) -> None:
    """Each mistake is one line that says where, what it is and what would be accepted (P3)."""
    problems = contract_problems(signature(spec), Contract(inputs={"X": rule}))

    assert 1 == len(problems), problems
    assert problem in problems[0]


def test_all_mistakes_are_reported_at_once() -> None:
    """An unknown input names the nearest one; nothing hides behind the first problem (P3)."""
    contract = Contract(
        rows_max=0, inputs={"featurs": InputContract(), "x": InputContract(), "X": InputContract(min=2, max=1)}
    )
    specs = signature(FLOATS, TensorSpec("features", Datatype.FP32, (-1, 2)))

    with pytest.raises(ConfigError) as caught:
        compile_contract(specs, contract)

    problems = caught.value.problems
    assert 4 == len(problems)
    assert "contract.rows_max is 0; expected at least 1" == problems[0]
    assert "no such input; it has 'X', 'features'; hint: did you mean 'features'?" in problems[1]
    assert "hint: did you mean 'X'?" in problems[2]


def test_rows_max_on_an_unbatched_model_is_reported() -> None:
    """A rule that can never do anything is a mistake (P3)."""
    problems = contract_problems(signature(FLOATS, is_batched=False), Contract(rows_max=5))

    assert ["contract.rows_max has no effect: the model is not batched, so a request is one row"] == problems


def test_a_contract_as_written_in_yaml_has_no_problems() -> None:
    """Integers in the file are fine where the contract says float (P3)."""
    written = {"rows_max": 8, "inputs": {"n": {"min": 0, "categories": [1, 2], "default": 1, "required": False}}}

    contract = msgspec.convert(written, Contract)

    assert [] == contract_problems(signature(TensorSpec("n", Datatype.INT64, (-1, 1))), contract)


@settings(max_examples=150, deadline=None)
@given(
    array=hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.just(3)), elements=st.integers(-3, 3)),
    low=st.none() | st.integers(-3, 3),
    high=st.none() | st.integers(-3, 3),
    column=st.none() | st.integers(0, 2),
    categories=st.none() | st.sets(st.integers(-3, 3), min_size=1),
)
def test_the_vectorised_checks_agree_with_a_plain_loop(
    array: Array, low: int | None, high: int | None, column: int | None, categories: set[int] | None
) -> None:
    """A request is refused exactly when some element breaks a rule (P3)."""
    low, high = (high, low) if low is not None and high is not None and low > high else (low, high)
    values = None if categories is None else tuple(sorted(categories))
    if column is None:
        rule = InputContract(min=low, max=high, categories=values)
    else:
        rule = InputContract(fields=(FieldContract("c", index=column, min=low, max=high, categories=values),))
    looked_at = array if column is None else array[:, column]

    def is_good(value: float) -> bool:
        return (
            (low is None or value >= low)
            and (high is None or value <= high)
            and (categories is None or value in categories)
        )

    expected = all(map(is_good, looked_at.reshape(-1).tolist()))
    check = compile_contract(signature(FLOATS), Contract(inputs={"X": rule}))
    try:
        if check is not None:
            check(InferRequest(None, {}, {"X": array}, len(array), []))
        is_accepted = True
    except InvalidInput:
        is_accepted = False

    assert expected == is_accepted
