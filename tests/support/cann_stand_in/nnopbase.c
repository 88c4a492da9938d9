/* Test double of libnnopbase.so. See stand_in.h. */
#include "stand_in.h"

void *aclCreateTensor(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage_dims, uint64_t storage_rank, void *data);
int aclDestroyTensor(const void *tensor);
int aclSetAclOpExecutorRepeatable(void *executor);
int aclDestroyAclOpExecutor(void *executor);

void *aclCreateTensor(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage_dims, uint64_t storage_rank, void *data)
{
    void *handle = NULL;
    if (si_enter("aclCreateTensor") == OK)
        si_tensor_new(dims, rank, dtype, strides, offset, format, storage_dims, storage_rank, data, &handle);
    si_leave(OK);
    return handle;
}

int aclDestroyTensor(const void *tensor)
{
    int fault = si_enter("aclDestroyTensor"), code = si_tensor_destroy(tensor);
    return si_leave(fault ? fault : code);
}

int aclSetAclOpExecutorRepeatable(void *executor)
{
    int code = si_enter("aclSetAclOpExecutorRepeatable");
    return si_leave(code ? code : si_executor_repeat(executor));
}

int aclDestroyAclOpExecutor(void *executor)
{
    int fault = si_enter("aclDestroyAclOpExecutor"), code = si_executor_destroy(executor);
    return si_leave(fault ? fault : code);
}
