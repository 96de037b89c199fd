"""Discovery: what is found at a path, what is told about the rest."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control_plane.discover import FoundModel, discover, survey
from headrace.errors import LoadError
from headrace.snapshot import version_key


def put(root: Path, *names: str, content: bytes = b"model") -> Path:
    """Write files with their folders; the content does not matter to discovery."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def seen(models: list[FoundModel]) -> dict[str, list[str]]:
    return {model.name: [spec.version for spec in model.versions] for model in models}


def problems(source: Path) -> list[str]:
    return [str(problem) for problem in survey(source).problems]


@pytest.mark.parametrize(
    ("files", "source", "found"),
    [
        (["fraud.onnx"], "fraud.onnx", {"fraud": ["1"]}),
        (["fraud.onnx", "churn.onnx"], "", {"churn": ["1"], "fraud": ["1"]}),
        (["fraud/1/model.onnx", "fraud/2/model.onnx", "churn/7/model.onnx"], "", {"churn": ["7"], "fraud": ["1", "2"]}),
        (["fraud/model.onnx", "churn/model.onnx"], "", {"churn": ["1"], "fraud": ["1"]}),
        (["fraud/1/model.onnx", "fraud/2/model.onnx"], "fraud", {"fraud": ["1", "2"]}),
        (["fraud/v9/model.onnx", "fraud/v10/model.onnx"], "fraud", {"fraud": ["v9", "v10"]}),
        (["fraud/2024-05-01/m.onnx"], "fraud", {"fraud": ["2024-05-01"]}),
        (["fraud/1/weights-and-all.onnx"], "", {"fraud": ["1"]}),
        (["fraud/1/model.onnx/model.onnx", "fraud/1/model.onnx/w.bin"], "", {"fraud": ["1"]}),
        (["a.onnx", "b/3/model.onnx"], "", {"a": ["1"], "b": ["3"]}),
        (["1/model.onnx", "b/3/model.onnx"], "", {"1": ["1"], "b": ["3"]}),
        (["slow.sleep.json"], "", {"slow": ["1"]}),
        ([".hidden.onnx", ".git/1/model.onnx", "a.onnx"], "", {"a": ["1"]}),
        (["a.onnx", "a.onnx.data", "README.md", "config.json", "docs/guide.md"], "", {"a": ["1"]}),
    ],
)
def test_the_accepted_layouts(tmp_path: Path, files: list[str], source: str, found: dict[str, list[str]]):
    """X1: a file, a flat folder, Triton's layout, one model's folder of versions; nothing else is in the way."""
    put(tmp_path, *files)

    assert found == seen(discover(tmp_path / source))
    assert problems(tmp_path / source) == []


def test_versions_rise_as_numbers(tmp_path: Path):
    """X1: 10 is above 9, v10 above v9."""
    put(tmp_path, *(f"m/{version}/model.onnx" for version in ("10", "9", "1", "2")))

    assert seen(discover(tmp_path))["m"] == ["1", "2", "9", "10"]


@given(st.lists(st.integers(0, 10**6), min_size=2, unique=True))
def test_version_order_is_numeric_order(numbers: list[int]):
    """X1: for any numbers."""
    assert sorted(numbers) == [int(version) for version in sorted(map(str, numbers), key=version_key)]


def test_a_version_carries_an_absolute_path_and_the_digest_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """X1: the snapshot does not depend on the working folder, and a changed file is a changed version."""
    put(tmp_path, "store/m.onnx", content=b"some bytes")
    monkeypatch.chdir(tmp_path)

    (spec,) = discover(Path("store"))[0].versions

    assert str(tmp_path / "store" / "m.onnx") == spec.path
    assert f"sha256:{hashlib.sha256(b'some bytes').hexdigest()}" == spec.digest


def test_a_link_keeps_its_own_name(tmp_path: Path):
    """X1: `current.onnx -> v7.onnx` serves `current`; a mounted Kubernetes volume is made of such links."""
    put(tmp_path, "..data/v7.onnx")
    (tmp_path / "current.onnx").symlink_to("..data/v7.onnx")

    assert seen(discover(tmp_path)) == {"current": ["1"]}


# ------------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        ({"m.onnx": b"", "labels.txt": b"no\nyes\n"}, ("no", "yes")),
        ({"m.onnx": b"", "m.labels.txt": b"own\n", "labels.txt": b"shared\n"}, ("own",)),
        ({"m.onnx": b"", "labels.txt": "\ufeffüber\r\n\r\nthree\r\n\r\n".encode()}, ("über", "", "three")),
        ({"m.onnx": b"", "labels.txt": b"\n\n"}, ()),
        ({"m/1/model.onnx": b"", "m/1/labels.txt": b"near", "m/labels.txt": b"far"}, ("near",)),
        ({"m/1/model.onnx": b"", "m/labels.txt": b"far"}, ("far",)),
    ],
)
def test_labels_stand_beside_the_artefact_one_a_line(tmp_path: Path, files: dict[str, bytes], labels: tuple[str, ...]):
    """X1: a label's line is its index, so an empty line in between counts."""
    for name, content in files.items():
        put(tmp_path, name, content=content)

    assert labels == discover(tmp_path)[0].versions[0].labels


def test_labels_for_nobody_in_particular_are_a_problem(tmp_path: Path):
    """X1: one `labels.txt` for two models would be wrong for one of them."""
    put(tmp_path, "a.onnx", "b.onnx", "labels.txt")

    assert [model.versions[0].labels for model in discover(tmp_path)] == [(), ()]
    (problem,) = problems(tmp_path)
    assert "labels.txt" in problem
    assert "accepted: <model>.labels.txt" in problem


def test_labels_that_are_not_text_are_a_problem_and_the_model_is_served(tmp_path: Path):
    """X1: wrong labels must not take a model out of service."""
    put(tmp_path, "m.onnx")
    put(tmp_path, "labels.txt", content=b"caf\xe9")

    assert seen(discover(tmp_path)) == {"m": ["1"]}
    assert "0xe9" in problems(tmp_path)[0]


# ---------------------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize("name", ["bad name", "ümlaut", "a+b", "-dash", "x" * 129])
def test_a_name_that_cannot_stand_in_a_url_is_told_with_the_rule(tmp_path: Path, name: str):
    """X1: the others are served."""
    put(tmp_path, f"{name}.onnx", "good.onnx")

    assert seen(discover(tmp_path)) == {"good": ["1"]}
    (problem,) = problems(tmp_path)
    assert repr(name) in problem
    assert "1 to 128 of the characters" in problem


def test_two_places_for_one_name_are_a_problem(tmp_path: Path):
    """X1: which of them is served does not depend on chance, and the other is told."""
    put(tmp_path, "a.onnx", "a/2/model.onnx")

    assert seen(discover(tmp_path)) == {"a": ["1"]}
    assert "already taken" in problems(tmp_path)[0]


def test_several_models_in_one_version_are_a_problem(tmp_path: Path):
    """X1: no guess which one is meant."""
    put(tmp_path, "m/1/a.onnx", "m/1/b.onnx", "m/2/model.onnx", "m/2/other.onnx")

    assert seen(discover(tmp_path)) == {"m": ["2"]}
    assert "holds 2 models (a.onnx, b.onnx)" in problems(tmp_path)[0]


def test_another_librarys_model_beside_ours_is_a_problem(tmp_path: Path):
    """X1: a model that is quietly not served is found out by its users."""
    put(tmp_path, "a.onnx", "b.pkl", "c/1/model.pt")

    assert seen(discover(tmp_path)) == {"a": ["1"]}
    pickled, torch = problems(tmp_path)
    assert "skl2onnx" in pickled
    assert "torch.onnx.export" in torch


def test_a_file_that_cannot_be_read_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """X1."""
    put(tmp_path, "a.onnx", "b.onnx")
    (tmp_path / "a.onnx").chmod(0)
    if os.geteuid() == 0:  # root may read everything
        original = Path.open

        def deny(path: Path, *arguments, **options):
            if path.name == "a.onnx":
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", deny)

    assert seen(discover(tmp_path)) == {"b": ["1"]}
    assert "Permission denied" in problems(tmp_path)[0]


# ------------------------------------------------------------------------------------------------- nothing to serve


def refusal(source: Path) -> str:
    with pytest.raises(LoadError) as caught:
        discover(source)
    assert str(source) in caught.value.message
    assert "accepted: a .onnx file" in caught.value.message
    return caught.value.message


def test_a_missing_source_says_so(tmp_path: Path):
    """X1."""
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_an_empty_folder_says_so(tmp_path: Path):
    """X1."""
    assert "found nothing to serve" in refusal(tmp_path)
    assert "it is empty" in refusal(tmp_path)


def test_foreign_files_are_named_with_the_way_out(tmp_path: Path):
    """X1, C5: what is there is told, not silently passed over."""
    put(tmp_path, "model.pkl", content=b"\x80\x04}.")
    put(tmp_path, "notes.txt")

    message = refusal(tmp_path)

    assert "model.pkl: is a Python pickle" in message
    assert "hint: skl2onnx" in message
    assert "notes.txt: is no model file" in message


def test_a_foreign_file_as_source_is_named(tmp_path: Path):
    """X1, C5."""
    put(tmp_path, "m.bst", content=b'{"learner":{}}')

    assert "XGBoost" in refusal(tmp_path / "m.bst")


@pytest.mark.parametrize("source", ["", "store"])
def test_a_saved_model_is_named(tmp_path: Path, source: str):
    """X1: as the source itself and inside a store."""
    put(tmp_path, "store/saved_model.pb", "store/variables/variables.index")

    assert "SavedModel" in refusal(tmp_path / source)


def test_a_long_list_of_foreign_files_is_cut(tmp_path: Path):
    """X1: a mistaken `headrace serve ~` does not print a screenful."""
    put(tmp_path, *(f"file{n}.txt" for n in range(50)))

    message = refusal(tmp_path)

    assert "and 40 more" in message
    assert len(message.splitlines()) < 15


def test_a_pipe_is_not_read(tmp_path: Path):
    """X1: it would be waited for without end."""
    os.mkfifo(tmp_path / "pipe.onnx")

    assert "neither a file nor a folder" in refusal(tmp_path / "pipe.onnx")


def test_the_supervisor_gets_no_numpy_from_discovery(tmp_path: Path):
    """X1: a process that only watches others stays small."""
    put(tmp_path, "m.onnx")
    code = (
        "import sys; from pathlib import Path; from headrace.control_plane.discover import discover; "
        f"discover(Path({str(tmp_path)!r})); print([m for m in ('numpy', 'onnxruntime', 'onnx') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
