"""Test what the list of options says about a loss."""

from __future__ import annotations

import numpy as np
import pytest

from ascend_grad.operators.options import OPTIONS, has_own_divisor, needs_entropy, statistics_for_backward


@pytest.fixture
def with_entropy(monkeypatch):
    """Name an option whose gradient depends on the entropy, as none does yet."""
    monkeypatch.setitem(OPTIONS, "label_smoothing", OPTIONS["label_smoothing"]._replace(needs_entropy=True))
    return {"label_smoothing": 0.1}


@pytest.mark.parametrize("value", [0, 0.0, -0.0, np.float64(0)])
def test_a_term_with_the_factor_0_has_no_divisor(value):
    assert not has_own_divisor({"lse_square_scale": value, "label_smoothing": 0.1, "denominator": 2.0})
    assert not has_own_divisor({})


@pytest.mark.parametrize("value", [1e-300, np.inf, np.zeros(())])
def test_the_term_of_the_squared_lse_has_a_divisor_of_its_own(value):
    assert has_own_divisor({"lse_square_scale": value})


def test_an_option_may_need_the_entropy(with_entropy):
    assert needs_entropy((), with_entropy)
    assert not needs_entropy(("lse",), {"label_smoothing": 0.0, "temperature": 2.0})
    assert statistics_for_backward(("lse",), with_entropy) == ("lse", "entropy")
    assert statistics_for_backward(("lse",), {"label_smoothing": 0.0}) == ("lse",)
    assert statistics_for_backward(("predicted",), with_entropy) == ()


def test_outputs_and_upstream_gradients_need_the_entropy():
    assert needs_entropy(("lse", "entropy"), {})
    assert needs_entropy((), {"grad_entropy": np.ones(2)})
    assert not needs_entropy((), {"grad_entropy": None})


def test_torch_saves_the_entropy_for_such_an_option(with_entropy, monkeypatch):
    torch = pytest.importorskip("torch")
    import ascend_grad as ag
    import ascend_grad.torch as agt

    given, compute = [], ag.linear_cross_entropy_backward

    def backward(*arguments, **options):
        given.append(options["entropy"])
        return compute(*arguments, **options)

    backward.__name__ = compute.__name__
    monkeypatch.setattr(ag, "linear_cross_entropy_backward", backward)
    x, target = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 3, 1])
    for options in (with_entropy, {}):
        agt.linear_cross_entropy(x, torch.ones(4, 2), target, outputs=("lse",), **options).lse.sum().backward()
    assert given[0] == pytest.approx([np.log(4)] * 3)
    assert given[1] is None


def test_jax_saves_the_entropy_for_such_an_option(with_entropy):
    pytest.importorskip("jax")
    from ascend_grad.jax.calls import Settings

    settings = Settings("linear_cross_entropy", -1, ("lse",), tuple(with_entropy.items()))
    assert settings.saved == ("lse", "entropy")
    assert settings._replace(attributes=()).saved == ("lse",)
