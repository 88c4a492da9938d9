/* The C interface of the Ascend runtime and operator libraries: the types and constants that this library uses.
 *
 * They are written from the public documentation of the interface, so that a build needs nothing of the device's
 * toolkit. Handles are opaque, because the objects behind them differ between releases. */
#ifndef ASCEND_GRAD_ACL_TYPES_H
#define ASCEND_GRAD_ACL_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int ag_acl_error;        /* aclError: a call of the runtime; 0 is success */
typedef int32_t ag_aclnn_status; /* aclnnStatus: a call of the operator library; 0 is success */

typedef void *ag_acl_stream;     /* aclrtStream */
typedef void *ag_acl_context;    /* aclrtContext */
typedef struct ag_acl_tensor ag_acl_tensor;     /* aclTensor */
typedef struct ag_acl_executor ag_acl_executor; /* aclOpExecutor */
typedef struct ag_acl_scalar ag_acl_scalar;     /* aclScalar */
typedef struct ag_acl_integers ag_acl_integers; /* aclIntArray */

enum { AG_ACL_SUCCESS = 0 }; /* the other codes are in `errors.STATUS_NAMES` */

/* aclDataType */
enum {
    AG_ACL_FLOAT = 0,
    AG_ACL_FLOAT16 = 1,
    AG_ACL_INT32 = 3,
    AG_ACL_UINT8 = 4,
    AG_ACL_INT64 = 9,
    AG_ACL_BOOL = 12,
    AG_ACL_BF16 = 27,
};

enum { AG_ACL_FORMAT_ND = 2 };                                                     /* aclFormat */
enum { AG_ACL_HOST_TO_DEVICE = 1, AG_ACL_DEVICE_TO_HOST = 2, AG_ACL_DEVICE_TO_DEVICE = 3 }; /* aclrtMemcpyKind */
enum { AG_ACL_HUGE_FIRST = 0 };                                                    /* aclrtMemMallocPolicy */
enum { AG_ACL_DETERMINISTIC = 0 };                                                 /* aclSysParamOpt */

#endif
