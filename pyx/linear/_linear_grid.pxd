from ascend_grad cimport _cpu
from ascend_grad._linear_kernels cimport ag_linear_kernels
from ascend_grad._memory cimport ceil_div

cdef enum:
    PANELS_PER_TASK = 4               # most panels of a task; they stay in L2
    TASKS = 32                        # least number of tasks of a product, if it is large enough
    TASKS_PER_THREAD = 8              # and for each thread: the last round of tasks leaves threads idle
    LOAD = 16                         # cost of loading an operand's element from L3, in multiplications. Estimated
    MAX_TASK_FLOPS = 1 << 28          # most floating-point operations of a task, so that signals are checked in time


ctypedef struct Grid:
    # The tiles and panels of a product, cut into tasks.
    Py_ssize_t panels
    Py_ssize_t tiles
    Py_ssize_t panel_step             # panels of a task
    Py_ssize_t tile_step              # tiles of a task
    Py_ssize_t rows                   # number of tasks that the tiles of a panel are cut into
    Py_ssize_t tasks


ctypedef struct Part:
    # The tiles and panels of one task.
    Py_ssize_t panel, panel_end, tile, tile_end


cdef inline void cut_grid(Grid *grid, Py_ssize_t panel_step, Py_ssize_t tile_step) noexcept nogil:
    """Cut tiles and panels into tasks of at most these sizes."""
    grid.tile_step, grid.panel_step = tile_step, panel_step
    grid.rows = ceil_div(grid.tiles, tile_step)
    grid.tasks = ceil_div(grid.panels, panel_step) * grid.rows


cdef inline void balance(
    Grid *grid, const ag_linear_kernels *kernels, Py_ssize_t most_panels, Py_ssize_t most_tiles, int threads,
    Py_ssize_t multiple
) noexcept nogil:
    """Cut a product into the tasks that a large team is expected to complete first, at least four a thread if possible."""
    cdef Py_ssize_t panels, tiles, wanted, least_tasks, nr = kernels.nr, mr = kernels.mr
    cdef double time, least = -1
    cdef Grid cut = grid[0]
    cut_grid(grid, 1, multiple)
    least_tasks = min(grid.tasks, TASKS_PER_THREAD // 2 * threads)
    for panels in range(1, most_panels + 1):
        for wanted in range(TASKS_PER_THREAD // 2, 2 * TASKS_PER_THREAD):
            tiles = max(ceil_div(grid.tiles * ceil_div(grid.panels, panels), wanted * threads), 1)
            tiles = max(min(ceil_div(tiles, multiple), most_tiles // (panels * multiple)), 1) * multiple
            cut_grid(&cut, panels, tiles)
            time = ceil_div(cut.tasks, threads) * (mr * nr * tiles * panels + LOAD * (tiles * mr + panels * nr))
            if cut.tasks >= least_tasks and (least < 0 or time < least):
                least, grid[0] = time, cut


cdef inline Grid grid_of(
    const ag_linear_kernels *kernels, Py_ssize_t columns, Py_ssize_t rows, Py_ssize_t terms, int threads,
    Py_ssize_t multiple
) noexcept nogil:
    """Cut a product (rows, columns) into tasks. `terms` is the length of its sums.

    Tasks begin at multiples of `multiple` tiles. The number of threads does not change results, as a task has whole sums.
    """
    cdef Grid grid
    cdef Py_ssize_t panels = ceil_div(columns, kernels.nr), tiles = ceil_div(rows, kernels.mr), groups
    cdef Py_ssize_t panel_bytes = terms * kernels.nr * kernels.element_size // kernels.pair
    cdef Py_ssize_t together = max(1, min(PANELS_PER_TASK, _cpu.cache_size(2) // 2 // max(panel_bytes, 1)))
    cdef Py_ssize_t most = MAX_TASK_FLOPS // (2 * kernels.mr * kernels.nr * max(terms, 1))
    grid.panels, grid.tiles = panels, tiles
    if TASKS_PER_THREAD * threads > TASKS and panels and tiles:
        balance(&grid, kernels, together, most, threads, multiple)
        return grid
    together = ceil_div(panels, max(ceil_div(panels, together), 1)) if panels else 1
    groups = max(ceil_div(panels, together), 1)
    tiles = max(min(ceil_div(tiles, max(TASKS // groups, 1)), most // together), 1)
    tiles = ceil_div(tiles, multiple) * multiple
    if multiple > 1:
        together = max(min(together, panels * ceil_div(grid.tiles, tiles) // TASKS), 1)
    cut_grid(&grid, together, tiles)
    return grid


cdef inline Part part_of(const Grid *grid, Py_ssize_t task) noexcept nogil:
    """Return the tiles and panels of a task. Adjacent tasks share panels."""
    cdef Part part
    part.panel, part.tile = task // grid.rows * grid.panel_step, task % grid.rows * grid.tile_step
    part.panel_end = min(part.panel + grid.panel_step, grid.panels)
    part.tile_end = min(part.tile + grid.tile_step, grid.tiles)
    return part
