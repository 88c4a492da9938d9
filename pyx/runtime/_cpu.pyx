"""The CPU: the variants of the kernels that it can run, the active variant, and the sizes of its caches."""

from ascend_grad._kernels cimport (
    AG_VARIANT_AMX_BF16,
    AG_VARIANT_COUNT,
    ag_best_variant,
    ag_cache_count,
    ag_cache_size,
    ag_unsupported_reason,
    ag_variant,
    ag_variant_is_slow,
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

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>

    /* Ask Linux for the permission to use the tiles of AMX, which holds for all threads of this process and its children:
     * ARCH_REQ_XCOMP_PERM for component 18 of the state. */
    static int ag_request_amx(void)
    {
    #if defined(AG_EMULATE_AMX) || !defined(AG_X86_64)
        return 1;
    #else
        return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    #endif
    }
    typedef _Atomic int ag_permission;
    """
    ctypedef int ag_permission
    int ag_request_amx() nogil

COMPILER = AG_COMPILER.decode()

#: All variants, including those that this machine does not support.
VARIANTS = tuple([ag_variant_names[v].decode() for v in range(AG_VARIANT_COUNT)])

# The CPU is asked once, as CPUID is slow in virtual machines.
cdef tuple _supported = tuple([VARIANTS[v] for v in range(AG_VARIANT_COUNT) if ag_variant_supported(<ag_variant>v)])
cdef ag_variant _active = ag_best_variant(AG_VARIANT_COUNT)
cdef ag_variant _best_without_amx = ag_best_variant(AG_VARIANT_AMX_BF16)

# Bytes of the L1, L2 and L3 caches, read once, as calls should not open files. If Linux does not tell them, sizes of
# small CPUs are assumed. They determine the sizes of blocks, never the order of a sum.
cdef long[4] _cache_sizes
# Number of L3 caches of the machine.
cdef int _l3_count


def force_cache_sizes(sizes=None, l3_count=None):
    """Assume these sizes of L1, L2 and L3 in bytes, and this number of L3 caches, or for None what the system tells."""
    global _l3_count
    cdef int level
    _l3_count = l3_count or ag_cache_count(3)
    for level in range(1, 4):
        _cache_sizes[level] = sizes[level - 1] if sizes else ag_cache_size(level, [0, 32 << 10, 512 << 10, 8 << 20][level])


force_cache_sizes()


#: Whether the operating system lets this process use AMX; -1: it was not asked yet.
cdef ag_permission _amx_permission = -1


cdef bint is_amx_permitted() noexcept nogil:
    """Return whether the operating system lets this process use AMX. It is asked once, at the first use."""
    global _amx_permission
    if _amx_permission < 0:
        _amx_permission = ag_request_amx()
    return _amx_permission


cdef ag_variant active() noexcept nogil:
    """Return the active variant. If the operating system refuses AMX, it is the next best one."""
    if _active == AG_VARIANT_AMX_BF16 and not is_amx_permitted():
        return _best_without_amx
    return _active


cdef long cache_size(int level) noexcept nogil:
    """Return the bytes of one cache of this level."""
    return _cache_sizes[level]


cdef Py_ssize_t shared_cache_size(int threads) noexcept nogil:
    """Return the bytes of all L3 caches that a team uses. Linux places its threads on as many of them as there are."""
    return <Py_ssize_t>_cache_sizes[3] * max(1, min(threads, _l3_count))


def supported_variants():
    """Return the names of the variants that this machine can run, worst first."""
    return _supported


def unsupported_reason(name):
    """Return why this machine cannot run a variant, or None. It asks the operating system for AMX."""
    cdef ag_variant variant = <ag_variant><int>VARIANTS.index(name)
    cdef const char *reason = ag_unsupported_reason(variant)
    if reason == NULL and variant == AG_VARIANT_AMX_BF16 and not is_amx_permitted():
        reason = "the operating system refuses the use of its tiles"
    return None if reason == NULL else reason.decode()


def variant():
    """Return the name of the active variant."""
    return VARIANTS[<int>active()]


def remarks():
    """Return why supported variants that are better by their instructions do not compute."""
    found = []
    for variant in range(<int>active() + 1, <int>AG_VARIANT_COUNT):
        if not ag_variant_supported(<ag_variant>variant):
            continue
        if variant == AG_VARIANT_AMX_BF16 and not is_amx_permitted():
            found.append(f"{VARIANTS[variant]} is refused by the operating system")
        elif ag_variant_is_slow(<ag_variant>variant):
            found.append(f"{VARIANTS[variant]} is slower on this CPU")
    return found


def force_amx_permission(permission=None):
    """Assume that the operating system grants or refuses AMX, or for None ask it again. For tests."""
    global _amx_permission
    _amx_permission = -1 if permission is None else permission


def force_variant(name):
    """Activate a variant, or for None the best one. Do not call this while other threads compute."""
    global _active
    if name is None:
        _active = ag_best_variant(AG_VARIANT_COUNT)
        return
    if name not in supported_variants():
        raise ValueError(f"variant: expected one of {', '.join(supported_variants())}, got {name!r}")
    _active = <ag_variant><int>VARIANTS.index(name)
