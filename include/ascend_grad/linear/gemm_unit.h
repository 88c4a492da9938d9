/* Products of packed panels on a matrix unit, instead of gemm.h. Included by kernels.h, after the header with the steps of the
 * unit (`chain`, and the number CHAIN of steps that one call may take). The manual is linear.h. */

/* Compute a tile (MR, NR) of sums over n elements, which are whole steps, in chains that are combined with compensation.
 * Steps of the left operand are a_step elements apart. */
static void K(product)(const int nv, const elem_t *a, const ptrdiff_t a_step, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    const ptrdiff_t steps = n / GRANULE, chains = steps > K(CHAIN) ? (steps + K(CHAIN) - 1) / K(CHAIN) : 1;
    const ptrdiff_t length = (steps + chains - 1) / chains, a_bytes = a_step * (ptrdiff_t)sizeof(elem_t);
    acc_t part[MR * NR] __attribute__((aligned(64))), low[MR * NR] __attribute__((aligned(64)));
    K(chain)(nv, (const char *)a, a_bytes, (const char *)b, length < steps ? length : steps, tile);
    if (chains == 1) return;
    memset(low, 0, sizeof low);
    for (ptrdiff_t done = length; done < steps; done += length) {
        K(chain)(nv, (const char *)(a + done * a_step), a_bytes, (const char *)(b + done * GRANULE * nv * VL),
                 steps - done < length ? steps - done : length, part);
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

/* Steps of x_rows and of p_pairs follow one another; a panel of P is one step. */
/* Compute a tile of logits: tile t of the left operand times panel p of the right one, n values along the sums. All panels are
 * NV vectors wide. */
static void K(product_logits)(const ag_packed *packed, int nv AG_UNUSED, ptrdiff_t t, ptrdiff_t p, ptrdiff_t n, acc_t *tile)
{
    const ptrdiff_t elements = K(elements)(n);
    K(product)(NV, (const elem_t *)packed->left_tiles + t * elements * MR, MR * GRANULE,
               (const elem_t *)packed->right + p * elements * NR, elements, tile);
}

static void K(product_rows)(int nv, const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    K(product)(nv, a, panel, b, n, tile);
}

static void K(product_columns)(int nv, const elem_t *a, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    K(product)(nv, a, MR * GRANULE, b, n, tile);
}
