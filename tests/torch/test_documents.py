"""Test statements of the documents and of the package about `ascend_grad.torch`."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch_oracles import assert_close, linear_cross_entropy

import ascend_grad.torch as agt
from ascend_grad.torch.compat import cce, liger, torch_npu, verl

SOURCES = Path(__file__).resolve().parents[2]


def test_the_api_reference_lists_every_public_name():
    text = (SOURCES / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^   torch\.([\w.]+)$", text, re.MULTILINE))
    public = {name for name in agt.__all__ if name != "compat"}
    modules = {"cce": cce, "liger": liger, "torch_npu": torch_npu, "verl": verl}
    assert set(agt.compat.__all__) == set(modules)
    assert listed == public | {f"compat.{name}.{each}" for name, module in modules.items() for each in module.__all__}


def names_of_example(page):
    """Run the example of tensors in a document, and return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```", (SOURCES / page).read_text(), re.DOTALL | re.MULTILINE)
    (example,) = [block for block in blocks if block.startswith("import torch\n")]
    names: dict = {}
    exec(example, names)
    return names


def test_the_example_of_the_first_steps():
    names = names_of_example("docs/start.md")
    torch.testing.assert_close(names["after"], names["before"])
    (right,) = torch.autograd.grad(names["before"], names["weight"])
    torch.testing.assert_close(names["weight"].grad, right)


def test_the_example_of_the_front_page():
    names = names_of_example("README.md")
    hidden, weight = (names[name].detach().double().requires_grad_() for name in ("hidden", "weight"))
    right = linear_cross_entropy(hidden, weight, torch.arange(64))
    right.backward()
    assert_close(names["loss"], right, torch.float32)
    assert_close(names["weight"].grad, weight.grad, torch.float32)


def test_torch_is_imported_by_who_asks_for_it_alone(run_script):
    run_script(
        """
        import sys
        import ascend_grad
        assert "torch" not in sys.modules
        import ascend_grad.torch
        assert ascend_grad.torch.softmax.__module__ == "ascend_grad.torch.rowwise"
        """
    )
