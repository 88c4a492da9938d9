/* Test double of the Ascend runtime: tensors, executors and the two phases of an operator. See stand_in.h. */
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct executor {
    struct operation op;
    bool repeatable, launched;
};

/* --- tensors ------------------------------------------------------------------------------------------------------ */

int si_tensor_new(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
                  const int64_t *storage_dims, uint64_t storage_rank, void *data, void **handle)
{
    if (rank > MAX_RANK || (rank && !dims) || storage_rank > MAX_RANK || (storage_rank && !storage_dims))
        return si_misuse(NN_INVALID, "rank %llu, storage of rank %llu", (unsigned long long)rank,
                         (unsigned long long)storage_rank);
    if (!si_size(dtype))
        return si_misuse(NN_INVALID, "data type %d", dtype);
    /* All of these are strided; torch_npu names its tensors of three to five dimensions so. */
    if (format != FORMAT_ND && format != FORMAT_NCHW && format != FORMAT_NHWC && format != FORMAT_NCDHW &&
        format != FORMAT_NCL)
        return si_misuse(NN_INVALID, "format %d", format);
    struct tensor t = {.present = true, .dtype = dtype, .rank = (int)rank, .offset = offset, .data = data};
    int64_t stored = 1, elements = 1, last = offset;
    for (uint64_t i = 0; i < storage_rank; i++) {
        if (storage_dims[i] < 0)
            return si_misuse(NN_INVALID, "storage dimension %lld", (long long)storage_dims[i]);
        stored *= storage_dims[i];
    }
    for (int i = t.rank - 1; i >= 0; i--) {
        t.dims[i] = dims[i];
        t.strides[i] = strides ? strides[i] : elements;
        if (t.dims[i] < 0 || t.strides[i] < 0)
            return si_misuse(NN_INVALID, "dimension %lld with stride %lld", (long long)t.dims[i], (long long)t.strides[i]);
        elements *= t.dims[i];
        last += (t.dims[i] - 1) * t.strides[i];
    }
    if (offset < 0)
        return si_misuse(NN_INVALID, "offset %lld", (long long)offset);
    if (elements && last >= stored)
        return si_misuse(NN_INVALID, "the view ends at element %lld of a storage of %lld", (long long)last,
                         (long long)stored);
    t.storage_bytes = (uint64_t)stored * si_size(dtype);
    int device;
    if (data && si_place(data, t.storage_bytes, &device) != PLACE_DEVICE)
        return si_misuse(NN_INVALID, "%llu bytes at %p are not within one allocation on a device",
                         (unsigned long long)t.storage_bytes, data);
    if ((uintptr_t)data % 64)
        return si_misuse(NN_INVALID, "%p is not a multiple of 64", data);
    struct tensor *object = si_allocate(1, sizeof *object);
    *object = t;
    *handle = si_handle_new(KIND_TENSOR, object);
    object->handle = *handle;
    return OK;
}

int si_tensor_destroy(const void *handle)
{
    struct tensor *t = si_handle_get(handle, KIND_TENSOR);
    if (!handle)
        return OK;
    if (!t)
        return si_misuse(NN_INVALID, "not a tensor: %s", si_handle_state(handle, KIND_TENSOR));
    si_handle_drop(handle);
    free(t);
    return OK;
}

void si_tensor_shorten(const struct tensor *t, int dim, int64_t length)
{
    struct tensor *object = si_handle_get(t->handle, KIND_TENSOR);
    if (object)
        object->dims[dim] = length;
}

int64_t si_numel(const struct tensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->rank; i++)
        count *= t->dims[i];
    return count;
}

bool si_contiguous(const struct tensor *t)
{
    int64_t expected = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (t->dims[i] != 1 && t->strides[i] != expected)
            return false;
        expected *= t->dims[i];
    }
    return true;
}

bool si_has_shape(const struct tensor *t, int rank, const int64_t *dims)
{
    return t->rank == rank && memcmp(t->dims, dims, (size_t)rank * sizeof *dims) == 0;
}

int si_check_dim(struct operation *op)
{
    int64_t rank = op->t[0].rank ? op->t[0].rank : 1;
    if (op->dim < -rank || op->dim >= rank)
        return si_fail(NN_INVALID, "dim %lld with rank %lld", (long long)op->dim, (long long)rank);
    op->dim += op->dim < 0 ? rank : 0;
    return OK;
}

bool si_same_shape(const struct tensor *a, const struct tensor *b) { return si_has_shape(a, b->rank, b->dims); }

int si_need(const struct operation *op, int index, const char *name)
{
    return op->t[index].present ? OK : si_fail(NN_NULLPTR, "%s is null", name);
}

int si_need_first(const struct operation *op, int count)
{
    int code = OK;
    for (int i = 0; i < count && code == OK; i++)
        code = si_need(op, i, "a tensor");
    return code;
}

/* `allowed` are the names of types between spaces. BF16 exists on the newer chips only. */
int si_need_dtype(const struct operation *op, int index, const char *name, const char *allowed)
{
    const struct tensor *t = &op->t[index];
    char pattern[32], padded[128];
    if (!t->present)
        return OK;
    snprintf(pattern, sizeof pattern, " %s ", si_dtype_name(t->dtype));
    snprintf(padded, sizeof padded, " %s ", allowed);
    bool known = strstr(padded, pattern) && (t->dtype != BF16 || si_soc_in("910B 910_93 950"));
    return known ? OK : si_fail(NN_INVALID, "%s is %s, on %s it must be one of %s", name, si_dtype_name(t->dtype),
                                si_soc(), allowed);
}

int si_check_dtypes(const struct operation *op, const struct si_expectation *expected, int count)
{
    int code = OK;
    for (int i = 0; i < count && code == OK; i++)
        code = si_need_dtype(op, expected[i].index, expected[i].name, expected[i].types);
    return code;
}

int si_check_shapes(const struct operation *op, const struct si_expectation *expected, int count, int code)
{
    for (int i = 0; i < count; i++) {
        const struct tensor *t = &op->t[expected[i].index];
        bool right = !t->present || t->rank == expected[i].rank;
        for (int k = 0; t->present && right && k < t->rank; k++)
            right = expected[i].dims[k] < 0 || t->dims[k] == expected[i].dims[k];
        if (!right)
            return si_fail(code, "%s has a wrong shape, of rank %d and %lld elements", expected[i].name, t->rank,
                           (long long)si_numel(t));
    }
    return OK;
}

int si_check_equal_dtypes(const struct operation *op, int a, int b)
{
    bool right = !op->t[a].present || !op->t[b].present || op->t[a].dtype == op->t[b].dtype;
    return right ? OK : si_fail(NN_INVALID, "tensors %d and %d are %s and %s", a, b, si_dtype_name(op->t[a].dtype),
                                si_dtype_name(op->t[b].dtype));
}

/* --- executors ---------------------------------------------------------------------------------------------------- */

static void executor_drop(void *handle)
{
    free(si_handle_get(handle, KIND_EXECUTOR));
    si_handle_drop(handle);
}

int si_executor_repeat(void *handle)
{
    struct executor *executor = si_handle_get(handle, KIND_EXECUTOR);
    if (!executor)
        return si_misuse(handle ? NN_INVALID : NN_NULLPTR, "not an executor: %s", si_handle_state(handle, KIND_EXECUTOR));
    if (executor->launched)
        return si_misuse(NN_INVALID, "to be called right after the first phase");
    executor->repeatable = true;
    return OK;
}

int si_executor_destroy(void *handle)
{
    if (!handle)
        return si_fail(NN_NULLPTR, "NULL");
    if (!si_handle_get(handle, KIND_EXECUTOR))
        return si_misuse(NN_INVALID, "not an executor: %s", si_handle_state(handle, KIND_EXECUTOR));
    executor_drop(handle);
    return OK;
}

/* --- first phase -------------------------------------------------------------------------------------------------- */

int si_prepare(struct operation *op, const char *function, const void *const *tensors, uint64_t *workspace_size,
               void **executor)
{
    int code = si_enter(function);
    struct si_context *context;
    if (code)
        return code;
    if (!workspace_size || !executor)
        return si_misuse(NN_NULLPTR, "no place for the results");
    if (si_need_context(&context))
        return NN_RUNTIME;
    op->deterministic = context->options[0] >= 1;
    *si_statistic("batch_invariant_plans") += context->options[0] == 3;
    *si_statistic("deterministic_plans") += op->deterministic;
    for (int i = 0; i < op->count; i++) {
        const struct tensor *t = si_handle_get(tensors[i], KIND_TENSOR);
        if (tensors[i] && !t)
            return si_misuse(NN_INVALID, "argument tensor %d is %s", i, si_handle_state(tensors[i], KIND_TENSOR));
        if (t)
            op->t[i] = *t;
    }
    return OK;
}

int si_finish(struct operation *op, int code, uint64_t *workspace_size, void **executor)
{
    if (code == OK && (!workspace_size || !executor))
        code = si_misuse(NN_NULLPTR, "no place for the results");
    if (code == OK && !op->nothing_to_do)
        code = si_find_kernel(op);
    if (code) {
        if (executor)
            *executor = si_handle_garbage(); /* what is there after a failure is nothing to rely on */
        if (workspace_size)
            *workspace_size = ~(uint64_t)0;
        return si_leave(code);
    }
    struct executor *object = si_allocate(1, sizeof *object);
    op->workspace = op->nothing_to_do ? 0 : op->workspace;
    object->op = *op;
    *workspace_size = op->workspace;
    *executor = si_handle_new(KIND_EXECUTOR, object);
    return si_leave(OK);
}

/* --- second phase ------------------------------------------------------------------------------------------------- */

struct launch {
    struct operation op;
    void *workspace;
};

static void run(struct si_work *work)
{
    struct launch *launch = work->data;
    struct operation *op = &launch->op;
    char *workspace = launch->workspace ? si_alias(launch->workspace) : NULL;
    if (workspace)
        memset(workspace, 0xff, op->workspace); /* whoever keeps something there loses it */
    op->kernel(op, workspace);
}

static int check_workspace(const struct operation *op, void *workspace, uint64_t size, int device)
{
    int owner;
    if (size < op->workspace)
        return si_misuse(NN_INVALID, "a workspace of %llu bytes, %llu are needed", (unsigned long long)size,
                         (unsigned long long)op->workspace);
    if (si_place(workspace, size, &owner) != PLACE_DEVICE || owner != device)
        return si_misuse(NN_INVALID, "the workspace is not within one allocation on device %d", device);
    if ((uintptr_t)workspace % 64)
        return si_misuse(NN_INVALID, "the workspace is not at a multiple of 64");
    return OK;
}

/* Tensors of one call either start at the same address (in place) or keep the padding between them. */
static void check_padding(const struct operation *op, const void *workspace)
{
    for (int i = 0; i < op->count; i++) {
        const struct tensor *a = &op->t[i];
        if (!a->present || !a->storage_bytes)
            continue;
        uint64_t padded = (a->storage_bytes + 31) / 32 * 32 + 32;
        for (int j = 0; j < op->count; j++) {
            const struct tensor *b = &op->t[j];
            if (b->present && b->storage_bytes && b->data > a->data && b->data < a->data + padded)
                si_violation("tensor %d starts %lld bytes after tensor %d, which takes %llu with its padding", j,
                             (long long)(b->data - a->data), i, (unsigned long long)padded);
        }
        const char *start = workspace;
        if (op->workspace && a->data < start + op->workspace && start < a->data + padded)
            si_violation("the workspace overlaps tensor %d", i);
    }
}

static int check_tensors(const struct operation *op, int device)
{
    for (int i = 0; i < op->count; i++) {
        const struct tensor *t = &op->t[i];
        int owner;
        if (!t->present)
            continue;
        if (!si_handle_get(t->handle, KIND_TENSOR))
            return si_misuse(NN_INNER_NULLPTR, "tensor %d was destroyed before the second phase", i);
        if (t->storage_bytes && (si_place(t->data, t->storage_bytes, &owner) != PLACE_DEVICE || owner != device))
            return si_misuse(NN_INNER_NULLPTR, "the memory of tensor %d is not on device %d (or was freed)", i, device);
    }
    return OK;
}

static int launch(const struct operation *op, void *workspace, uint64_t size, void *stream_handle)
{
    struct si_stream *stream;
    int code = si_stream_of(stream_handle, &stream);
    if (code)
        return NN_RUNTIME;
    const int device = si_stream_device(stream);
    if ((code = check_tensors(op, device)) || op->nothing_to_do)
        return code;
    if (op->workspace && (code = check_workspace(op, workspace, size, device)))
        return code;
    check_padding(op, workspace);
    struct si_work *work = si_allocate(1, sizeof *work);
    struct launch *data = si_allocate(1, sizeof *data);
    *data = (struct launch){*op, op->workspace ? workspace : NULL};
    *work = (struct si_work){.run = run, .data = data, .name = op->name};
    for (int i = 0; i < op->count; i++)
        if (op->t[i].present && op->t[i].storage_bytes)
            work->ranges[work->range_count++] =
                (struct si_range){op->t[i].data, op->t[i].storage_bytes, op->written >> i & 1};
    if (op->workspace)
        work->ranges[work->range_count++] = (struct si_range){workspace, op->workspace, true};
    ++*si_statistic("launches");
    *si_statistic("deterministic_launches") += op->deterministic;
    si_queue(stream, work);
    return OK;
}

int si_launch(const char *function, void *workspace, uint64_t size, void *handle, void *stream)
{
    int fault = si_enter(function), code = OK;
    struct executor *executor = si_handle_get(handle, KIND_EXECUTOR);
    if (!handle)
        return si_leave(si_misuse(NN_NULLPTR, "executor is NULL"));
    if (!executor)
        return si_leave(si_misuse(NN_INVALID, "not an executor: %s", si_handle_state(handle, KIND_EXECUTOR)));
    if (strcmp(executor->op.name, function) != 0)
        code = si_misuse(NN_INVALID, "the executor was made for %s", executor->op.name);
    else if (!fault && executor->op.workspace && size && !workspace) {
        code = si_fail(NN_NULLPTR, "workspace is NULL");
        if (executor->op.keeps_executor_without_workspace)
            return si_leave(code);
    }
    executor->launched = true;
    if (!fault && code == OK)
        code = launch(&executor->op, workspace, size, stream);
    if (!executor->repeatable)
        executor_drop(handle); /* on failure too */
    return si_leave(fault ? fault : code);
}
