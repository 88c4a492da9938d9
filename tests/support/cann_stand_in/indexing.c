/* Test double of operators that select, place and join elements. See stand_in.h. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

static void copy_element(const struct tensor *to, char *target, const struct tensor *from, const char *source)
{
    if (to->dtype == from->dtype)
        memcpy(target, source, si_size(to->dtype));
    else
        si_put(target, to->dtype, si_number(source, from->dtype));
}

static int add_list(struct operation *op, const void *handle, const void **tensors, int *count)
{
    si_lock();
    const struct si_argument *list = si_handle_get(handle, KIND_ARGUMENT);
    int code = OK;
    if (!list || list->kind != SI_TENSORS)
        code = si_misuse(NN_INVALID, "the list is %s", si_handle_state(handle, KIND_ARGUMENT));
    else if (list->count + *count > MAX_TENSORS - 2)
        code = si_fail(NN_INVALID, "%s: a list of %lld tensors", op->name, (long long)list->count);
    for (int64_t i = 0; code == OK && i < list->count; i++)
        tensors[(*count)++] = (const void *)(intptr_t)list->items[i];
    si_unlock();
    return code;
}

/* --- Cat, Stack --------------------------------------------------------------------------------------------------- */

static void join(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *out = &op->t[op->count - 1];
    int64_t step = 1, before = 0;
    for (int k = (int)op->dim + 1; k < out->rank; k++)
        step *= out->dims[k];
    for (int i = 0; i < op->count - 1; i++) {
        const struct tensor *t = &op->t[i];
        int64_t count = si_numel(t), length = op->axes ? 1 : t->dims[op->dim]; /* axes: the dimension is a new one */
        for (int64_t j = 0; j < count; j++) {
            int64_t line = j / (length * step), within = j % (length * step);
            int64_t target = (line * out->dims[op->dim] + before) * step + within;
            copy_element(out, si_element(out, out, target), t, si_element(t, t, j));
        }
        before += count ? length : 0;
    }
}

static int joined(struct operation *op, const char *function, const void *list, void *out, bool stacked,
                  uint64_t *workspace_size, void **executor)
{
    const void *tensors[MAX_TENSORS];
    int count = 0;
    int code = add_list(op, list, tensors, &count);
    if (code)
        return code;
    tensors[count++] = out;
    op->kernel = join;
    op->axes = stacked;
    code = si_prepare_plain(op, function, tensors, count, 1, NULL, 0);
    int rank = op->t[count - 1].rank;
    op->dim += op->dim < 0 ? rank : 0;
    if (code == OK && (op->dim < 0 || op->dim >= rank))
        code = si_fail(NN_INVALID, "dim %lld with rank %d", (long long)op->dim, rank);
    return si_finish_plain(op, code, workspace_size, executor);
}

PHASE_1(Cat, (const void *list, int64_t dim, void *out))
{
    struct operation op = {.name = "aclnnCat", .dim = dim};
    return joined(&op, "aclnnCatGetWorkspaceSize", list, out, false, workspace_size, executor);
}

PHASE_1(Stack, (const void *list, int64_t dim, void *out))
{
    struct operation op = {.name = "aclnnStack", .dim = dim};
    return joined(&op, "aclnnStackGetWorkspaceSize", list, out, true, workspace_size, executor);
}

/* --- Index, IndexPutImpl: tensors of indices for the leading dimensions, an empty one for "all" -------------------- */

/* Tensor 0 is indexed, 1 is what is read from or written there, the others are the indices. `dim`: how many of them;
 * `axes`: bit k for an index of dimension k. All indices are of one shape, to which they are broadcast. */
static void index_shape(const struct operation *op, struct tensor *shape, int *first)
{
    int indexed = 0, last = -1;
    *first = -1;
    for (int k = 0; k < op->dim; k++)
        if (op->axes >> k & 1) {
            *first = *first < 0 ? k : *first;
            last = k;
            indexed++;
        }
    if (last - *first + 1 != indexed)
        *first = 0; /* not next to one another: the indices' own dimensions come first */
    *shape = (struct tensor){.rank = 0};
    for (int k = 0; k < op->dim; k++) {
        const struct tensor *t = &op->t[2 + k];
        if (!(op->axes >> k & 1))
            continue;
        if (t->rank > shape->rank) {
            memmove(shape->dims + t->rank - shape->rank, shape->dims, (size_t)shape->rank * sizeof *shape->dims);
            for (int i = 0; i < t->rank - shape->rank; i++)
                shape->dims[i] = 1;
            shape->rank = t->rank;
        }
        for (int i = 0; i < t->rank; i++)
            if (t->dims[i] != 1)
                shape->dims[i + shape->rank - t->rank] = t->dims[i];
    }
}

static void indexed(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *other = &op->t[1];
    struct tensor shape, result = {.rank = 0};
    int first;
    index_shape(op, &shape, &first);
    /* the result's dimensions: self's dimensions, with the indices' dimensions instead of the indexed dimensions */
    int origin[2 * MAX_RANK]; /* the dimension of self, or -1 - the dimension of the indices */
    for (int k = 0, placed = 0; k <= self->rank; k++) {
        if (k == first && !placed++)
            for (int i = 0; i < shape.rank; i++) {
                origin[result.rank] = -1 - i;
                result.dims[result.rank++] = shape.dims[i];
            }
        if (k < self->rank && !(op->axes >> k & 1)) {
            origin[result.rank] = k;
            result.dims[result.rank++] = self->dims[k];
        }
    }
    int64_t count = si_numel(&result);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, place[MAX_RANK] = {0}, number_of_index = 0, step = 1;
        for (int k = result.rank - 1; k >= 0; k--) {
            int64_t here = rest % result.dims[k];
            rest /= result.dims[k];
            if (origin[k] >= 0)
                place[origin[k]] = here;
            else {
                number_of_index += here * step;
                step *= result.dims[k];
            }
        }
        int64_t at = self->offset;
        for (int k = 0; k < self->rank; k++) {
            if (op->axes >> k & 1) {
                const struct tensor *t = &op->t[2 + k];
                place[k] = (int64_t)si_number(si_element(t, &shape, number_of_index), t->dtype);
                place[k] += place[k] < 0 ? self->dims[k] : 0;
                if (place[k] < 0 || place[k] >= self->dims[k]) {
                    si_lock();
                    si_violation("%s: an index of dimension %d is out of bounds", op->name, k);
                    si_unlock();
                    place[k] = 0;
                }
            }
            at += place[k] * self->strides[k];
        }
        char *element = si_alias(self->data) + at * (int64_t)si_size(self->dtype);
        char *elsewhere = si_element(other, &result, i);
        if (op->written & 2)
            copy_element(other, elsewhere, self, element);
        else if (op->vocab_end) /* add up */
            si_put(element, self->dtype, si_number(element, self->dtype) + si_number(elsewhere, other->dtype));
        else
            copy_element(self, element, other, elsewhere);
    }
}

static int index_phase_1(struct operation *op, const char *function, const void *self, const void *list, const void *other,
                         unsigned written, uint64_t *workspace_size, void **executor)
{
    const void *tensors[MAX_TENSORS] = {self, other};
    int count = 2;
    int code = add_list(op, list, tensors, &count);
    if (code)
        return code;
    op->kernel = indexed;
    op->dim = count - 2;
    code = si_prepare_plain(op, function, tensors, count, 0, NULL, 0);
    op->written = written;
    for (int k = 0; k < op->dim && code == OK; k++)
        if (!(op->t[2 + k].rank == 1 && op->t[2 + k].dims[0] == 0))
            op->axes |= 1u << k;
    if (code == OK && op->dim > op->t[0].rank)
        code = si_fail(NN_INVALID, "more indices than dimensions");
    op->nothing_to_do = code == OK && (si_numel(&op->t[1]) == 0 || si_numel(&op->t[0]) == 0);
    return si_finish(op, code, workspace_size, executor);
}

PHASE_1(Index, (const void *self, const void *indices, void *out))
{
    struct operation op = {.name = "aclnnIndex"};
    return index_phase_1(&op, "aclnnIndexGetWorkspaceSize", self, indices, out, 2, workspace_size, executor);
}

PHASE_1(IndexPutImpl, (void *self, const void *indices, const void *values, bool adds, bool is_unsafe))
{
    struct operation op = {.name = "aclnnIndexPutImpl", .vocab_end = adds};
    (void)is_unsafe;
    return index_phase_1(&op, "aclnnIndexPutImplGetWorkspaceSize", self, indices, values, 1, workspace_size, executor);
}

/* --- Gather, IndexSelect: tensors self, index, out ---------------------------------------------------------------- */

static void select_along(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *index = &op->t[1], *out = &op->t[2];
    int64_t count = si_numel(out);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, at = self->offset;
        for (int k = out->rank - 1; k >= 0; k--) {
            int64_t here = rest % out->dims[k];
            rest /= out->dims[k];
            if (k == op->dim) {
                const char *chosen = op->axes ? si_element(index, index, here) : si_element(index, out, i);
                here = (int64_t)si_number(chosen, index->dtype);
                if (here < 0 || here >= self->dims[k]) {
                    si_lock();
                    si_violation("%s: index %lld is out of bounds", op->name, (long long)here);
                    si_unlock();
                    here = 0;
                }
            }
            at += here * self->strides[k];
        }
        copy_element(out, si_element(out, out, i), self, si_alias(self->data) + at * (int64_t)si_size(self->dtype));
    }
}

/* Checks of the indices, tensor 1, of an operator along a dimension of tensor 0, whose results have tensor 0's type. */
static int check_along(struct operation *op, int source)
{
    const struct tensor *self = &op->t[0], *index = &op->t[1];
    int code = si_need_dtype(op, 0, "self", "FLOAT FLOAT16 BF16 DOUBLE INT8 UINT8 INT16 INT32 INT64 BOOL");
    if (code == OK && si_numel(index))
        code = si_need_dtype(op, 1, "index", "INT32 INT64");
    for (int i = 2; i < op->count && code == OK; i++)
        code = si_check_equal_dtypes(op, 0, i);
    if (code == OK && (self->rank != index->rank || self->rank != op->t[source].rank))
        code = si_fail(NN_INVALID, "tensors of rank %d, %d and %d", self->rank, index->rank, op->t[source].rank);
    if (code == OK)
        code = si_check_dim(op);
    for (int k = 0; k < index->rank && code == OK; k++)
        if (k != op->dim ? index->dims[k] > self->dims[k] : si_numel(index) && self->dims[k] == 0)
            code = si_fail(NN_INVALID, "dimension %d of index is too long", k);
    return code;
}

PHASE_1(Gather, (const void *self, int64_t dim, const void *index, void *out))
{
    struct operation op = {.name = "aclnnGather", .dim = dim, .kernel = select_along};
    const void *const tensors[] = {self, index, out};
    int code = si_prepare_plain(&op, "aclnnGatherGetWorkspaceSize", tensors, 3, 1, NULL, 0);
    op.on_every_system = false;
    if (code == OK)
        code = check_along(&op, 1);
    if (code == OK && !si_same_shape(&op.t[1], &op.t[2]))
        code = si_fail(NN_INVALID, "index and out have different shapes");
    return si_finish_plain(&op, code, workspace_size, executor);
}

PHASE_1(IndexSelect, (const void *self, int64_t dim, const void *index, void *out))
{
    struct operation op = {.name = "aclnnIndexSelect", .dim = dim, .axes = 1, .kernel = select_along};
    const void *const tensors[] = {self, index, out};
    int code = si_prepare_plain(&op, "aclnnIndexSelectGetWorkspaceSize", tensors, 3, 1, NULL, 0);
    return si_finish_plain(&op, code ? code : si_check_dim(&op), workspace_size, executor);
}

/* --- ScatterAdd: tensors self, index, src, out; out may be self ---------------------------------------------------- */

static void scatter_add(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *index = &op->t[1], *src = &op->t[2], *out = &op->t[3];
    int64_t count = si_numel(out);
    for (int64_t i = 0; i < count; i++)
        copy_element(out, si_element(out, out, i), self, si_element(self, self, i));
    count = si_numel(index);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, from = src->offset, to = out->offset;
        int64_t place = (int64_t)si_number(si_element(index, index, i), index->dtype);
        if (place < 0 || place >= out->dims[op->dim]) {
            si_lock();
            si_violation("%s: index %lld is out of bounds", op->name, (long long)place);
            si_unlock();
            continue;
        }
        for (int k = index->rank - 1; k >= 0; k--) {
            from += rest % index->dims[k] * src->strides[k];
            to += (k == op->dim ? place : rest % index->dims[k]) * out->strides[k];
            rest /= index->dims[k];
        }
        char *sum = si_alias(out->data) + to * (int64_t)si_size(out->dtype);
        const char *term = si_alias(src->data) + from * (int64_t)si_size(src->dtype);
        si_put(sum, out->dtype, si_number(sum, out->dtype) + si_number(term, src->dtype));
    }
}

PHASE_1(ScatterAdd, (const void *self, int64_t dim, const void *index, const void *src, void *out))
{
    struct operation op = {.name = "aclnnScatterAdd", .dim = dim, .kernel = scatter_add};
    const void *const tensors[] = {self, index, src, out};
    int code = si_prepare_plain(&op, "aclnnScatterAddGetWorkspaceSize", tensors, 4, 1, NULL, 0);
    op.on_every_system = false;
    if (code == OK)
        code = check_along(&op, 2);
    for (int k = 0; k < op.t[1].rank && code == OK; k++)
        if (op.t[1].dims[k] > op.t[2].dims[k])
            code = si_fail(NN_INVALID, "dimension %d of index is longer than that of src", k);
    if (code == OK && !si_same_shape(&op.t[0], &op.t[3]))
        code = si_fail(NN_INVALID, "self and out have different shapes");
    if (code == OK && !(si_contiguous(&op.t[2]) && si_contiguous(&op.t[3])))
        code = si_fail(NN_INVALID, "src or out is not contiguous");
    return si_finish_plain(&op, code, workspace_size, executor);
}

/* --- MaskedSelect, Nonzero: how many elements there are is known when the work is done ----------------------------- */

static void masked_select(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *mask = &op->t[1], *out = &op->t[2];
    const struct tensor *larger = self->rank > mask->rank || si_numel(self) > si_numel(mask) ? self : mask;
    int64_t count = si_numel(larger), found = 0;
    for (int64_t i = 0; i < count; i++)
        if (si_number(si_element(mask, larger, i), mask->dtype))
            copy_element(out, si_element(out, out, found++), self, si_element(self, larger, i));
    si_lock();
    si_tensor_shorten(out, 0, found);
    si_unlock();
}

/* One column for each element that is not 0: its index. op->axes: the other way round, columns become rows. */
static void nonzero(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *out = &op->t[1];
    int64_t count = si_numel(self), found = 0, column = 0;
    for (int64_t i = 0; i < count; i++)
        found += si_number(si_element(self, self, i), self->dtype) != 0;
    for (int64_t i = 0; i < count; i++) {
        if (!si_number(si_element(self, self, i), self->dtype))
            continue;
        int64_t rest = i;
        for (int k = self->rank - 1; k >= 0; k--) {
            int64_t place = op->axes ? column * self->rank + k : k * found + column;
            si_put(si_element(out, out, place), out->dtype, rest % self->dims[k]);
            rest /= self->dims[k];
        }
        column++;
    }
    si_lock();
    si_tensor_shorten(out, !op->axes, found);
    si_unlock();
}

PHASE_1(MaskedSelect, (const void *self, const void *mask, void *out))
{
    struct operation op = {.name = "aclnnMaskedSelect", .kernel = masked_select};
    const void *const tensors[] = {self, mask, out};
    int code = si_prepare_plain(&op, "aclnnMaskedSelectGetWorkspaceSize", tensors, 3, 1, NULL, 0);
    return si_finish_plain(&op, code, workspace_size, executor);
}

#define NONZERO(name_, rows)                                                                                           \
    PHASE_1(name_, (const void *self, void *out))                                                                      \
    {                                                                                                                  \
        struct operation op = {.name = "aclnn" #name_, .kernel = nonzero, .axes = rows};                               \
        const void *const tensors[] = {self, out};                                                                     \
        int code = si_prepare_plain(&op, "aclnn" #name_ "GetWorkspaceSize", tensors, 2, 1, NULL, 0);                   \
        return si_finish_plain(&op, code, workspace_size, executor);                                                   \
    }

NONZERO(Nonzero, 1)
NONZERO(NonzeroV2, 0)

/* --- Equal: whether all elements are ------------------------------------------------------------------------------- */

static void equal(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *other = &op->t[1], *out = &op->t[2];
    bool same = si_same_shape(self, other);
    int64_t count = same ? si_numel(self) : 0;
    for (int64_t i = 0; i < count && same; i++)
        same = si_number(si_element(self, self, i), self->dtype) == si_number(si_element(other, other, i), other->dtype);
    si_put(si_element(out, out, 0), out->dtype, same);
}

PHASE_1(Equal, (const void *self, const void *other, void *out))
{
    struct operation op = {.name = "aclnnEqual", .kernel = equal};
    const void *const tensors[] = {self, other, out};
    int code = si_prepare_plain(&op, "aclnnEqualGetWorkspaceSize", tensors, 3, 1, NULL, 0);
    return si_finish_plain(&op, code, workspace_size, executor);
}
