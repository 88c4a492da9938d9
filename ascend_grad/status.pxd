# Statuses that the functions of `rowwise` and `linear` return, numbered as in the device's libraries (`errors`).

cdef enum Status:
    SUCCESS = 0
    PARAM_NULLPTR = 161001            # a required view is None
    PARAM_INVALID = 161002            # extents, an overlap or a number that the operator does not take
    BAD_ALLOC = 200000                # no memory to work in; nothing was written
