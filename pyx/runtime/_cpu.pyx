"""The CPU: the variants of the kernels that it can run, the active variant, and the sizes of its caches."""

from ascend_grad._kernels cimport (
    AG_VARIANT_COUNT,
    ag_best_variant,
    ag_cache_size,
    ag_variant,
    ag_variant_names,
    ag_variant_supported,
)

cdef extern from *:
    """
    #if defined(__clang__)
    #define AG_COMPILER "clang " __clang_version__
    #else
    #define AG_COMPILER "gcc " __VERSION__
    #endif
    """
    const char *AG_COMPILER

COMPILER = AG_COMPILER.decode()

#: All variants, including those that this machine does not support.
VARIANTS = tuple([ag_variant_names[v].decode() for v in range(AG_VARIANT_COUNT)])

cdef ag_variant _active = ag_best_variant()

# Bytes of the L1, L2 and L3 caches, read once, as calls should not open files. If Linux does not tell them, sizes of
# small CPUs are assumed. They determine the sizes of blocks, never the order of a sum.
cdef long[4] _cache_sizes


def force_cache_sizes(sizes=None):
    """Assume these sizes of L1, L2 and L3 in bytes, or for None the sizes that the system tells."""
    cdef int level
    for level in range(1, 4):
        _cache_sizes[level] = sizes[level - 1] if sizes else ag_cache_size(level, [0, 32 << 10, 512 << 10, 8 << 20][level])


force_cache_sizes()


cdef ag_variant active() noexcept nogil:
    return _active


cdef long cache_size(int level) noexcept nogil:
    return _cache_sizes[level]


def supported_variants():
    """Return the names of the variants that this machine can run, worst first."""
    return tuple([VARIANTS[v] for v in range(AG_VARIANT_COUNT) if ag_variant_supported(<ag_variant>v)])


def variant():
    """Return the name of the active variant."""
    return VARIANTS[<int>_active]


def force_variant(name):
    """Activate a variant, or for None the best one. Do not call this while other threads compute."""
    global _active
    if name is None:
        _active = ag_best_variant()
        return
    if name not in supported_variants():
        raise ValueError(f"variant: expected one of {', '.join(supported_variants())}, got {name!r}")
    _active = <ag_variant><int>VARIANTS.index(name)
