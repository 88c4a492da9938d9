cimport numpy as cnp

from ascend_grad._loss_options cimport LossOptions

cdef object option(object source, str name)
cdef const double *vector_of(object value, list held, bint with_values) except? NULL
cdef double one_number(object value) except? -1
cdef void *data_of(cnp.ndarray array) noexcept
cdef cnp.ndarray ids_from_zero(cnp.ndarray target, object start, object ignored)
cdef Py_ssize_t bytes_of_ids_from_zero(cnp.ndarray target) noexcept
cdef list set_options(LossOptions *o, cnp.ndarray target, object source, bint with_values)
cdef void set_results(LossOptions *o, list results)
