/* Statements that write a row of n elements to `out`. Expects macros, which it undefines: AG_VALUE(i), the vector from
 * element i on; AG_WRITE_TWO(i, put, put_two), which writes two vectors; AG_WRITE_PARTIAL(i, count); AG_AFTER_LINES(i) and
 * AG_AFTER_VECTORS(i), what is done after AG_LINES elements of whole cache lines, and after four vectors. */

    ptrdiff_t i = 0;
    /* Non-temporal stores write only whole cache lines, as a line that is also written by ordinary stores is slow.
     * Short rows that begin and end with part of a line are better written with only ordinary stores. */
    const ptrdiff_t before = (ptrdiff_t)(-(uintptr_t)out % 64);
    if (nontemporal && before % AG_SIZE == 0 && n * AG_SIZE >= (before ? 2048 : 256)) {
        for (; i + VL <= before / AG_SIZE; i += VL) AG_STORE(out + i * AG_SIZE, AG_VALUE(i));
        if (i < before / AG_SIZE) {
            AG_WRITE_PARTIAL(i, before / AG_SIZE - i);
            i = before / AG_SIZE;
        }
        for (; i + AG_LINES <= n; i += AG_LINES) {
            AG_UNROLL(4)
            for (int j = 0; j < AG_LINES; j += 2 * VL) AG_WRITE_TWO(i + j, AG_STORE_NT, AG_STORE_NT_TWO);
            AG_AFTER_LINES(i);
        }
    }
    for (; i + 4 * VL <= n; i += 4 * VL) {
        AG_WRITE_TWO(i, AG_STORE, AG_STORE_TWO);
        AG_WRITE_TWO(i + 2 * VL, AG_STORE, AG_STORE_TWO);
        AG_AFTER_VECTORS(i);
    }
    for (; i + VL <= n; i += VL) AG_STORE(out + i * AG_SIZE, AG_VALUE(i));
    if (i < n) AG_WRITE_PARTIAL(i, n - i);

#undef AG_VALUE
#undef AG_WRITE_TWO
#undef AG_WRITE_PARTIAL
#undef AG_AFTER_LINES
#undef AG_AFTER_VECTORS
