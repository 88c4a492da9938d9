"""An estimator for scikit-learn.

>>> import numpy as np
>>> from ascend_grad.sklearn import SoftmaxRegression
>>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "a", "b", "b"])
>>> SoftmaxRegression().fit(X, y).predict([[0.5], [2.5]])
array(['a', 'b'], dtype='<U1')
"""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    from scipy.optimize import minimize
    from sklearn.base import BaseEstimator, ClassifierMixin, _fit_context
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import Tags
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.optimize import _check_optimize_result
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"ascend_grad.sklearn needs scikit-learn (pip install scikit-learn): {error}", name="sklearn"
    ) from error

from .objectives import scipy_multinomial
from .operators.functions import log_softmax, softmax

__all__ = ["SoftmaxRegression"]

#: Settings of L-BFGS as in scikit-learn's LogisticRegression, so that both stop at the same step.
_LINE_SEARCH_STEPS = 50
_LOSS_TOLERANCE = 64 * np.finfo(float).eps
#: The status of a trust-region fit that ends as rounding hides the improvement which it predicts.
_NO_IMPROVEMENT = 2
#: The least norm of a gradient from which the trust-region method takes a step.
_LEAST_TOLERANCE = np.finfo(float).tiny


class SoftmaxRegression(ClassifierMixin, BaseEstimator):
    """Fit a logistic regression with an L2 penalty, binary or multinomial, by L-BFGS or a Newton method.

    The estimator has the objective, the parameters and the coefficients of scikit-learn's ``LogisticRegression`` with
    the solver ``"lbfgs"``::

        SoftmaxRegression(C=0.1).fit(X, y).predict_proba(X)

    Parameters
    ----------
    C : float, default 1.0
        The inverse of the penalty's strength; ``np.inf``: no penalty. Intercepts have no penalty. The objective is that
        of `scipy_multinomial` with ``l2 = 1 / (C * n_samples)``; with weights, `n_samples` is their sum.
    solver : {"lbfgs", "trust-ncg"}, default "lbfgs"
        The method of `scipy.optimize.minimize`. "trust-ncg" is a trust-region Newton method with products of the
        Hessian and vectors. It needs few iterations, each with several passes over the samples.
    tol : float, default 1e-4
        The fit ends when no element of the gradient of the objective, or with "trust-ncg" its norm, is larger. It also
        ends when the objective improves by rounding errors only. For float32 data, rounding keeps the gradient from
        falling below about 1e-6.
    fit_intercept : bool, default True
        Whether each class has an intercept.
    class_weight : dict or "balanced", optional
        Factors of the samples of each class. With "balanced" all classes have the same weight in sum.
    max_iter : int, default 100
        The largest number of iterations. With 0 the coefficients stay those that the fit starts from.
    warm_start : bool, default False
        Whether a fit starts from the coefficients of the previous fit.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
        The classes.
    coef_ : ndarray, shape (n_classes, n_features), or (1, n_features) of two classes
        The coefficients, in the dtype of the fitted data.
    intercept_ : ndarray, shape (n_classes,) or (1,)
        The intercepts.
    n_iter_ : ndarray, shape (1,)
        The number of iterations.
    n_features_in_ : int
        The number of features.
    feature_names_in_ : ndarray
        The names of the features, if all of them are text.

    Notes
    -----
    float32 data are fitted in float32, all others in float64. Sparse arrays of SciPy are fitted without a dense copy;
    formats other than CSR are converted. A fit uses the number of threads of `set_num_threads`.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad.sklearn import SoftmaxRegression
    >>> X = np.array([[0.0], [1.0], [4.0], [5.0], [8.0], [9.0]])
    >>> model = SoftmaxRegression().fit(X, [0, 0, 1, 1, 2, 2])
    >>> model.predict([[0.2], [4.4], [8.8]])
    array([0, 1, 2])
    >>> model.predict_proba([[4.4]]).argmax()
    np.int64(1)
    """

    _parameter_constraints: ClassVar[dict[str, list]] = {
        "C": [Interval(Real, 0, None, closed="right")],
        "solver": [StrOptions({"lbfgs", "trust-ncg"})],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "max_iter": [Interval(Integral, 0, None, closed="left")],
        "warm_start": ["boolean"],
    }

    def __init__(
        self,
        C: float = 1.0,
        *,
        solver: str = "lbfgs",
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: dict | str | None = None,
        max_iter: int = 100,
        warm_start: bool = False,
    ) -> None:
        self.C = C
        self.solver = solver
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.warm_start = warm_start

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SoftmaxRegression:
        """Fit the coefficients to samples.

        Parameters
        ----------
        X : array_like or sparse array, shape (n_samples, n_features)
            The features.
        y : array_like, shape (n_samples,)
            The class of each sample.
        sample_weight : array_like, shape (n_samples,), optional
            Factors of the samples.

        Returns
        -------
        SoftmaxRegression
            The estimator.
        """
        features, labels = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], order="C")
        check_classification_targets(labels)
        classes, target = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y: expected at least 2 classes, got one class: {classes[0]}")
        weight = self._sample_weight(features, labels, classes, target, sample_weight)
        total = len(target) if weight is None else float(weight.sum(dtype=np.float64))
        if not total > 0:
            raise ValueError(f"sample_weight: expected a sum above 0, times the weights of classes, got {total}")
        problem = scipy_multinomial(
            features,
            target,
            n_classes=len(classes),
            sample_weight=weight,
            l2=1 / (self.C * total),
            fit_intercept=self.fit_intercept,
            reference_class=len(classes) == 2,
        )
        solution, iterations = self._start(problem.x0, len(classes), features.shape[1]), 0
        if self.max_iter:
            solve = self._by_lbfgs if self.solver == "lbfgs" else self._by_trust_region
            solution, iterations = solve(problem, solution)
        else:  # SciPy's methods would take a first step
            message = f"{self.solver} failed to converge, as it took no iteration (max_iter=0)"
            warnings.warn(message, ConvergenceWarning, stacklevel=3)
        coef, intercept = problem.unpack(solution)
        first = int(len(classes) == 2)  # of two classes, the coefficients of the second
        self.classes_, self.n_iter_ = classes, np.array([iterations], np.int32)
        self.coef_, self.intercept_ = coef[first:], intercept[first:]
        return self

    def _by_lbfgs(self, problem: scipy_multinomial, start: NDArray) -> tuple[NDArray, int]:
        """Return the solution and the number of iterations."""
        options = {
            "maxiter": self.max_iter,
            "maxls": _LINE_SEARCH_STEPS,
            "gtol": self.tol,
            "ftol": _LOSS_TOLERANCE,
        }
        fit = minimize(problem.fun, start, jac=problem.jac, method="L-BFGS-B", options=options)
        return fit.x, _check_optimize_result("lbfgs", fit, self.max_iter)

    def _by_trust_region(self, problem: scipy_multinomial, start: NDArray) -> tuple[NDArray, int]:
        """Return the solution and the number of iterations."""
        # A gradient of 0 ends the fit, also with a tolerance of 0, as it gives no direction for a step.
        options = {"maxiter": self.max_iter, "gtol": max(self.tol, _LEAST_TOLERANCE)}
        fit = minimize(problem.fun, start, jac=problem.jac, hessp=problem.hessp, method="trust-ncg", options=options)
        if not fit.success and fit.status != _NO_IMPROVEMENT:
            message = f"trust-ncg failed to converge after {fit.nit} iteration(s): {fit.message}"
            warnings.warn(f"{message} (max_iter={self.max_iter}, tol={self.tol})", ConvergenceWarning, stacklevel=4)
        classes = len(problem.unpack(start)[1])
        if self.fit_intercept and classes > 2:
            # A number that is added to all intercepts changes no probability. Steps along it are rounding errors.
            fit.x[-classes:] -= fit.x[-classes:].mean() - start[-classes:].mean()
        return fit.x, fit.nit

    def _sample_weight(
        self, X: NDArray, y: NDArray, classes: NDArray, target: NDArray, sample_weight: Any
    ) -> NDArray | None:
        """Return the product of the weights of samples and classes."""
        if sample_weight is None and self.class_weight is None:
            return None
        weight = _check_sample_weight(sample_weight, X, dtype=X.dtype)
        if self.class_weight is None:
            return weight
        of_classes = compute_class_weight(self.class_weight, classes=classes, y=y, sample_weight=weight)
        return weight * of_classes.astype(X.dtype)[target]

    def _start(self, zeros: NDArray, classes: int, features: int) -> NDArray:
        """Return the vector that the optimiser starts from."""
        if not self.warm_start or not hasattr(self, "coef_"):
            return zeros
        fitted = [self.coef_.ravel(), self.intercept_] if self.fit_intercept else [self.coef_.ravel()]
        start = np.concatenate(fitted, dtype=np.float64)
        if start.shape != zeros.shape or self.coef_.shape[1] != features:
            raise ValueError(
                f"warm_start: expected the classes and features of the previous fit, with coefficients of shape "
                f"{self.coef_.shape}, got {classes} classes and {features} features"
            )
        return start

    def decision_function(self, X: ArrayLike) -> NDArray:
        """Compute the score of each class.

        Parameters
        ----------
        X : array_like or sparse array, shape (n_samples, n_features)
            The features.

        Returns
        -------
        ndarray, shape (n_samples, n_classes), or (n_samples,) of two classes
            The logits, of two classes the logit of the second.
        """
        check_is_fitted(self)
        features = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        scores = features @ self.coef_.T
        scores += self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: ArrayLike) -> NDArray:
        """Return the most probable class of each sample.

        Parameters
        ----------
        X : array_like or sparse array, shape (n_samples, n_features)
            The features.

        Returns
        -------
        ndarray, shape (n_samples,)
            The classes.
        """
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)]

    def predict_proba(self, X: ArrayLike) -> NDArray:
        """Compute the probability of each class.

        Parameters
        ----------
        X : array_like or sparse array, shape (n_samples, n_features)
            The features.

        Returns
        -------
        ndarray, shape (n_samples, n_classes)
            The probabilities, in the order of `classes_`.
        """
        return softmax(self._logits(X))

    def predict_log_proba(self, X: ArrayLike) -> NDArray:
        """Compute the logarithm of the probability of each class.

        Parameters
        ----------
        X : array_like or sparse array, shape (n_samples, n_features)
            The features.

        Returns
        -------
        ndarray, shape (n_samples, n_classes)
            The logarithms, in the order of `classes_`.
        """
        return log_softmax(self._logits(X))

    def _logits(self, X: ArrayLike) -> NDArray:
        scores = self.decision_function(X)
        return scores if scores.ndim == 2 else np.column_stack([np.zeros_like(scores), scores])
