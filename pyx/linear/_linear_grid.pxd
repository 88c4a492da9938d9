from ascend_grad cimport _cpu
from ascend_grad._linear_kernels cimport ag_linear_kernels
from ascend_grad._memory cimport ceil_div

cdef enum:
    PANELS_PER_TASK = 4               # most panels of a task; they stay in L2
    TASKS = 32                        # number of tasks of a product, if it is large enough
    MAX_TASK_FLOPS = 1 << 28          # most floating-point operations of a task, so that signals are checked in time


ctypedef struct Grid:
    # The tiles and panels of a product, cut into tasks.
    Py_ssize_t panels
    Py_ssize_t tiles
    Py_ssize_t panel_step             # panels of a task
    Py_ssize_t tile_step              # tiles of a task
    Py_ssize_t groups                 # number of tasks that the panels of a tile are cut into
    Py_ssize_t tasks


ctypedef struct Part:
    # The tiles and panels of one task.
    Py_ssize_t panel, panel_end, tile, tile_end


cdef inline Grid grid_of(
    const ag_linear_kernels *kernels, Py_ssize_t columns, Py_ssize_t rows, Py_ssize_t terms
) noexcept nogil:
    """Cut a product (rows, columns) into tasks; `terms` is the length of its sums."""
    cdef Grid grid
    cdef Py_ssize_t panels = ceil_div(columns, kernels.nr), tiles = ceil_div(rows, kernels.mr)
    cdef Py_ssize_t panel_bytes = terms * kernels.nr * kernels.element_size // kernels.pair
    cdef Py_ssize_t together = max(1, min(PANELS_PER_TASK, _cpu.cache_size(2) // 2 // max(panel_bytes, 1)))
    cdef Py_ssize_t most = MAX_TASK_FLOPS // (2 * kernels.mr * kernels.nr * max(terms, 1))
    grid.panels, grid.tiles = panels, tiles
    grid.groups = ceil_div(panels, together)
    grid.panel_step = ceil_div(panels, max(grid.groups, 1)) if panels else 1
    grid.groups = ceil_div(panels, grid.panel_step)
    grid.tile_step = max(min(ceil_div(tiles, max(TASKS // max(grid.groups, 1), 1)), most // grid.panel_step), 1)
    grid.tasks = grid.groups * ceil_div(tiles, grid.tile_step)
    return grid


cdef inline Grid with_tiles_together(Grid grid, Py_ssize_t multiple) noexcept nogil:
    """Return a grid whose tasks begin at multiples of some tiles, with fewer panels in a task if there were few tasks."""
    cdef Py_ssize_t rows
    grid.tile_step = ceil_div(grid.tile_step, multiple) * multiple
    rows = ceil_div(grid.tiles, grid.tile_step)
    grid.panel_step = max(min(grid.panel_step, grid.panels * rows // TASKS), 1)
    grid.groups = ceil_div(grid.panels, grid.panel_step)
    grid.tasks = grid.groups * rows
    return grid


cdef inline Part part_of(const Grid *grid, Py_ssize_t task) noexcept nogil:
    """Return the tiles and panels of a task."""
    cdef Part part
    part.panel, part.tile = task % grid.groups * grid.panel_step, task // grid.groups * grid.tile_step
    part.panel_end = min(part.panel + grid.panel_step, grid.panels)
    part.tile_end = min(part.tile + grid.tile_step, grid.tiles)
    return part
