/* Products with few rows on one side, for one kind of arithmetic and one instruction set: nothing is packed. Included by
 * kernels.h; the manual is linear.h. This file has sizes and what reads rows in place.
 *
 * Resident rows (of X or of W) are multiplied with streamed rows (of the other matrix) over a range of the features. Both are
 * read in place where rows are dense and of native byte order, else gathered in segments. p(r, s), the logits or P, is a tile
 * [resident][pitch].
 *
 * Of the kind dot there are dot products alone; what P is multiplied with is widened: SUMS names those functions.
 */

#if AG_IS_DOT
#define SUMS(name) AG_CONCAT3(name, f32, AG_ISA)
#else
#define SUMS(name) K(name)
#endif

enum {
    K(SEGMENT) = 4096 / sizeof(elem_t) * PAIR,          /* features at a time; those of all resident rows fit into L2 */
    K(ROWS_IN_REGISTERS) = AG_LANES == 16 ? 4 : 2,  /* resident rows whose accumulators fit into registers */
    K(VECTORS_IN_REGISTERS) = 4,                                   /* by so many streamed rows, or so many vectors */
    K(PRODUCTS) = K(ROWS_IN_REGISTERS) * K(VECTORS_IN_REGISTERS),           /* of rows, whose lanes are added up together */
    K(NARROW) = 8,                                    /* rows at a time where they are one vector long, or end in one */
    K(TERMS) = 16,                                    /* streamed rows that one pass over the sums takes in */
    K(LONG) = 4096,                                   /* bytes of a row, beyond which it is long */
    K(PADDING) = 64,                                  /* bytes between copies of rows, which so never collide */
    K(LONGER) = 4,                                    /* segments at a time where resident rows are few */
    K(FEW_FEATURES) = 128 * PAIR,                     /* up to which streamed rows may be transposed */
    K(THIN) = 16                                      /* features up to which lanes are rows in every product */
};

/* Whether the values of a row follow one another, in native byte order. */
static int K(is_dense)(const ag_matrix *from)
{
    return from->step == ag_itemsize[from->dtype] && !from->swapped;
}

/* Values [first, first + n) of a row, dense and of native byte order, of their own dtype; n <= SEGMENT. */
static const char *K(dense)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, char *buffer)
{
    const ag_matrix *from = &rows->matrix;
    const int itemsize = ag_itemsize[from->dtype];
    const char *source = from->data + (rows->numbers ? rows->numbers[i] : rows->start + i) * from->row_stride;
    source += first * from->step;
    if (K(is_dense)(from)) return source;
    ag_copy_block(buffer, 0, itemsize, source, 0, from->step, 1, n, itemsize, from->swapped);
    return buffer;
}

/* Whether the same values of more than a few rows, read in turn, would displace each other from a cache: rows that are a
 * multiple of 2 KiB apart share one or two sets of an L1. */
static AG_UNUSED int K(collides)(const ag_rows *rows)
{
    return rows->count >= K(NARROW) && rows->matrix.row_stride % 2048 == 0;
}

/* Row i as `dense` has it, and in the buffer in any case. */
static const char *K(dense_copy)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, char *buffer)
{
    const char *source = K(dense)(rows, i, first, n, buffer);
    if (source != buffer) memcpy(buffer, source, (size_t)(n * ag_itemsize[rows->matrix.dtype]));
    return buffer;
}

/* The same of rows [i, i + count); copies, which may be asked for, lie `pitch` bytes apart. */
AG_INLINE void K(dense_rows)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t count, ptrdiff_t first, ptrdiff_t n,
                             char *buffer, ptrdiff_t pitch, const int copies, const char **to)
{
    const ag_matrix *from = &rows->matrix;
    const int in_place = !copies && K(is_dense)(from);
    const char *start = from->data + first * from->step;
    for (ptrdiff_t k = 0; k < count; k++) {
        to[k] = in_place ? start + (rows->numbers ? rows->numbers[i + k] : rows->start + i + k) * from->row_stride
                         : K(dense_copy)(rows, i + k, first, n, buffer + k * pitch);
    }
}

/* Whether resident rows are read where they lie. Copies of all of them, a segment long, would be much for a thread's stack:
 * where there are copies, these are of SOME rows, or of SHORT values of each. */
static int K(is_in_place)(const ag_matrix *from)
{
    return K(is_dense)(from) && ag_itemsize[from->dtype] == sizeof(elem_t) / PAIR;
}

enum { K(SOME) = 16, K(SHORT) = K(SEGMENT) * K(SOME) / AG_MAX_UNPACKED_ROWS };

/* Values [first, first + n) of every resident row, widened but for dot products; copies, which may be asked for, lie `pitch`
 * bytes apart in the buffer. Pointers up to a multiple of RESIDENT are valid. */
static void K(load_resident)(const ag_rows *rows, ptrdiff_t first, ptrdiff_t n, char *buffer, ptrdiff_t pitch,
                             const int copies, const char **to)
{
    const ag_matrix *from = &rows->matrix;
    const int in_place = !copies && K(is_in_place)(from);
    for (ptrdiff_t r = 0; r < rows->count; r++) {
        char *copy = in_place ? 0 : buffer + r * pitch;
        if (ag_itemsize[from->dtype] == sizeof(elem_t) / PAIR) {
            to[r] = in_place ? K(dense)(rows, r, first, n, copy) : K(dense_copy)(rows, r, first, n, copy);
            continue;
        }
        const int64_t row = rows->numbers ? rows->numbers[r] : rows->start + r;
        to[r] = copy;
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            K(fetch)(from, row, first + begin, n - begin < AG_FETCH ? n - begin : AG_FETCH, copy + begin * sizeof(acc_t));
        }
    }
    for (ptrdiff_t r = rows->count; r % K(ROWS_IN_REGISTERS); r++) to[r] = to[rows->count - 1];
}

/* A vector of values of this dtype, widened, from value i on; `count` of them. */
AG_INLINE V K(load_as)(const ag_dtype dtype AG_UNUSED, const char *p, ptrdiff_t i, const ptrdiff_t count)
{
#if !AG_IS_F64
    if (dtype == AG_FLOAT16) return count < VL ? v_f16_load_partial(p + 2 * i, count) : v_f16_load(p + 2 * i);
    if (dtype == AG_BFLOAT16) return count < VL ? v_bf16_load_partial(p + 2 * i, count) : v_bf16_load(p + 2 * i);
#endif
    p += i * (ptrdiff_t)sizeof(acc_t);
    return count < VL ? V_(load_partial)(p, count) : V_(load)(p);
}

/* Calls `function` with its first argument constant: one copy for every dtype. */
#if AG_IS_F64
#define AG_BY_DTYPE(dtype, function, ...) function(AG_FLOAT64, __VA_ARGS__)
#elif AG_IS_DOT
#define AG_BY_DTYPE(dtype, function, ...) function(AG_BFLOAT16, __VA_ARGS__)
#else
#define AG_BY_DTYPE(dtype, function, ...)                                                                               \
    do {                                                                                                                \
        if ((dtype) == AG_FLOAT16) function(AG_FLOAT16, __VA_ARGS__);                                                   \
        else if ((dtype) == AG_BFLOAT16) function(AG_BFLOAT16, __VA_ARGS__);                                            \
        else function(AG_FLOAT32, __VA_ARGS__);                                                                         \
    } while (0)
#endif

/* to[i] = value i of p, `count` of them */
AG_INLINE void K(widen_step)(const ag_dtype dtype, const char *p, ptrdiff_t i, const ptrdiff_t count, acc_t *to)
{
    K(store_some)(to + i, K(load_as)(dtype, p, i, count), count);
}
