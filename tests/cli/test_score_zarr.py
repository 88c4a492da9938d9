"""Test ``ascend-grad score`` on Zarr arrays: values, chunks, and runs that go on where another one was ended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import assert_target_refused, everything_here, peak_anonymous_bytes, refused
from samples import DTYPES, generator
from zarr_files import PART, Interrupted, assert_identical, before_call, chunk_files, load, save_zarr

import ascend_grad as ag
from ascend_grad.cli.main import main
from ascend_grad.cli.zarr_results import Result

pytestmark = [
    pytest.mark.usefixtures("here", "small_parts"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]
ROWS, VOCABULARY, WIDTH, K = 11, 21, 5, 3
LOSSES = ("log_prob", "entropy", "lse", "predicted")
TOP_K = ("top_k_log_prob", "top_k_index")
INPUTS = ("hidden", "weight.npy", "targets.npy")


def problem(dtype: type = np.float32, rows: int = ROWS, **settings) -> tuple[np.ndarray, ...]:
    """Make and save a problem whose HIDDEN has chunks of two rows: three parts of two chunks."""
    rng = generator(str(np.dtype(dtype)), rows)
    hidden, weight = (rng.standard_normal((n, WIDTH)).astype(dtype) for n in (rows, VOCABULARY))
    targets = rng.integers(0, VOCABULARY, rows)
    targets[1:5:3] = -100
    save_zarr("hidden", hidden, (2, 3), **settings)
    np.save("weight.npy", weight)
    np.save("targets.npy", targets)
    return hidden, weight, targets


def outputs(*names: str) -> list[str]:
    """Return the options that write results to arrays of their names."""
    return [word for name in names for word in (f"--{name.replace('_', '-')}-out", name)]


def expected(hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, **settings) -> dict[str, np.ndarray]:
    """Return the values of all results, computed part by part."""
    parts: list[dict[str, np.ndarray]] = []
    for begin in range(0, len(hidden), 4):
        rows = slice(begin, begin + 4)
        losses = ag.linear_cross_entropy(
            hidden[rows], weight, targets[rows], reduction="none", return_grad=False, outputs=LOSSES, **settings
        )
        top = ag.linear_top_k(hidden[rows], weight, K, **settings)
        values = {name: getattr(losses, name) for name in LOSSES}
        parts.append(values | {"top_k_log_prob": top.log_prob, "top_k_index": top.index})
    return {name: np.concatenate([part[name] for part in parts]) for name in (*LOSSES, *TOP_K)}


def computed(capsys) -> dict[str, str]:
    """Return the number of parts that the command says it computed of each result."""
    lines = [line for line in capsys.readouterr().out.splitlines() if " parts computed " in line]
    return {line.partition(":")[0]: line.split(", ")[-1].split(" parts")[0] for line in lines}


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_result(dtype, zarr_format, capsys):
    arrays = problem(DTYPES[dtype], zarr_format=zarr_format)
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(K), *raw]) == 0
    for name, values in expected(*arrays).items():
        assert_identical(name, values)
        result = zarr.open_array(name, mode="r")
        assert (result.chunks, result.metadata.zarr_format) == ((4, *values.shape[1:]), zarr_format)
    assert not any(name.startswith(".") for name in os.listdir())
    assert computed(capsys) == dict.fromkeys((*LOSSES, *TOP_K), "3 of 3")


def test_shards_and_names_of_dimensions():
    arrays = problem(shards=(4, 6), dimension_names=("token", "feature"))
    assert main(["score", *INPUTS, *outputs("log_prob", "top_k_index"), "--top-k", str(K)]) == 0
    for name, names in (("log_prob", ("token",)), ("top_k_index", ("token", None))):
        assert_identical(name, expected(*arrays)[name])
        result = zarr.open_array(name, mode="r")
        assert (result.shards, result.metadata.dimension_names) == (None, names)


@pytest.mark.parametrize("hidden", ["hidden", "hidden.npy"])
def test_weight_and_targets_are_of_either_kind(hidden):
    arrays = problem()
    np.save("hidden.npy", arrays[0])
    save_zarr("weight", arrays[1], (8, 2))
    save_zarr("targets", arrays[2].astype(np.uint16 if hidden == "hidden" else np.int64) % 21, (3,))
    assert main(["score", hidden, "weight", "targets", "-o", "out"]) == 0
    values = expected(arrays[0], arrays[1], load("targets").astype(int))["log_prob"]
    assert (np.load("out") if hidden == "hidden.npy" else load("out")).tobytes() == values.tobytes()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows, capsys):
    arrays = problem(rows=rows)
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(K)]) == 0
    assert f"targets.npy: {rows} tokens scored" in capsys.readouterr().out
    for name, values in expected(*arrays).items() if rows else ():
        assert_identical(name, values)
    for name in (*LOSSES, *TOP_K):
        assert load(name).shape == ((rows, K) if name in TOP_K else (rows,))


def test_the_mean_is_that_of_files(capsys):
    hidden, _, _ = problem()
    np.save("hidden.npy", hidden)
    assert main(["score", *INPUTS, "-o", "out"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert main(["score", "hidden.npy", *INPUTS[1:], "-o", "out.npy"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == line
    assert main(["score", *INPUTS, "-o", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == line
    assert main(["score", *INPUTS, *outputs("lse")]) == 0
    assert "tokens scored" not in capsys.readouterr().out


# ---- repeated runs ---------------------------------------------------------------------------------------------------


COMMAND = ["score", *INPUTS, *outputs("log_prob", "top_k_index"), "--top-k", str(K)]


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupt a run that has written four of the six parts of two results."""
    arrays = problem()
    with monkeypatch.context() as patch:
        patch.setattr(Result, "_write", before_call(5, Result._write))
        with pytest.raises(Interrupted):
            main(COMMAND)
    assert sorted(os.listdir()) == sorted([".log_prob.ascend-grad-part", ".top_k_index.ascend-grad-part", *INPUTS])
    return arrays


def test_a_run_goes_on_where_another_was_ended(interrupted, capsys):
    before = {name: chunk_files(f".{name}.ascend-grad-part/{name}") for name in ("log_prob", "top_k_index")}
    assert sum(map(len, before.values())) == 4
    assert main(COMMAND) == 0
    assert computed(capsys) == {name: f"{3 - len(files)} of 3" for name, files in before.items()}
    for name, files in before.items():
        assert files.items() <= chunk_files(name).items()
        assert_identical(name, expected(*interrupted)[name])
    after = everything_here()
    assert main(COMMAND) == 0
    assert computed(capsys) == {"log_prob": "0 of 3", "top_k_index": "0 of 3"}
    assert everything_here() == after


def test_a_run_that_was_ended_between_two_results(interrupted, capsys):
    """A result is complete and another one is not, after a crash between the two renamings."""
    finished = {name: len(chunk_files(f".{name}.ascend-grad-part/{name}")) for name in ("log_prob", "top_k_index")}
    assert main(["score", *INPUTS, *outputs("log_prob")]) == 0
    assert computed(capsys) == {"log_prob": f"{3 - finished['log_prob']} of 3"}
    assert main(COMMAND) == 0
    assert computed(capsys) == {"log_prob": "0 of 3", "top_k_index": f"{3 - finished['top_k_index']} of 3"}
    assert_identical("top_k_index", expected(*interrupted)["top_k_index"])


def test_a_result_that_is_wanted_later(capsys):
    arrays = problem()
    assert main(["score", *INPUTS, *outputs("log_prob")]) == 0
    capsys.readouterr()
    assert main(["score", *INPUTS, *outputs("log_prob", "entropy", *TOP_K), "--top-k", str(K)]) == 0
    assert computed(capsys) == dict.fromkeys(("entropy", *TOP_K), "3 of 3") | {"log_prob": "0 of 3"}
    for name in ("entropy", *TOP_K):
        assert_identical(name, expected(*arrays)[name])


@pytest.mark.parametrize("changed", ["hidden", "weight.npy", "targets.npy"])
def test_changed_inputs(changed, interrupted, capsys):
    """A run does not go on with other inputs. Entries of the top-k call do not depend on the targets."""
    hidden, weight, targets = interrupted
    if changed == "hidden":
        zarr.open_array("hidden", mode="r+")[4] = hidden[4] + 1
    elif changed == "weight.npy":
        np.save(changed, weight + 1)
    else:
        np.save(changed, targets.astype(np.int32))
    text = f"was started with inputs that have changed since; remove {os.path.realpath('.log_prob.ascend-grad-part')}"
    assert text in refused(capsys, *COMMAND[1:], command="score")
    command = [*INPUTS, *outputs("top_k_index"), "--top-k", str(K)]
    if changed == "targets.npy":
        assert main(["score", *command]) == 0
        assert_identical("top_k_index", expected(hidden, weight, targets)["top_k_index"])
    else:
        assert "have changed since" in refused(capsys, *command, command="score")


@pytest.mark.parametrize("bias", ["bias", "bias.npy"])
def test_another_bias(bias, capsys):
    """A bias is of either kind. Every result depends on it."""
    hidden, weight, targets = problem()
    values = np.linspace(-3, 3, VOCABULARY)
    np.save("bias.npy", values)
    save_zarr("bias", values, (4,))
    right = expected(hidden, weight, targets, bias=values)
    for name in ("log_prob", "top_k_index"):
        command = [*INPUTS, *outputs(name), *(("--top-k", str(K)) if name in TOP_K else ()), "--bias", bias]
        assert main(["score", *command]) == 0
        assert_identical(name, right[name])
        if bias == "bias":
            zarr.open_array("bias", mode="r+")[2] = 7.0
        else:
            np.save("bias.npy", np.where(np.arange(VOCABULARY) == 2, 7.0, values))
        capsys.readouterr()
        text = "was started with inputs that have changed since; name another result, or remove this one"
        assert text in refused(capsys, *command, command="score")
        if bias == "bias":
            zarr.open_array("bias", mode="r+")[2] = values[2]
        else:
            np.save("bias.npy", values)


def test_a_complete_result_of_other_inputs(capsys):
    _, _, targets = problem()
    assert main(["score", *INPUTS, "-o", "out"]) == 0
    capsys.readouterr()
    np.save("targets.npy", targets.astype(np.int32))
    message = refused(capsys, *INPUTS, "-o", "out", command="score")
    assert message == "out: was started with inputs that have changed since; name another result, or remove this one"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--temperature", "2"), "was started with temperature 1.0, not 2.0"),
        (("--softcap", "2"), "was started with softcap null, not 2.0"),
        (("--logit-scale", "2"), "was started with logit-scale 1.0, not 2.0"),
        (("--bias", "bias.npy"), "was started with bias null, not "),
        (("--ignore-index", "3"), "was started with ignore-index -100, not 3"),
        (("--workspace-bytes", str(2**23)), f"was started with workspace-bytes null, not {2**23}"),
        (("--backend", "reference"), 'was started with backend null, not "reference"'),
        (("--lse-out", "out", "--log-prob-out", "other"), 'was started with result "log_prob", not "lse"'),
    ],
)
def test_other_options_are_refused(options, text, monkeypatch, capsys):
    _, _, targets = problem()
    np.save("targets.npy", targets % VOCABULARY)
    np.save("bias.npy", np.ones(VOCABULARY))
    command = [*INPUTS, "-o", "out"]

    with monkeypatch.context() as patch:
        patch.setattr(Result, "_write", before_call(3, Result._write))
        with pytest.raises(Interrupted):
            main(["score", *command])
    message = refused(capsys, *command, *options, command="score")
    assert text in message
    assert message.endswith(f"; remove {os.path.realpath(PART)} to start again")
    assert main(["score", *command, "--threads", "2"]) == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_damaged_chunk(capsys):
    problem()
    path = Path("hidden/c/2/0")
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["score", *INPUTS, "-o", "out"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ascend-grad score: error: hidden: cannot be read at [4:8, 0:5]: ")
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == sorted([PART, *INPUTS])  # the first part is finished


@pytest.mark.parametrize("name", ["hidden", "weight", "targets"])
def test_an_empty_chunk_is_found_before_anything_is_written(name, capsys):
    _, weight, targets = problem()
    save_zarr("weight", weight, (8, 5))
    save_zarr("targets", targets, (4,))
    chunk = {"hidden": "hidden/c/5/1", "weight": "weight/c/1/0", "targets": "targets/c/2"}[name]
    os.truncate(chunk, 0)
    message = refused(capsys, "hidden", "weight", "targets", "-o", "out", command="score")
    assert message == f"{chunk}: the file is empty"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("-o", "out.npy"), "out.npy: ends in .npy, but the result of Zarr arrays is a Zarr array"),
        (("-o", "out", "--lse-out", "./out"), "out: expected an array for each result, got this one twice"),
        (("-o", "hidden/out"), "hidden/out: is inside the input hidden"),
        (("-o", "absent/out"), "absent/out: there is no directory"),
        (("-o", "folder"), "folder: exists, and was not written by this command"),
        (("-o", "out", "--dtype", "bfloat16"), "hidden: --dtype bfloat16 is for elements of 2 raw bytes"),
        (("-o", "out", "--temperature", "-1"), "temperature: expected"),
    ],
)
def test_options_that_are_refused(options, text, capsys):
    problem()
    os.mkdir("folder")
    assert text in refused(capsys, *INPUTS, *options, command="score")


def test_a_target_out_of_the_vocabulary(capsys):
    _, _, targets = problem()
    assert_target_refused(capsys, INPUTS, targets, 9)


def test_a_result_of_apply_is_no_result_of_score(capsys):
    problem()
    assert main(["apply", "softmax", "--input", "hidden", "-o", "out"]) == 0
    capsys.readouterr()
    assert 'out: was started with command null, not "score"' in refused(capsys, *INPUTS, "-o", "out", command="score")


def test_memory_is_that_of_a_part():
    """The command needs less than 300 MiB. HIDDEN has 1 GiB, and both calls need it."""
    zarr.create_array("hidden", shape=(2**20, 2**8), dtype="f4", chunks=(2**14, 2**7))
    np.save("weight.npy", np.ones((16, 2**8), np.float32))
    options = ("--entropy-out", "out", "--top-k", "1", "--top-k-index-out", "index", "--workspace-bytes", str(2**23))
    assert peak_anonymous_bytes("hidden", "weight.npy", *options, command="score") < 300 * 2**20
    np.testing.assert_allclose(zarr.open_array("out", mode="r")[-1], np.log(16), rtol=1e-6)
