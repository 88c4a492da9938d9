/* Test double of the part of libnnopbase.so about arguments that are no tensors: scalars, arrays, lists. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void *aclCreateScalar(const void *value, int dtype);
void *aclCreateIntArray(const int64_t *values, uint64_t count);
void *aclCreateBoolArray(const bool *values, uint64_t count);
void *aclCreateTensorList(const void *const *tensors, uint64_t count);
int aclDestroyScalar(const void *scalar);
int aclDestroyIntArray(const void *array);
int aclDestroyBoolArray(const void *array);
int aclDestroyTensorList(const void *list);
int aclGetViewShape(const void *tensor, int64_t **dims, uint64_t *rank);

static void *create(const char *function, enum si_argument_kind kind, const void *values, uint64_t count, uint64_t size)
{
    void *handle = NULL;
    int code = si_enter(function);
    if (code == OK && kind != SI_SCALAR && count && !values)
        code = si_misuse(NN_NULLPTR, "%llu values at NULL", (unsigned long long)count);
    if (code == OK) {
        struct si_argument *argument = si_allocate(1, sizeof *argument + count * sizeof(int64_t));
        argument->kind = kind;
        argument->count = (int64_t)count;
        for (uint64_t i = 0; kind != SI_SCALAR && i < count; i++)
            memcpy(&argument->items[i], (const char *)values + i * size, size);
        handle = si_handle_new(KIND_ARGUMENT, argument);
    }
    si_leave(OK);
    return handle;
}

void *aclCreateScalar(const void *value, int dtype)
{
    void *handle = create("aclCreateScalar", SI_SCALAR, NULL, 0, 0);
    if (handle)
        ((struct si_argument *)si_handle_get(handle, KIND_ARGUMENT))->value = si_number(value, dtype);
    return handle;
}

void *aclCreateIntArray(const int64_t *values, uint64_t count)
{
    return create("aclCreateIntArray", SI_INTEGERS, values, count, sizeof *values);
}

void *aclCreateBoolArray(const bool *values, uint64_t count)
{
    return create("aclCreateBoolArray", SI_BOOLEANS, values, count, sizeof *values);
}

void *aclCreateTensorList(const void *const *tensors, uint64_t count)
{
    return create("aclCreateTensorList", SI_TENSORS, tensors, count, sizeof *tensors);
}

static int destroy(const char *function, const void *handle, enum si_argument_kind kind)
{
    int code = si_enter(function);
    struct si_argument *argument = handle ? si_handle_get(handle, KIND_ARGUMENT) : NULL;
    if (handle && (!argument || argument->kind != kind))
        code = si_misuse(NN_INVALID, "not an argument of this kind: %s", si_handle_state(handle, KIND_ARGUMENT));
    else if (handle) {
        for (int64_t i = 0; kind == SI_TENSORS && i < argument->count; i++)
            si_tensor_destroy((const void *)(intptr_t)argument->items[i]); /* they go with their list */
        si_handle_drop(handle);
        free(argument);
    }
    return si_leave(code);
}

int aclDestroyScalar(const void *scalar) { return destroy("aclDestroyScalar", scalar, SI_SCALAR); }
int aclDestroyIntArray(const void *array) { return destroy("aclDestroyIntArray", array, SI_INTEGERS); }
int aclDestroyBoolArray(const void *array) { return destroy("aclDestroyBoolArray", array, SI_BOOLEANS); }
int aclDestroyTensorList(const void *list) { return destroy("aclDestroyTensorList", list, SI_TENSORS); }

/* The dimensions as the operator has left them; the caller frees them. */
int aclGetViewShape(const void *handle, int64_t **dims, uint64_t *rank)
{
    int code = si_enter("aclGetViewShape");
    const struct tensor *t = si_handle_get(handle, KIND_TENSOR);
    if (code == OK && !t)
        code = si_misuse(NN_INVALID, "not a tensor: %s", si_handle_state(handle, KIND_TENSOR));
    if (code == OK) {
        *rank = (uint64_t)t->rank;
        *dims = si_allocate((uint64_t)t->rank, sizeof **dims);
        memcpy(*dims, t->dims, (size_t)t->rank * sizeof **dims);
    }
    return si_leave(code);
}
