"""Test that ``ascend-grad check`` passes right results, fails wrong ones, and reports what it cannot compute."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import ascend_grad as ag
from ascend_grad._call import Operator
from ascend_grad.cli import check_cases
from ascend_grad.cli.main import main
from ascend_grad.operators.table import OPERATORS, SOFTMAX


def test_the_cpu_passes(capsys, tmp_path):
    file = tmp_path / "check.json"
    assert main(["check", "--filter", "softmax_backward float16", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("backend cpu: ")
    assert text.splitlines()[-1] == "3 of 3 operators pass on cpu"
    verdicts = {
        line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith(("soft", "log", "sca"))
    }
    names = ("softmax_backward", "log_softmax_backward", "scaled_masked_softmax_backward")
    assert verdicts == dict.fromkeys(names, "pass")
    report = json.loads(file.read_text())
    assert report["info"] == ag.show_config(mode="dict")
    rows = report["rows"]
    assert [(row["operator"], row["dtype"], row["verdict"]) for row in rows] == [(n, "float16", "pass") for n in names]
    head, line = (line.split() for line in text.splitlines()[3:5])
    assert head[-1] == "max/tol."
    assert float(line[-1]) == pytest.approx(rows[0]["largest_in_tolerances"], rel=0.05)
    assert all(row["cases"] and row["max_relative_error"] < 2**-10 for row in rows)
    assert main(["check", "--filter", "softmax_backward float16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_the_cases_of_a_new_rowwise_operator_follow_from_the_table(monkeypatch):
    kinds = {"family": "rowwise", "checks": [], "results": []}
    new = Operator("new_backward", None, "g y axis", kernels="softmax_backward", arrays="g y", **kinds)
    monkeypatch.setattr(check_cases, "ROWWISE", (new,))
    monkeypatch.setattr(check_cases, "OPERATORS", {"new": SOFTMAX, "new_backward": new})
    made = [case for case in check_cases.cases() if case.operator == "new_backward"]
    assert {(case.dtype, case.label) for case in made} >= {
        ("float32", "(5, 31) dim -1"),
        ("float64", "(128, 65) dim 0"),
    }
    for case in made:
        assert list(case.arguments) == ["g", "y", "dim"]
        sums = np.sum(
            case.arguments["y"].astype(np.float64), axis=case.arguments["dim"] if case.arguments["y"].ndim else None
        )
        np.testing.assert_allclose(sums, 1, rtol=0.05)


def test_float64_on_the_cpu(capsys, tmp_path):
    """Every operator passes in float64 with less than half of the tolerance."""
    file = tmp_path / "check.json"
    assert main(["check", "--filter", "float64", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["operator"] for row in rows} == set(OPERATORS)
    for row in rows:
        assert (row["dtype"], row["verdict"], row["refused"]) == ("float64", "pass", [])
        assert row["elements"]
        assert row["largest_in_tolerances"] < 0.5


@pytest.mark.parametrize("step", [1e-11, 2**-24])
@pytest.mark.parametrize("operator", ["softmax", "scaled_masked_softmax"])
def test_float64_with_fewer_digits_fails(operator, step, monkeypatch, capsys):
    right = getattr(ag, operator)

    def wrong(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        return result * (1 + step) if backend == "cpu" else result

    monkeypatch.setattr(ag, operator, wrong)
    assert main(["check", "--filter", f"{operator} float64"]) == 1
    assert any(line.split() == [operator, "FAIL"] for line in capsys.readouterr().out.splitlines())


def test_the_scale_of_float64_is_not_rounded(monkeypatch):
    """The comparison does not round a float64 scale to float32. The library does not round it, either."""
    monkeypatch.setattr(check_cases, "SCALES", (1 + 2.0**-30,))
    assert main(["check", "--filter", "scaled_masked_softmax"]) == 0


@pytest.mark.parametrize("wrong", [1.2, np.nan])
def test_wrong_results_fail(wrong, monkeypatch, capsys):
    """A single wrong case of many fails the check."""
    right = ag.softmax

    def softmax(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        if backend == "cpu" and result.shape == (5, 31):
            result[...] = right(np.zeros(result.shape, np.float32)) * wrong
        return result

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--filter", "log_softmax float32"]) == 0
    capsys.readouterr()
    assert main(["check", "--filter", "softmax float32"]) == 1
    text = capsys.readouterr().out
    assert any(line.split() == ["softmax", "FAIL"] for line in text.splitlines())
    assert any(line.split() == ["log_softmax", "pass"] for line in text.splitlines())
    assert "times its tolerance, in case (5, 31) dim -1" in text
    assert ("is inf times its tolerance" in text) == np.isnan(wrong)


def verdict_of(operator: str, text: str) -> str:
    return next(line.split()[1] for line in text.splitlines() if line.startswith(operator) and len(line.split()) == 2)


@pytest.mark.parametrize(
    ("operator", "name"),
    [("fused_linear_cross_entropy_loss_grad", "target_mask"), ("fused_linear_online_max_sum", None)],
)
def test_bits_in_another_order_fail(operator, name, monkeypatch, capsys):
    """A device that takes the highest bit of a mask for the first row fails the check."""
    right = getattr(ag, operator)

    def turned(mask):
        bits = np.unpackbits(mask, bitorder="little")
        return np.packbits(bits, bitorder="big")

    def wrong(*args, backend, **kwargs):
        if backend == "reference":
            return right(*args, backend=backend, **kwargs)
        if name and kwargs[name].dtype == np.uint8:
            kwargs[name] = turned(kwargs[name])
            kwargs["masked_target"] = np.minimum(kwargs["masked_target"], len(kwargs["weight"]) - 1)
        result = right(*args, backend=backend, **kwargs)
        return result if name else result._replace(target_mask=turned(result.target_mask))

    monkeypatch.setattr(ag, operator, wrong)
    assert main(["check", "--filter", f"{operator} float32"]) == 1
    assert verdict_of(operator, capsys.readouterr().out) == "FAIL"
    for case in check_cases.cases():
        if case.operator == operator and case.label.startswith("asymmetric mask"):
            break
    else:
        pytest.fail("there is no case with an asymmetric mask")


def test_wrong_tokens_fail_where_logits_are_asked_for(monkeypatch, capsys):
    """A single wrong token of one size fails the check."""
    operator = "fused_linear_online_max_sum"
    right = ag.fused_linear_online_max_sum

    def wrong(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        if backend == "cpu" and kwargs["return_logits"] and len(kwargs["weight"]) == 4097:
            result.predicted_logits[-1] -= 0.5
        return result

    monkeypatch.setattr(ag, operator, wrong)
    assert main(["check", "--filter", f"{operator} float32"]) == 1
    text = capsys.readouterr().out
    assert verdict_of(operator, text) == "FAIL"
    assert "in case BT 64 V 4097 H 24 int64, logits" in text


def test_bits_that_vary_fail(monkeypatch, capsys):
    right = ag.softmax
    count = 0

    def softmax(*args, backend, **kwargs):
        nonlocal count
        result = right(*args, backend=backend, **kwargs)
        if backend == "cpu" and result.shape == (4, 30000):
            count += 1
            if count % 10 == 5:
                result[3, 7] = np.nextafter(result[3, 7], np.float32(2))
        return result

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--filter", "softmax float32"]) == 1
    text = capsys.readouterr().out
    assert verdict_of("softmax", text) == "FAIL"
    assert "failed: (4, 30000) dim -1" in text
    assert "bits of results differ among 10 equal calls" in text
    assert re.fullmatch(r"\d+ of \d+ operators pass on cpu", text.splitlines()[-1])
    assert text.splitlines()[-1].split()[0] < text.splitlines()[-1].split()[2]
    assert "times its tolerance, in case" not in text


@pytest.mark.parametrize("name", ["absent/check.json", "."])
def test_a_file_that_cannot_be_written_is_refused_first(name, capsys):
    assert main(["check", "--json", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ascend-grad check: error: --json {name}: ")


def test_errors_of_calls_fail(monkeypatch, capsys):
    def softmax(*args, **kwargs):
        raise ag.AclError("aclnnSoftmax failed", code=507015, call="aclnnSoftmax")

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--filter", "softmax float32"]) == 1
    assert "failed: () dim 0: aclnnSoftmax failed [507015 ACL_ERROR_RT_AICORE_EXCEPTION]" in capsys.readouterr().out


def test_what_cannot_be_checked(run_script, capsys):
    script = "import sys; from ascend_grad.cli.main import main; sys.exit(main(['check', '--backend', 'npu']))"
    nowhere = dict.fromkeys(("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"), "/nonexistent")
    result = run_script(script, check=False, **nowhere)
    assert result.returncode == 2
    assert "error: backend 'npu' is not usable: no Ascend NPU found" in result.stderr
    assert result.stderr.endswith("; see ascend-grad info --verbose\n")
    assert main(["check", "--filter", "softmin"]) == 2
    assert "no operator and dtype contain 'softmin'" in capsys.readouterr().err


def test_the_environment_names_the_backend(run_script):
    """The environment chooses the backend. Without a device, the choice is an error, as with an argument."""
    script = """
        from ascend_grad.cli.main import main
        raise SystemExit(main(["check", "--filter", "softmax float16"]))
    """
    done = run_script(script, check=False, ASCEND_GRAD_BACKEND="npu")
    assert done.returncode == 2
    assert "backend 'npu' is not usable" in done.stderr
