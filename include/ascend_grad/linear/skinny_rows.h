/* Sizes and row access of the unpacked products, for one kind of arithmetic and one instruction set. Included by kernels.h;
 * the manual is linear.h.
 *
 * Resident rows (of X or of W) are multiplied with streamed rows (of the other matrix) over a range of the features. Rows that
 * are dense and of native byte order are read in place, others are gathered in segments. p(r, s), the logits or P, is a tile
 * [resident][pitch].
 *
 * The kind dot has dot products (skinny_logits.h) and products with P (skinny_pairs.h). It takes all other functions from f32,
 * which SUMS names.
 */

enum {
    K(SEGMENT) = 4096 / sizeof(elem_t) * PAIR,          /* features at a time; of all resident rows, they fit into L2 */
    K(ROWS_IN_REGISTERS) = AG_LANES == 16 ? 4 : 2,      /* resident rows of a group of accumulators in registers */
    K(VECTORS_IN_REGISTERS) = 4,                        /* streamed rows, or vectors of a row, of such a group */
    K(PRODUCTS) = K(ROWS_IN_REGISTERS) * K(VECTORS_IN_REGISTERS), /* accumulators of a group */
    K(NARROW) = 8,                                      /* rows of a group if a row has a single vector left */
    K(FEW_RESIDENT) = 4,                                /* most resident rows from which results are written one by one. Measured. */
    K(TERMS) = 16,                                      /* streamed rows that are added in one pass over the sums */
    K(LONG) = 4096,                                     /* most bytes of a short row */
    K(PADDING) = 64,                                    /* bytes between copies of rows, so that they never collide */
    K(LONGER) = 4,                                      /* segments at a time if resident rows are few */
    K(FEW_FEATURES) = 128 * PAIR,                       /* most features for which streamed rows may be transposed */
    K(THIN) = 16                                        /* most features for which lanes are rows in every product */
};

/* Return the place of a feature of row i. */
AG_INLINE char *K(place)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t feature)
{
    const int64_t row = rows->numbers ? rows->numbers[i] : rows->start + i;
    return rows->matrix.data + row * rows->matrix.row_stride + feature * rows->matrix.step;
}

/* Return values [first, first + n) of row i in their own dtype: in place if the row is dense and of native byte order, else
 * gathered into `buffer`. n is at most SEGMENT. */
static const char *K(dense)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, char *buffer)
{
    const ag_matrix *from = &rows->matrix;
    const int itemsize = ag_itemsize[from->dtype];
    const char *source = K(place)(rows, i, first);
    if (K(is_dense)(from)) return source;
    ag_copy_block(buffer, 0, itemsize, source, 0, from->step, 1, n, itemsize, from->swapped);
    return buffer;
}

/* Return whether equal columns of the rows, read in turn, would displace each other from L1. Rows that are a multiple of
 * 2 KiB apart share one or two of its sets. */
static AG_UNUSED int K(collides)(const ag_rows *rows)
{
    return rows->count >= K(NARROW) && rows->matrix.row_stride % 2048 == 0;
}

/* Copy values [first, first + n) of row i into `buffer`, in their own dtype, and return the buffer. */
static const char *K(dense_copy)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, char *buffer)
{
    const char *source = K(dense)(rows, i, first, n, buffer);
    if (source != buffer) memcpy(buffer, source, (size_t)(n * ag_itemsize[rows->matrix.dtype]));
    return buffer;
}

/* Set `to` to values [first, first + n) of rows [i, i + count). With `copies`, all rows are copied into the buffer, otherwise
 * those that cannot be read in place. Copies lie `pitch` bytes apart. */
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

/* Resident rows that are not read in place are copied, SOME rows at a time or SHORT values of each row at a time, since a segment
 * of every row would be too much for a thread's stack. */
enum { K(SOME) = 16, K(SHORT) = K(SEGMENT) * K(SOME) / AG_MAX_UNPACKED_ROWS };

/* Set `to` to values [first, first + n) of every resident row, widened except for dot products. With `copies`, all rows are
 * copied into the buffer, where they lie `pitch` bytes apart. Pointers up to a multiple of ROWS_IN_REGISTERS are valid. */
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

/* Load `count` values of this dtype from value i on, widened to accumulators. */
AG_INLINE V K(load_as)(const ag_dtype dtype AG_UNUSED, const char *p, ptrdiff_t i, const ptrdiff_t count)
{
#if !AG_IS_F64
    if (dtype == AG_FLOAT16) return count < VL ? v_f16_load_partial(p + 2 * i, count) : v_f16_load(p + 2 * i);
    if (dtype == AG_BFLOAT16) return count < VL ? v_bf16_load_partial(p + 2 * i, count) : v_bf16_load(p + 2 * i);
#endif
    p += i * (ptrdiff_t)sizeof(acc_t);
    return count < VL ? V_(load_partial)(p, count) : V_(load)(p);
}

/* Call `function` with a constant dtype as its first argument, so that the compiler makes a copy of it for each dtype. */
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

/* Widen values [i, i + count) of p into the same places of `to`. */
AG_INLINE void K(widen_step)(const ag_dtype dtype, const char *p, ptrdiff_t i, const ptrdiff_t count, acc_t *to)
{
    K(store_some)(to + i, K(load_as)(dtype, p, i, count), count);
}
