"""Test statements of the documents and of the package about `ascend_grad.dask`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray
from samples import UNMASKED, random_problem

import ascend_grad as ag
import ascend_grad.dask as agd

SOURCES = Path(__file__).resolve().parents[2]


def test_the_api_reference_lists_every_public_name():
    text = (SOURCES / "docs" / "api.md").read_text()
    assert set(re.findall(r"^   dask\.(\w+)$", text, re.MULTILINE)) == set(agd.__all__)


@pytest.mark.parametrize("name", agd.__all__)
def test_signatures_are_those_for_numpys_arrays(name):
    """Signatures are the same as for NumPy's arrays, but `out` is missing and one thread is the default."""
    plain, lazily = (dict(inspect.signature(getattr(module, name)).parameters) for module in (ag, agd))
    plain.pop("out", None)
    assert list(plain) == list(lazily)
    for parameter, other in zip(plain.values(), lazily.values()):
        assert parameter.kind == other.kind
        assert other.default == (1 if other.name == "num_threads" else parameter.default)


def test_dask_is_imported_by_who_asks_for_it_alone(run_script):
    run_script(
        """
        import sys
        import ascend_grad
        assert not {"dask", "zarr", "xarray"} & set(sys.modules)
        import ascend_grad.dask
        assert ascend_grad.dask.softmax.__module__ == "ascend_grad.dask.rowwise"
        """
    )


@pytest.mark.parametrize("operator", UNMASKED)
def test_xarray_calls_the_functions_for_numpys_arrays_on_blocks(operator):
    problem = random_problem(operator, (3, 4, 5), np.float32, axis=1)
    names = ("x", "y", "z")
    arrays = [xarray.DataArray(da.from_array(array, chunks=(1, 4, 2)), dims=names) for array in problem.arrays]
    result = xarray.apply_ufunc(
        getattr(ag, operator),
        *arrays,
        input_core_dims=[["y"]] * len(arrays),
        output_core_dims=[["y"]],
        kwargs={"num_threads": 1},
        dask="parallelized",
        output_dtypes=[np.float32],
    )
    assert result.chunks == ((1, 1, 1), (2, 2, 1), (4,))
    expected = getattr(ag, operator)(*problem.arrays, axis=1)
    assert result.transpose(*names).values.tobytes() == expected.tobytes()


def test_an_array_of_xarrays_that_is_not_computed_is_refused():
    with pytest.raises(ag.ParamTypeError, match=r"dask has not computed it yet; use xarray\.apply_ufunc"):
        ag.softmax(xarray.DataArray(da.zeros(3)))
