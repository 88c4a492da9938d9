"""The CPU: which variants of the kernels it runs, and which one is in force."""

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

#: Every variant there is, whether or not this machine supports it.
VARIANTS = tuple([ag_variant_names[v].decode() for v in range(AG_VARIANT_COUNT)])

cdef ag_variant _active = ag_best_variant()

# Read once: a call should not open files. The fallbacks are small CPUs' sizes. They choose what is worked on at a time,
# never the order of a sum.
cdef long[4] _cache_sizes


def force_cache_sizes(sizes=None):
    """Pretend that L1, L2 and L3 have these sizes; for None, those that the system tells."""
    cdef int level
    for level in range(1, 4):
        _cache_sizes[level] = sizes[level - 1] if sizes else ag_cache_size(level, [0, 32 << 10, 512 << 10, 8 << 20][level])


force_cache_sizes()


cdef ag_variant active() noexcept nogil:
    return _active


cdef long cache_size(int level) noexcept nogil:
    return _cache_sizes[level]


def supported_variants():
    """Names of the variants that this machine can run, worst first."""
    return tuple([VARIANTS[v] for v in range(AG_VARIANT_COUNT) if ag_variant_supported(<ag_variant>v)])


def variant():
    """Name of the variant in force."""
    return VARIANTS[<int>_active]


def force_variant(name):
    """Put a variant in force, the best one for None. Not meant to be called while other threads compute."""
    global _active
    if name is None:
        _active = ag_best_variant()
        return
    if name not in supported_variants():
        raise ValueError(f"variant: expected one of {', '.join(supported_variants())}, got {name!r}")
    _active = <ag_variant><int>VARIANTS.index(name)
