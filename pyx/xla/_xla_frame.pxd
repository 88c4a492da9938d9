# Cython's declarations of XLA's interface, and declarations that the functions for XLA share.

from libc.stdint cimport int64_t, uint32_t

from ascend_grad._views cimport View

cdef extern from "ascend_grad/xla/ffi.h" nogil:
    enum:
        AG_XLA_MAJOR
        AG_XLA_MINOR

    ctypedef struct ag_xla_error:
        pass

    ctypedef enum ag_xla_code:
        AG_XLA_INVALID_ARGUMENT
        AG_XLA_RESOURCE_EXHAUSTED

    ctypedef enum ag_xla_dtype:
        AG_XLA_PRED
        AG_XLA_S32
        AG_XLA_S64
        AG_XLA_F16
        AG_XLA_F32
        AG_XLA_F64
        AG_XLA_BF16

    ctypedef enum ag_xla_extension_type:
        AG_XLA_METADATA

    ctypedef enum ag_xla_value_type:
        AG_XLA_BUFFER

    ctypedef enum ag_xla_attr:
        AG_XLA_SCALAR
        AG_XLA_STRING

    ctypedef struct ag_xla_extension:
        ag_xla_extension_type type
        ag_xla_extension *next

    ctypedef struct ag_xla_version:
        int major
        int minor

    ctypedef struct ag_xla_metadata:
        ag_xla_version version
        uint32_t traits

    ctypedef struct ag_xla_metadata_extension:
        ag_xla_metadata *metadata

    ctypedef struct ag_xla_error_args:
        size_t struct_size
        ag_xla_extension *extensions
        const char *message
        ag_xla_code code

    ctypedef struct ag_xla_api:
        ag_xla_error *(*create_error)(ag_xla_error_args *args) noexcept nogil

    ctypedef struct ag_xla_buffer:
        ag_xla_dtype dtype
        void *data
        int64_t rank
        const int64_t *dims

    ctypedef struct ag_xla_values:
        int64_t size
        const ag_xla_value_type *types
        void **values

    ctypedef struct ag_xla_span:
        const char *data
        size_t length

    ctypedef struct ag_xla_scalar:
        ag_xla_dtype dtype
        const void *value

    ctypedef struct ag_xla_attrs:
        int64_t size
        const ag_xla_attr *types
        const ag_xla_span **names
        void **values

    ctypedef struct ag_xla_call_frame:
        ag_xla_extension *extensions
        const ag_xla_api *api
        ag_xla_values args
        ag_xla_values results
        ag_xla_attrs attrs

cdef enum:
    # Numbers of dtypes that ag_dtype lacks: bool, integers, and all dtypes that no operator takes.
    BOOL = -1
    OTHER = -2
    INT32 = -3
    INT64 = -4
    MAX_RANK = 8                      # most dimensions of a buffer that is viewed


ctypedef struct BufferView:
    # A buffer as a view, with its shape and strides. It must not be copied, as the view points into it.
    View view
    Py_ssize_t[MAX_RANK] shape
    Py_ssize_t[MAX_RANK] strides


cdef const char *SIGNATURE
cdef const char *SHAPES
cdef const char *MEMORY

cdef int dtype_of(const ag_xla_buffer *buffer) noexcept nogil
cdef const ag_xla_buffer *buffer_of(const ag_xla_values *values, int64_t i) noexcept nogil
cdef bint describe_buffer(BufferView *to, const ag_xla_buffer *buffer) noexcept nogil
cdef void advise_results(const ag_xla_call_frame *frame) noexcept nogil
cdef bint is_text(const ag_xla_span *span, const char *text) noexcept nogil
cdef const ag_xla_span *text(const ag_xla_attrs *attrs, const char *name) noexcept nogil
cdef const int64_t *integer(const ag_xla_attrs *attrs, const char *name) noexcept nogil
cdef const double *real(const ag_xla_attrs *attrs, const char *name) noexcept nogil
cdef ag_xla_error *failed(const ag_xla_call_frame *frame, ag_xla_code code, const char *message) noexcept nogil
cdef bint is_question(ag_xla_call_frame *frame) noexcept nogil
