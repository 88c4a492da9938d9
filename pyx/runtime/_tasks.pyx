"""Phases of tasks on a team of threads, in the floating-point mode of the kernels, interruptible by signals.

A call starts its team once, by `run_team`. The calling thread then runs the call's program, which begins one phase after
another, while the other threads wait for phases (`team.h`). A team of one thread is only the calling thread.

If a signal's handler raises an exception, the tasks that no thread has begun are dropped, and `run_team` raises it.
"""

from cython.parallel cimport parallel, threadid
from libc.stdint cimport int64_t, uint32_t

from ascend_grad cimport _openmp, _threads
from ascend_grad._kernels cimport (
    ag_coarse_ns,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_monotonic_ns,
    ag_take,
    ag_team_add_busy,
    ag_team_arrive,
    ag_team_begin_phase,
    ag_team_cancel_phase,
    ag_team_complete_tasks,
    ag_team_end_phase,
    ag_team_fetch_task,
    ag_team_init,
    ag_team_shutdown,
    ag_team_wait_phase,
    ag_thread_ns,
)

cdef extern from "Python.h":
    # -1: a handler has raised an exception, which stays set in this thread until a function returns it.
    int PyErr_CheckSignals() noexcept

# Nanoseconds of computing after which signals are checked.
cdef double CHECK_INTERVAL = 40e6
# Least nanoseconds of serial work of a call whose threads' CPU time is read: a read takes up to 2.5 microseconds.
cdef double LEAST_CPU_TIME = 200e3

# What `record_teams` has collected: teams, and the phases of the last team.
cdef list _teams = []
cdef list _phases = []
cdef bint _is_recording = False


cdef bint is_check_due(double *last_check) noexcept nogil:
    """Return whether signals should be checked again; if so, the time of the last check becomes now."""
    cdef double time = ag_coarse_ns()
    if time - last_check[0] < CHECK_INTERVAL:
        return False
    last_check[0] = time
    return True


cdef bint raises_exception() noexcept with gil:
    """Let handlers of signals run, and return whether one has raised an exception."""
    return PyErr_CheckSignals() != 0


cdef int check_signals(double *last_check) except -1 nogil:
    """Let handlers of signals run, if the last check (0: none yet) was some time ago."""
    if last_check[0] == 0:
        last_check[0] = ag_coarse_ns()
    elif is_check_due(last_check) and raises_exception():
        return -1
    return 0


cdef bint is_cancelled(Team *team, int thread) noexcept nogil:
    """Return whether a task should end early. The calling thread of the team, number 0, checks signals at intervals."""
    if team.outer != NULL:
        team.is_cancelled = is_cancelled(team.outer, team.thread)
    if thread == 0 and not team.is_cancelled and team.last_check != NULL and is_check_due(team.last_check):
        team.is_cancelled = raises_exception()
    return team.is_cancelled


cdef void work(Team *team, int thread) noexcept nogil:
    """Compute tasks of the current phase until none is left.

    CPU time is measured for `record_team_times` alone, as reading its clock takes up to 2.5 microseconds.
    """
    cdef ag_fpenv mode = ag_fpenv_enter()
    cdef int64_t begin = ag_thread_ns() if team.measures else 0
    cdef Py_ssize_t task = ag_team_fetch_task(&team.team, thread)
    cdef uint32_t complete = 0
    while task >= 0:
        team.function(team.context, task, thread)
        complete += 1
        if thread == 0 and is_cancelled(team, 0):
            ag_team_cancel_phase(&team.team)
        task = ag_team_fetch_task(&team.team, thread)
    if team.measures:
        ag_team_add_busy(&team.team, ag_thread_ns() - begin)
    if complete:
        ag_team_complete_tasks(&team.team, complete)
    ag_fpenv_leave(mode)


cdef void run_serially(Team *team, task_function function, const void *context, Py_ssize_t tasks) noexcept nogil:
    """Compute all tasks of a phase on the calling thread. For the program of a call."""
    cdef ag_fpenv mode
    cdef Py_ssize_t task
    if team.is_cancelled:
        return
    mode = ag_fpenv_enter()
    for task in range(tasks):
        function(context, task, 0)
        if is_cancelled(team, 0):
            break
    ag_fpenv_leave(mode)


cdef void begin_nested(Team *team, Team *outer, int thread) noexcept nogil:
    """Make a team of one thread, which computes a task of the team `outer` as its thread `thread`."""
    ag_team_init(&team.team, 1, 1)
    team.default_threads, team.measures, team.is_cancelled, team.last_check = False, False, False, NULL
    team.outer, team.thread = outer, thread


cdef void run_phase(
    Team *team, task_function function, const void *context, Py_ssize_t tasks, bint by_thread
) noexcept nogil:
    """Compute all tasks of a phase. For the program of a call.

    `by_thread`: each thread begins with the same tasks in every call of the same size. Otherwise, a free thread fetches
    the next task.
    """
    cdef int64_t begin = 0
    if team.is_cancelled or not tasks:
        return
    if _is_recording and team.outer == NULL:
        record_phase(function, context, tasks, by_thread)
        return
    if team.team.size == 1 or tasks == 1 or (team.default_threads and _threads.is_oversubscribed()):
        run_serially(team, function, context, tasks)
        return
    team.function, team.context = function, context
    if team.measures:
        begin = ag_monotonic_ns()
    ag_team_begin_phase(&team.team, tasks, by_thread)
    work(team, 0)
    ag_team_end_phase(&team.team)
    if team.measures:
        _threads.record_team_times(<double>(ag_monotonic_ns() - begin), <double>ag_take(&team.team.busy))


cdef void wait_for_phases(Team *team, int thread) noexcept nogil:
    cdef uint32_t phase = ag_team_wait_phase(&team.team, 0)
    while phase:
        work(team, thread)
        phase = ag_team_wait_phase(&team.team, phase)


cdef int run_team(
    program_function program, void *context, int threads, bint default_threads, double cost, double *last_check
) except -1 nogil:
    """Run the program of a call on this thread, and its phases on a team of threads.

    `default_threads`: the caller gave no number of threads, so phases are serial while other processes keep the cores
    busy. `cost`: estimated nanoseconds of the call on one thread. `last_check`: time of the call's last check for
    signals, 0: none yet. NULL: signals are not checked, and nothing is raised.
    """
    cdef Team team
    cdef int64_t begin = 0
    cdef bint is_waking
    cdef int cores, started
    team.outer = NULL
    if last_check != NULL and last_check[0] == 0:
        last_check[0] = ag_coarse_ns()
    if _is_recording:
        team.is_cancelled, team.default_threads, team.last_check = False, False, NULL
        record_team(program, context, &team, threads)
        return 0
    if default_threads and threads > 1 and _threads.is_oversubscribed():
        threads = 1
    if not _openmp.can_start_team(threads):
        threads = 1
    team.is_cancelled, team.default_threads, team.last_check = False, default_threads, last_check
    team.measures = default_threads and cost >= LEAST_CPU_TIME
    cores = 1 if threads == 1 else _threads.usable_cores()
    ag_team_init(&team.team, threads, cores)
    if threads == 1:
        _openmp.record_team(1)
        program(context, &team)
    else:
        is_waking = _threads.may_sleep()
        started = _openmp.threads_to_start(threads, cores, not is_waking)
        begin = ag_monotonic_ns()
        with parallel(num_threads=started):
            if threadid() == 0:
                team.team.size = min(threads, _openmp.team_size())  # there may be fewer than asked for
                _openmp.record_team(team.team.size)
                program(context, &team)
                if team.measures:
                    team.end_of_phases = ag_monotonic_ns()
                ag_team_shutdown(&team.team)
            elif threadid() < threads:
                if is_waking:
                    ag_team_arrive(&team.team)
                wait_for_phases(&team, threadid())
        _openmp.record_pool(started)
        if is_waking and team.team.arrival:
            _threads.record_wake_time(<double>(team.team.arrival - begin))
        if team.measures:
            # Threads that lack a core also delay the end of the team.
            _threads.record_team_times(
                <double>(ag_monotonic_ns() - team.end_of_phases), <double>ag_take(&team.team.busy)
            )
        elif default_threads:
            _threads.record_short_call(<double>(ag_monotonic_ns() - begin), cost)
    _threads.record_end(threads)
    return -1 if team.is_cancelled else 0


ctypedef struct OnePhase:
    task_function function
    const void *context
    Py_ssize_t tasks


cdef void run_one_phase(void *context, Team *team) noexcept nogil:
    cdef const OnePhase *phase = <const OnePhase *>context
    run_phase(team, phase.function, phase.context, phase.tasks, False)


cdef int run_tasks(
    task_function function, const void *context, Py_ssize_t tasks, int threads, bint default_threads, double cost,
    double *last_check
) except -1 nogil:
    """Compute all tasks of a call of one phase; see `run_team`."""
    cdef OnePhase phase
    phase.function, phase.context, phase.tasks = function, context, tasks
    return run_team(run_one_phase, &phase, threads, default_threads, cost, last_check)


# ---- recorded calls --------------------------------------------------------------------------------------------------

cdef void record_phase(
    task_function function, const void *context, Py_ssize_t tasks, bint by_thread
) noexcept with gil:
    """Compute all tasks of a phase on the calling thread, and record the nanoseconds of each."""
    cdef list times = []
    cdef list phase = [ag_monotonic_ns(), 0, bool(by_thread), times]
    cdef int64_t before
    cdef ag_fpenv mode
    cdef Py_ssize_t task
    for task in range(tasks):
        mode = ag_fpenv_enter()
        before = ag_monotonic_ns()
        function(context, task, 0)
        times.append(ag_monotonic_ns() - before)
        ag_fpenv_leave(mode)
    _phases.append(phase)
    phase[1] = ag_monotonic_ns()  # last, as what the record takes is no work of the call


cdef void record_team(program_function program, void *context, Team *team, int threads) noexcept with gil:
    """Run the program of a call for a team of these threads, whose tasks the calling thread computes."""
    global _phases
    cdef list phases = []
    cdef int64_t begin = ag_monotonic_ns()
    _phases = phases
    ag_team_init(&team.team, threads, threads)
    program(context, team)  # with the interpreter's lock, as each phase would wait for it again
    _teams.append((threads, begin, ag_monotonic_ns(), phases))


def record_teams(call):
    """Return the teams of the calls that the function `call` makes, whose tasks the calling thread computes alone.

    A team is a tuple of its number of threads, of the monotonic times of its begin and its end in nanoseconds, and of its
    phases: begin, end, whether threads begin with certain tasks, and nanoseconds of each task. For the simulator of the
    benchmark. No other thread may compute meanwhile.
    """
    global _teams, _is_recording
    cdef list teams = []
    _teams, _is_recording = teams, True
    try:
        call()
    finally:
        _is_recording = False
    return teams
