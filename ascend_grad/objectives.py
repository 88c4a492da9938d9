"""Softmax objectives for other libraries: gradient boosting, and the optimisers of SciPy.

>>> import numpy as np
>>> from ascend_grad.objectives import xgboost_softmax
>>> grad, hess = xgboost_softmax(np.array([0, 2]), np.zeros((2, 4), np.float32))
>>> grad
array([[-0.75,  0.25,  0.25,  0.25],
       [ 0.25,  0.25, -0.75,  0.25]], dtype=float32)
>>> hess[0]
array([0.375, 0.375, 0.375, 0.375], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._dtypes import FLOATING_DTYPES
from .arguments import converted, integer, real_number, sparse_rows
from .arrays import native
from .errors import ParamInvalidError, ParamTypeError
from .operators.losses import cross_entropy, linear_cross_entropy
from .operators.second_order import linear_cross_entropy_hvp
from .sparse_arrays import is_sparse

__all__ = ["lightgbm_softmax", "scipy_multinomial", "xgboost_softmax"]

#: The least second derivative that XGBoost passes to its trees.
_XGBOOST_MIN_HESSIAN = 1e-16
#: The `ignore_index` of calls that ignore no target, since labels are at least 0.
_NO_LABEL = -1


def xgboost_softmax(y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None) -> tuple[NDArray, NDArray]:
    """Compute gradient and Hessian diagonal of the objective ``multi:softprob`` of XGBoost.

    Pass the function as the objective, or call it::

        grad, hess = xgboost_softmax(y_true, y_pred)
        xgboost.XGBClassifier(objective=xgboost_softmax, num_class=4)
        xgboost.train({"num_class": 4}, data, obj=xgboost_softmax)

    Parameters
    ----------
    y_true : array_like, shape (n_samples,)
        The classes, integers of at least 0. `xgboost.train` passes the scores here instead.
    y_pred : array_like, shape (n_samples, n_classes)
        The scores before the softmax. `xgboost.train` passes its DMatrix here, which has classes and weights.
    sample_weight : array_like, shape (n_samples,), optional
        Factors of the rows' gradients and second derivatives.

    Returns
    -------
    grad, hess : ndarray, shape (n_samples, n_classes)
        With the probabilities :math:`p` of a row of weight :math:`r` they are :math:`r (p_v - [v = y])` and
        :math:`\\max(2 r p_v (1 - p_v), 10^{-16})`, in the dtype of the scores.

    Notes
    -----
    XGBoost starts its own objective from the shares of the classes, but a custom objective from equal scores. To
    compare them, pass the same ``base_score``. Predictions of a model with a custom objective are scores.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad.objectives import xgboost_softmax
    >>> grad, hess = xgboost_softmax(np.array([1]), np.zeros((1, 2)), sample_weight=np.array([2.0]))
    >>> grad, hess
    (array([[ 1., -1.]]), array([[1., 1.]]))
    """
    scores, labels, weight = _training_data("xgboost_softmax", y_true, y_pred, "sample_weight", sample_weight)
    grad, hess = _derivatives(scores, labels, weight)
    with np.errstate(all="ignore"):
        hess *= 2
        return grad, np.maximum(hess, _XGBOOST_MIN_HESSIAN, out=hess)


def lightgbm_softmax(y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> tuple[NDArray, NDArray]:
    """Compute gradient and Hessian diagonal of the objective ``multiclass`` of LightGBM.

    Pass the function as the objective, or call it::

        grad, hess = lightgbm_softmax(y_true, y_pred)
        lightgbm.LGBMClassifier(objective=lightgbm_softmax)
        lightgbm.train({"objective": lightgbm_softmax, "num_class": 4}, data)

    Parameters
    ----------
    y_true : array_like, shape (n_samples,)
        The classes, integers of at least 0. `lightgbm.train` passes the scores here instead.
    y_pred : array_like, shape (n_samples, n_classes)
        The scores before the softmax, in C or Fortran order. `lightgbm.train` passes its Dataset here, which has
        classes and weights.
    weight : array_like, shape (n_samples,), optional
        Factors of the rows' gradients and second derivatives.

    Returns
    -------
    grad, hess : ndarray of float32, shape (n_samples, n_classes)
        With the probabilities :math:`p` of a row of weight :math:`r` and :math:`K` classes they are
        :math:`r (p_v - [v = y])` and :math:`r p_v (1 - p_v) K / (K - 1)`, computed in the dtype of the scores, at least
        in float32, and then rounded. They are in Fortran order, which LightGBM takes without a copy.

    Notes
    -----
    LightGBM starts its own objective from the shares of the classes (``boost_from_average``), but a custom objective
    from scores of 0. To start from the shares, pass their logarithms as ``init_score``.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad.objectives import lightgbm_softmax
    >>> grad, hess = lightgbm_softmax(np.array([1]), np.zeros((1, 2)))
    >>> grad, hess
    (array([[ 0.5, -0.5]], dtype=float32), array([[0.5, 0.5]], dtype=float32))
    """
    scores, labels, weight = _training_data("lightgbm_softmax", y_true, y_pred, "weight", weight)
    if scores.dtype.itemsize == 2:
        scores = scores.astype(np.float32)  # the results' dtype, whose range weights may need
    exact_grad, exact_hess = _derivatives(scores, labels, weight)
    classes = scores.shape[1]
    grad = np.empty(scores.shape, np.float32, order="F")
    hess = np.empty_like(grad)
    with np.errstate(all="ignore"):  # results that float32 cannot hold are rounded
        grad[...] = exact_grad
        np.multiply(exact_hess, classes / (classes - 1), out=hess, casting="same_kind")
    return grad, hess


def _derivatives(scores: NDArray, labels: NDArray, weight: NDArray | None) -> tuple[NDArray, NDArray]:
    """Return the gradient of the sum of the losses, and the diagonal of its Hessian."""
    result = cross_entropy(
        scores, labels, reduction="sum", token_weight=weight, ignore_index=_NO_LABEL, outputs=("hessian_diag",)
    )
    return result.input_grad, result.hessian_diag


def _training_data(
    function: str, y_true: Any, y_pred: Any, name_of_weight: str, weight: Any
) -> tuple[NDArray, NDArray, NDArray | None]:
    """Return scores, classes and weights, whether they come as arrays or as scores and a data set of the booster."""
    if hasattr(y_pred, "get_label"):
        y_true, y_pred, weight = y_pred.get_label(), y_true, y_pred.get_weight()
        weight = None if weight is None or not len(weight) else weight  # XGBoost's data sets without weights
    scores = converted(y_pred, "y_pred", function)
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ParamInvalidError(
            f"y_pred: expected scores of shape (n_samples, n_classes) with at least 2 classes (num_class), got shape "
            f"{scores.shape}",
            operator=function,
        )
    labels = _labels(function, "y_true", y_true, len(scores), scores.shape[1], "biuf")  # boosters pass float32
    return scores, labels, _row_weights(function, name_of_weight, weight, len(scores))


def _labels(function: str, name: str, values: Any, rows: int, classes: int | None, kinds: str = "iu") -> NDArray:
    """Return the class of each row as an integer. `kinds` are the kinds of dtypes that are accepted."""
    labels = converted(values, name, function)
    expected = f"integer classes of at least 0, shape ({rows},)"
    if labels.dtype.kind not in kinds:
        raise ParamTypeError(f"{name}: expected {expected}, got {labels.dtype}", operator=function)
    if labels.shape != (rows,):
        raise ParamInvalidError(f"{name}: expected {expected}, got shape {labels.shape}", operator=function)
    end = 2**62 if classes is None else classes
    is_class = (labels >= 0) & (labels < end)
    if labels.dtype.kind == "f":
        is_class &= labels == np.floor(labels)
    if not is_class.all():
        wrong = labels[is_class.argmin()]
        expected = "integer classes of at least 0" if classes is None else f"integer classes in [0, {classes})"
        raise ParamInvalidError(f"{name}: expected {expected}, got {wrong}", operator=function)
    return labels if labels.dtype.kind in "iu" else labels.astype(np.int64)


def _row_weights(function: str, name: str, values: Any, rows: int) -> NDArray | None:
    """Return the weight of each row, or None. Integers become float64."""
    if values is None:
        return None
    weights = converted(values, name, function)
    if weights.dtype.kind not in "biu" and native(weights.dtype) not in FLOATING_DTYPES:
        raise ParamTypeError(f"{name}: expected real numbers, got {weights.dtype}", operator=function)
    if weights.shape != (rows,):
        message = f"{name}: expected shape ({rows},), one for each row, got {weights.shape}"
        raise ParamInvalidError(message, operator=function)
    return weights.astype(np.float64) if weights.dtype.kind in "biu" else weights


class scipy_multinomial:
    """Compute the objective of a multinomial logistic regression for `scipy.optimize.minimize`.

    The objective is the mean cross-entropy of the rows, plus half of `l2` times the sum of the squared coefficients::

        problem = scipy_multinomial(X, y, l2=1e-3)
        fit = scipy.optimize.minimize(problem.fun, problem.x0, jac=problem.jac, method="L-BFGS-B")
        coef, intercept = problem.unpack(fit.x)

    Methods with second derivatives, such as ``"trust-ncg"`` and ``"Newton-CG"``, also take ``hessp=problem.hessp``.

    Parameters
    ----------
    X : array_like or sparse array of SciPy, shape (n_samples, n_features)
        The features, float32 or float64. Other numbers become float64. A sparse array has the format CSR.
    y : array_like of int, shape (n_samples,)
        The classes, integers of at least 0.
    n_classes : int, optional
        The number of classes; default: the largest class plus 1.
    sample_weight : array_like, shape (n_samples,), optional
        Factors of the rows' losses, by whose sum the mean divides.
    l2 : float, default 0.0
        The factor of the penalty, which leaves out the intercepts. scikit-learn's `C` corresponds to
        ``l2 = 1 / (C * n_samples)``; with weights, `n_samples` is their sum.
    fit_intercept : bool, default True
        Whether each class has an intercept.
    reference_class : bool, default False
        Whether the coefficients and the intercept of class 0 are fixed at 0, as in statsmodels' ``MNLogit``. They are
        not in the optimiser's vector; `unpack` returns them as zeros.
    num_threads : int, optional
        Number of threads, as in `linear_cross_entropy`.

    Attributes
    ----------
    x0 : ndarray of float64
        The coefficients and intercepts to start from, all 0.

    Notes
    -----
    The vector of the optimiser has the coefficients of one class after another, then the intercepts. The first call of
    `fun` or `jac` at a vector computes both results in one pass over the rows; the other one then returns its result
    without a pass. The losses of float32 rows are added up in float64, so that L-BFGS can tell apart losses that differ
    little.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad.objectives import scipy_multinomial
    >>> problem = scipy_multinomial(np.array([[0.0], [1.0], [2.0]]), np.array([0, 1, 1]))
    >>> round(problem.fun(problem.x0), 3)
    0.693
    >>> problem.jac(problem.x0).round(3)
    array([ 0.5  , -0.5  ,  0.167, -0.167])
    >>> problem.hessp(problem.x0, np.array([1.0, 0.0, 0.0, 0.0])).round(3)
    array([ 0.417, -0.417,  0.25 , -0.25 ])
    """

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        n_classes: int | None = None,
        sample_weight: ArrayLike | None = None,
        l2: float = 0.0,
        fit_intercept: bool = True,
        reference_class: bool = False,
        num_threads: int | None = None,
    ) -> None:
        name = type(self).__name__
        features = X if is_sparse(X) else converted(X, "X", name)
        if features.ndim != 2 or features.dtype.kind not in "fiub":
            raise ParamInvalidError(
                f"X: expected numbers of shape (n_samples, n_features), got {features.dtype} of shape {features.shape}",
                operator=name,
            )
        rows = features.shape[0]
        classes = None if n_classes is None else integer(n_classes, "n_classes", name)
        if classes is not None and classes < 1:
            raise ParamInvalidError(f"n_classes: expected an int of at least 1, got {classes}", operator=name)
        self._target = _labels(name, "y", y, rows, classes)
        if not rows:
            raise ParamInvalidError(f"y: expected at least one class, got shape {self._target.shape}", operator=name)
        if classes is None:
            classes = int(self._target.max()) + 1
        is_taken = features.dtype.newbyteorder("=") in (np.float32, np.float64)
        self._features = features if is_taken else features.astype(np.float64)
        if is_sparse(X):
            sparse_rows(self._features, "X", name)  # checks the format
        self._row_weight = _row_weights(name, "sample_weight", sample_weight, rows)
        self._total = float(rows if self._row_weight is None else self._row_weight.sum(dtype=np.float64))
        if not 0 < self._total < np.inf:
            message = f"sample_weight: expected a finite sum above 0, got {self._total}"
            raise ParamInvalidError(message, operator=name)
        self._l2 = real_number(l2, "l2", name)
        if not 0 <= self._l2 < np.inf:
            raise ParamInvalidError(f"l2: expected a finite number of at least 0, got {self._l2}", operator=name)
        self._fitted_from = int(reference_class)  # the first class with coefficients
        self._shape = classes, features.shape[1]
        self._fit_intercept, self._num_threads = fit_intercept, num_threads
        self.x0 = np.zeros((classes - self._fitted_from) * (features.shape[1] + fit_intercept))
        self._known: tuple[NDArray, float, NDArray] | None = None

    def fun(self, w: NDArray) -> float:
        """Return the objective.

        Parameters
        ----------
        w : ndarray, shape of `x0`
            The coefficients and intercepts.

        Returns
        -------
        float
            The mean loss and the penalty.
        """
        return self._computed(w)[1]

    def jac(self, w: NDArray) -> NDArray:
        """Return the gradient of the objective.

        Parameters
        ----------
        w : ndarray, shape of `x0`
            The coefficients and intercepts.

        Returns
        -------
        ndarray of float64, shape of `x0`
            The gradient.
        """
        return self._computed(w)[2].copy()

    def hessp(self, w: NDArray, p: NDArray) -> NDArray:
        """Return the product of the Hessian of the objective and a vector.

        Parameters
        ----------
        w : ndarray, shape of `x0`
            The coefficients and intercepts.
        p : ndarray, shape of `x0`
            The vector.

        Returns
        -------
        ndarray of float64, shape of `x0`
            The product.
        """
        # The product is linear in the vector. A power of two keeps a long or short vector in the range of float32.
        p = self._checked(p, "p")
        largest = np.max(np.abs(p), initial=0.0)
        scale = np.ldexp(1.0, int(np.frexp(largest)[1]) - 1) if 0 < largest < np.inf else 1.0
        (coef, intercept), (vector, vector_bias) = self.unpack(w), self.unpack(p / scale)
        product = linear_cross_entropy_hvp(
            self._features,
            coef,
            self._target,
            vector,
            bias=intercept if self._fit_intercept else None,
            vector_bias=vector_bias if self._fit_intercept else None,
            token_weight=self._row_weight,
            reduction="sum",
            num_threads=self._num_threads,
        )
        return self._with_penalty(product.weight_product, product.bias_product, p, scale)

    def unpack(self, w: NDArray) -> tuple[NDArray, NDArray]:
        """Return the coefficients and the intercepts of all classes.

        Parameters
        ----------
        w : ndarray, shape of `x0`
            The coefficients and intercepts, such as ``fit.x``.

        Returns
        -------
        coef : ndarray, shape (n_classes, n_features)
            The coefficients, in the dtype of `X`.
        intercept : ndarray, shape (n_classes,)
            The intercepts, 0 without `fit_intercept`.
        """
        classes, features = self._shape
        first, w = self._fitted_from, self._checked(w, "w")
        count = (classes - first) * features
        coef, intercept = np.zeros(self._shape, self._features.dtype), np.zeros(classes, self._features.dtype)
        coef[first:] = w[:count].reshape(classes - first, features)
        if self._fit_intercept:
            intercept[first:] = w[count:]
        return coef, intercept

    def _checked(self, values: Any, name: str) -> NDArray:
        """Return a vector of the optimiser."""
        vector = np.asarray(values)
        if vector.shape != self.x0.shape:
            message = f"{name}: expected shape {self.x0.shape}, got {vector.shape}"
            raise ParamInvalidError(message, operator=type(self).__name__)
        return vector

    def _computed(self, w: NDArray) -> tuple[NDArray, float, NDArray]:
        """Return a copy of the vector with its objective and gradient."""
        known = self._known
        if known is None or not np.array_equal(known[0], w):
            self._known = known = np.array(w, np.float64), *self._compute(w)
        return known

    def _compute(self, w: NDArray) -> tuple[float, NDArray]:
        coef, intercept = self.unpack(w)
        result = linear_cross_entropy(
            self._features,
            coef,
            self._target,
            bias=intercept if self._fit_intercept else None,
            token_weight=self._row_weight,
            reduction="none",  # the losses of rows are added up in float64
            output_mask=(False, True),
            num_threads=self._num_threads,
        )
        gradient = self._with_penalty(result.weight_grad, getattr(result, "bias_grad", None), w)
        penalized = np.asarray(w)[: coef[self._fitted_from :].size]
        penalty = self._l2 * float(penalized @ penalized) / 2
        return float(result.loss.sum(dtype=np.float64)) / self._total + penalty, gradient

    def _with_penalty(self, of_coef: NDArray, of_intercept: NDArray | None, w: NDArray, scale: float = 1.0) -> NDArray:
        """Return a vector of sums over the rows, times `scale` and divided for the mean, plus the penalty's of `w`."""
        of_coef = of_coef[self._fitted_from :].ravel()
        result = np.empty(self.x0.shape)
        result[: of_coef.size] = of_coef
        if of_intercept is not None:
            result[of_coef.size :] = of_intercept[self._fitted_from :]
        result *= scale
        result /= self._total
        result[: of_coef.size] += self._l2 * np.asarray(w)[: of_coef.size]
        return result
