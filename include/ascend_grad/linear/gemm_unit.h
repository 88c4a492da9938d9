/* Products of packed panels on a matrix unit, instead of gemm.h. Included by kernels.h, after the header with the steps of the
 * unit (`chain`, and the number CHAIN of steps that one call may take). The manual is linear.h. */

/* Compute a tile (MR, NR) of sums over n elements, which are whole steps, in chains that are combined with compensation. `chain`
 * describes the operands; a_step is in bytes. */
static void K(product)(const int nv, const char *a, const ptrdiff_t a_step, const ptrdiff_t a_row, const char *tail, const void *b,
                       const ptrdiff_t b_row, ptrdiff_t n, acc_t *tile)
{
    const ptrdiff_t steps = n / GRANULE, chains = steps > K(CHAIN) ? (steps + K(CHAIN) - 1) / K(CHAIN) : 1;
    const ptrdiff_t length = (steps + chains - 1) / chains;
    acc_t part[MR * NR] __attribute__((aligned(64))), low[MR * NR] __attribute__((aligned(64)));
    K(chain)(nv, a, a_step, a_row, chains == 1 ? tail : 0, (const char *)b, b_row, length < steps ? length : steps, tile);
    if (chains == 1) return;
    memset(low, 0, sizeof low);
    for (ptrdiff_t done = length; done < steps; done += length) {
        const int is_last = done + length >= steps;
        K(chain)(nv, a + done * a_step, a_step, a_row, is_last ? tail : 0, (const char *)b + done * GRANULE * b_row, b_row,
                 is_last ? steps - done : length, part);
        for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
            V total = V_(load)(tile + i), compensation = V_(load)(low + i);
            K(add_compensated)(&total, &compensation, V_(load)(part + i));
            V_(store)(tile + i, total);
            V_(store)(low + i, compensation);
        }
    }
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V_(store)(tile + i, K(compensated)(V_(load)(tile + i), V_(load)(low + i)));
    }
}

enum { K(TILE) = MR * GRANULE * sizeof(elem_t) }; /* bytes of a packed step of the left operand */

#if AG_UNIT == AG_AMX
/* Compute a tile of logits as product_logits does. The left operand is a run of rows that are read in place. */
static void K(product_in_place)(const ag_rows *left, int nv, ptrdiff_t first, const elem_t *right, ptrdiff_t n, acc_t *tile)
{
    /* A tile that would end behind the last row begins earlier: there are at least MR rows before the end. */
    const ptrdiff_t back = first + MR > left->count ? first + MR - left->count : 0, rest = n % MR;
    const char *a = left->matrix.data + (left->start + first - back) * left->matrix.row_stride;
    char tail[K(TILE)] __attribute__((aligned(64))) = {0};
    for (ptrdiff_t r = 0; rest && r < MR; r++) {
        memcpy(tail + r * 64, a + r * left->matrix.row_stride + (n - rest) * 2, (size_t)rest * 2);
    }
    K(product)(nv, a, 64, left->matrix.row_stride, rest ? tail : 0, right, NR * sizeof(elem_t), K(elements)(n), tile);
    if (back) memmove(tile, tile + back * NR, (size_t)((MR - back) * NR) * sizeof *tile);
}
#endif

/* Compute a tile of logits: tile t of the left operand times panel p of the right one, n values along the sums. */
static void K(product_logits)(const ag_packed *packed, int nv, ptrdiff_t t, ptrdiff_t p, ptrdiff_t n, acc_t *tile)
{
    const ptrdiff_t elements = K(elements)(n);
    const elem_t *right = (const elem_t *)packed->right + p * elements * NR;
#if AG_UNIT == AG_AMX
    if (!packed->left_tiles) {
        K(product_in_place)(&packed->left, nv, t * MR, right, n, tile);
        return;
    }
#else
    nv = NV; /* packed panels have all columns */
#endif
    K(product)(nv, (const char *)packed->left_tiles + t * elements / GRANULE * K(TILE), K(TILE), 64, 0, right,
               NR * sizeof(elem_t), elements, tile);
}

/* A panel of P is one step of the product with the weight. */
static void K(product_rows)(int nv, const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    K(product)(nv, (const char *)a, panel * (ptrdiff_t)sizeof(elem_t), 64, 0, b, nv * VL * sizeof(elem_t), n, tile);
}

static void K(product_columns)(int nv, const elem_t *a, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    K(product)(nv, (const char *)a, K(TILE), 64, 0, b, nv * VL * sizeof(elem_t), n, tile);
}
