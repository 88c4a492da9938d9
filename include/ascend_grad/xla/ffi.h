/* The C interface by which XLA calls functions of other libraries (its FFI, version 0.1 and later minor ones): the
 * types and constants that this library uses.
 *
 * They are written from the public documentation of the interface, so that a build needs nothing of JAX or XLA.
 * Structures of XLA that this library does not read are opaque. Every structure begins with its size, by which either
 * side knows which members the other side has. */
#ifndef ASCEND_GRAD_XLA_FFI_H
#define ASCEND_GRAD_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { AG_XLA_MAJOR = 0, AG_XLA_MINOR = 1 }; /* version of the interface that this header declares */

typedef struct ag_xla_error ag_xla_error;     /* XLA_FFI_Error; NULL is success */
typedef struct ag_xla_context ag_xla_context; /* XLA_FFI_ExecutionContext */
typedef struct ag_xla_future ag_xla_future;   /* XLA_FFI_Future */

/* XLA_FFI_Error_Code */
typedef enum { AG_XLA_INVALID_ARGUMENT = 3, AG_XLA_RESOURCE_EXHAUSTED = 8 } ag_xla_code;

/* XLA_FFI_DataType */
typedef enum {
    AG_XLA_PRED = 1,
    AG_XLA_S32 = 4,
    AG_XLA_S64 = 5,
    AG_XLA_F16 = 10,
    AG_XLA_F32 = 11,
    AG_XLA_F64 = 12,
    AG_XLA_BF16 = 16,
} ag_xla_dtype;

typedef enum { AG_XLA_METADATA = 1 } ag_xla_extension_type;        /* XLA_FFI_Extension_Type */
typedef enum { AG_XLA_BUFFER = 1 } ag_xla_value_type;              /* XLA_FFI_ArgType, XLA_FFI_RetType */
typedef enum { AG_XLA_SCALAR = 3, AG_XLA_STRING = 4 } ag_xla_attr; /* XLA_FFI_AttrType */
typedef enum { AG_XLA_EXECUTE = 3 } ag_xla_stage;                  /* XLA_FFI_ExecutionStage */

typedef struct ag_xla_extension { /* XLA_FFI_Extension_Base */
    size_t struct_size;
    ag_xla_extension_type type;
    struct ag_xla_extension *next;
} ag_xla_extension;

typedef struct { /* XLA_FFI_Api_Version */
    size_t struct_size;
    ag_xla_extension *extensions;
    int major;
    int minor;
} ag_xla_version;

typedef struct { /* XLA_FFI_Metadata, up to the last member that is written */
    size_t struct_size;
    ag_xla_version version;
    uint32_t traits;
} ag_xla_metadata;

typedef struct { /* XLA_FFI_Metadata_Extension: by it XLA asks which version of the interface a function was made for */
    ag_xla_extension base;
    ag_xla_metadata *metadata;
} ag_xla_metadata_extension;

typedef struct { /* XLA_FFI_Error_Create_Args */
    size_t struct_size;
    ag_xla_extension *extensions;
    const char *message;
    ag_xla_code code;
} ag_xla_error_args;

typedef struct { /* XLA_FFI_Api, up to the last member that is called */
    size_t struct_size;
    ag_xla_extension *extensions;
    ag_xla_version version;
    const void *internal;
    ag_xla_error *(*create_error)(ag_xla_error_args *args);
} ag_xla_api;

typedef struct { /* XLA_FFI_Buffer: C-contiguous elements */
    size_t struct_size;
    ag_xla_extension *extensions;
    ag_xla_dtype dtype;
    void *data;
    int64_t rank;
    const int64_t *dims;
} ag_xla_buffer;

typedef struct { /* XLA_FFI_Args, XLA_FFI_Rets */
    size_t struct_size;
    ag_xla_extension *extensions;
    int64_t size;
    const ag_xla_value_type *types;
    void *const *values;
} ag_xla_values;

typedef struct { /* XLA_FFI_ByteSpan */
    const char *data;
    size_t length;
} ag_xla_span;

typedef struct { /* XLA_FFI_Scalar */
    ag_xla_dtype dtype;
    const void *value;
} ag_xla_scalar;

typedef struct { /* XLA_FFI_Attrs */
    size_t struct_size;
    ag_xla_extension *extensions;
    int64_t size;
    const ag_xla_attr *types;
    const ag_xla_span *const *names;
    void *const *values;
} ag_xla_attrs;

typedef struct { /* XLA_FFI_CallFrame */
    size_t struct_size;
    ag_xla_extension *extensions;
    const ag_xla_api *api;
    ag_xla_context *context;
    ag_xla_stage stage;
    ag_xla_values args;
    ag_xla_values results;
    ag_xla_attrs attrs;
    ag_xla_future *future;
} ag_xla_call_frame;

#endif
