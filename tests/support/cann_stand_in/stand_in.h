/* A test double of the Ascend runtime (CANN), for machines without a device. NOT a device, and never offered as one.
 *
 * It has the names and the binary interface of the real libraries, over host memory, with the arithmetic in plain scalar
 * code. It is strict where the device is strict, and in places stricter, so that misuse shows in a test and not on a device.
 * It shares no header with what it tests. `stand_in.py` beside this folder builds it and drives it.
 *
 *   stand_in.h    what the files here share
 *   state.c       calls, faults, violations, counters, handles: the control interface for tests
 *   memory.c      device and page-locked memory, copies
 *   streams.c     contexts, streams and the threads that do the queued work
 *   tensors.c     tensors, executors and the two phases of an operator
 *   numbers.c     elements of each data type
 *   systems.c     what each system on chip has
 *   variant.c     what a variant of the installation answers at start
 *   runtime.c, context.c, events.c                     -> libascendcl.so
 *   nnopbase.c, arguments.c                            -> libnnopbase.so
 *   softmax.c, scaled_masked_softmax.c, linear_cross_entropy.c, cross_entropy.c, top_k.c
 *   elementwise.c, reductions.c, products.c            -> the operator libraries
 *   torch_runtime.c                                    -> libascendcl.so: functions that only torch_npu calls or links with
 *   indexing.c, nll_loss.c                             -> libopapi.so: operators that only torch_npu calls
 *   link_time_stub.c                                   -> libraries to link with, where every call answers 100039
 *
 * Control interface (libcann_stand_in.so, by ctypes; the same in a child process by environment variables)
 *
 *   void stand_in_fail(const char *function, int64_t nth, int code)
 *       The nth call of the function from now on fails with this code; -nth: this one and all after it; 0: all. "*"
 *       counts all functions together (but for aclGetRecentErrMsg and aclrtGetSocName). What fails does nothing, and a
 *       function that returns a pointer returns NULL; but what releases something (destroy, free, finalize) does so and
 *       then reports the failure, so that trying again is misuse; aclrtSynchronizeStream waits before it reports the
 *       failure; and the second phase of an operator consumes its executor.
 *   void stand_in_fail_work(int64_t nth, int code)
 *       The work of the nth operator that is put on a stream from now on fails: it writes nothing, and the next wait for its
 *       stream or its device returns this code, once. The call that put it on the stream has succeeded by then.
 *   int stand_in_faults_left(void)               faults that will strike
 *   int64_t stand_in_calls(const char *function)  calls since the last reset; "*" for all that stand_in_fail counts
 *   int64_t stand_in_counter(const char *name)    -1 for an unknown name. Live objects, which must be 0 in the end:
 *       tensors arguments executors streams events contexts device_allocations device_bytes host_allocations host_bytes
 *       in_flight initialisations; since the last reset: violations launches event_waits mallocs host_mallocs
 *       deterministic_launches, and deterministic_plans (first phases under the option of the context),
 *       batch_invariant_plans (those under its level 3)
 *       synchronizations (the host's waits for streams, events and devices)
 *       copies_h2h copies_h2d copies_d2h copies_d2d bytes_h2h bytes_h2d bytes_d2h bytes_d2d peak_device_bytes
 *   int64_t stand_in_violations(char *text, size_t size)   number of broken rules, and what they were, one a line
 *   void stand_in_reset(void)                     forgets faults, violations, counts; live objects stay
 *   void stand_in_set_soc(const char *), stand_in_set_memory(int64_t bytes_per_device), stand_in_set_delay(int us)
 *   void stand_in_set_varying(int)                operators that are not deterministic by default add up in another order
 *                                                 in every other launch, unless the context's option is set
 *
 *   CANN_STAND_IN_SOC      what aclrtGetSocName answers, default Ascend910B2
 *   CANN_STAND_IN_DEVICES  number of devices, default 2
 *   CANN_STAND_IN_MEMORY   bytes per device, default 4 GiB
 *   CANN_STAND_IN_DELAY    microseconds an idle stream waits before it starts on new work, default 200
 *   CANN_STAND_IN_VARYING  1: as stand_in_set_varying
 *   CANN_STAND_IN_FAIL     function:nth:code,function:nth:code
 *   CANN_STAND_IN_REPORT   file that receives one line "name value" per counter, and "violation text" per broken rule,
 *                          when the process ends
 *
 * Rules beyond the device's own (each recorded as a violation, and refused with an error where there is one to give)
 *
 *   - The kind of a copy must say where the pointers live, on the device that is current; an asynchronous copy takes
 *     page-locked host memory only (the device would quietly copy synchronously).
 *   - A copy, or work on another stream, that touches memory which queued work still writes (or the reverse) is a race,
 *     unless an event orders the two.
 *   - Memory that queued work uses must not be freed. Streams with queued work must not be destroyed.
 *   - Tensors start at multiples of 64 bytes, their ranges with the padding of 32 bytes do not meet one another.
 *   - aclFinalize and aclrtResetDevice within a process end the device for everybody in it.
 *   - After fork() nothing works in the child, unless nothing was initialised before.
 *   - Targets of the fused gradient, on masked rows too, lie in [0, V): the device writes elsewhere, or forgets the -1.
 *   - Targets of the losses of logits lie in [0, C), or are ignored: the device reads elsewhere. Results of others are NaN.
 *   - Nothing is asked of the z-loss, which the device does not compute.
 */
#ifndef CANN_STAND_IN_H
#define CANN_STAND_IN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    OK = 0,
    INVALID_PARAM = 100000,
    UNINITIALIZE = 100001,
    REPEAT_INITIALIZE = 100002,
    REPEAT_FINALIZE = 100037,
    PARAM_INVALID = 107000,
    INVALID_DEVICEID = 107001,
    CONTEXT_NULL = 107002,
    STREAM_CONTEXT = 107003,
    INVALID_HANDLE = 107017,
    OPTION_NOT_SET = 107021,
    MEMORY_ALLOCATION = 207001,
    DRV_INTERNAL = 507899,
    NN_NULLPTR = 161001,
    NN_INVALID = 161002,
    NN_RUNTIME = 361001,
    NN_TILING = 561002,
    NN_FIND_KERNEL = 561003,
    NN_INNER_NULLPTR = 561103,
    NN_NO_KERNEL_PACKAGE = 561112,
};

enum { FLOAT = 0, FLOAT16 = 1, INT8 = 2, INT32 = 3, UINT8 = 4, INT16 = 6, INT64 = 9, DOUBLE = 11, BOOL = 12, BF16 = 27 };
enum { FORMAT_NCHW = 0, FORMAT_NHWC = 1, FORMAT_ND = 2, FORMAT_NCDHW = 30, FORMAT_NCL = 47, MAX_RANK = 8, MAX_TENSORS = 32, MAX_DEVICES = 8, SLOTS = 256, MAX_SCALARS = 3, OPTIONS = 4 };

/* --- control interface, see above ---------------------------------------------------------------------------------- */

void stand_in_fail(const char *function, int64_t nth, int code);
void stand_in_fail_work(int64_t nth, int code);
int stand_in_faults_left(void);
int64_t stand_in_calls(const char *function);
int64_t stand_in_counter(const char *name);
int64_t stand_in_violations(char *text, size_t size);
void stand_in_reset(void);
void stand_in_set_soc(const char *name);
void stand_in_set_memory(int64_t bytes_per_device);
void stand_in_set_delay(int microseconds);
void stand_in_set_varying(int whether);

/* --- state.c ------------------------------------------------------------------------------------------------------ */

/* Every entry point begins with si_enter, which takes the lock and returns the injected fault (or 0), and ends with
 * si_leave, which gives the lock back and returns its argument. */
int si_enter(const char *function);
int si_leave(int code);

/* Keep a message for aclGetRecentErrMsg and return the code; si_misuse records a violation as well. */
int si_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int si_misuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void si_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *si_take_message(void);

/* Wait for a change of any stream, with the lock given back meanwhile. */
void si_wait(void);
void si_notify(void);
void si_lock(void);
void si_unlock(void);

/* Handles given to the caller are addresses that cannot be read, and are never given out twice. */
enum si_kind { KIND_NONE, KIND_TENSOR, KIND_EXECUTOR, KIND_STREAM, KIND_CONTEXT, KIND_EVENT, KIND_ARGUMENT };
void *si_handle_new(enum si_kind kind, void *object);
void *si_handle_get(const void *handle, enum si_kind kind); /* NULL if it is not, or no longer, one of these */
void si_handle_drop(const void *handle);
const char *si_handle_state(const void *handle, enum si_kind kind); /* "a destroyed tensor", for messages */
int64_t si_handle_live(enum si_kind kind);
void *si_handle_garbage(void); /* not NULL, and not a handle of anything */

const char *si_soc(void);
int si_delay(void);
bool si_varying(void);
int64_t si_memory_limit(void);
int si_device_count(void);
int64_t *si_statistic(const char *name);
int si_default_device(void); /* of threads that are bound to none; -1 where there is none */
void si_configure(const char *path);
bool si_initialised(void);
int si_fault_of_work(void); /* the code with which the work of the operator that is queued now fails, or 0 */
int64_t si_initialisations(int change);

struct si_variant {
    int init_code, device_count_code;
    bool has_devices;
    int kernel_code; /* of the first phase of every operator: there are no kernels */
    bool before_9_2; /* the version of the toolkit */
};
extern const struct si_variant si_variant;

/* --- memory.c ----------------------------------------------------------------------------------------------------- */

enum si_place { PLACE_HOST, PLACE_LOCKED, PLACE_DEVICE, PLACE_STRAY };

/* Where these bytes are: within one allocation of page-locked or device memory, or ordinary; stray: in the range of the
 * devices' addresses, but not within one allocation. */
enum si_place si_place(const void *address, uint64_t bytes, int *device);
char *si_alias(const void *address); /* where the stand-in itself may touch the device memory at this address */
char *si_reach(const void *address); /* the same for any address */
int si_device_malloc(int device, void **result, uint64_t bytes);
int si_device_free(void *address);
int si_host_malloc(void **result, uint64_t bytes);
int si_host_free(void *address);
int si_check_copy(void *dst, uint64_t dst_max, const void *src, uint64_t bytes, int kind, int device, bool later);
void si_allow_peer(int device, int peer); /* copies between these two devices, from now on */
int64_t si_memory_counter(const char *name);

/* --- streams.c ---------------------------------------------------------------------------------------------------- */

struct si_context {
    int device;
    bool primary;
    int64_t options[OPTIONS]; /* by aclSysParamOpt: 0 is ACL_OPT_DETERMINISTIC */
    bool is_set[OPTIONS];     /* an option that nobody has set has no value */
};

struct si_range {
    const void *start;
    uint64_t bytes;
    bool written;
};

struct si_work {
    void (*run)(struct si_work *);
    void *data; /* freed afterwards */
    struct si_range ranges[MAX_TENSORS + 1];
    int range_count;
    const char *name;
    int error;       /* the work is not run, its stream gets this code; 0: none */
    uint64_t number; /* among the work of its stream's slot */
    struct si_work *next;
};

/* A point in the work of one stream, and what that is in order behind. */
struct si_mark {
    int slot;
    uint64_t number, after[SLOTS];
};

struct si_stream;

int si_need_context(struct si_context **context); /* of the calling thread, after initialisation */
bool si_is_context(void *handle);
void si_set_context(void *handle);
void *si_current_context(void);
void *si_primary_context(int device);
bool si_primary_is_active(int device);
int si_stream_new(struct si_context *context, void **handle);
int si_stream_destroy(void *handle);
int si_stream_wait(void *handle);
int si_stream_of(void *handle, struct si_stream **stream); /* of the calling thread's context */
void si_queue(struct si_stream *stream, struct si_work *work);
/* The name of queued work that conflicts with using this range; NULL if none. With `user`: with using it on this stream,
 * where what is in order before it does not conflict. */
const char *si_conflict(struct si_range range, const struct si_stream *user);
void si_mark(const struct si_stream *stream, struct si_mark *mark); /* everything that is on the stream now */
bool si_is_reached(const struct si_mark *mark);
void si_queue_wait(struct si_stream *stream, const struct si_mark *mark); /* what comes next waits for it */
bool si_stream_is_idle(const struct si_stream *stream);
int si_stream_slot(const struct si_stream *stream);
int si_stream_device(const struct si_stream *stream);
int si_device_wait(int device);
int64_t si_in_flight(void);
void si_streams_after_fork(void);

/* --- tensors.c ---------------------------------------------------------------------------------------------------- */

struct tensor {
    bool present;
    const void *handle;
    int dtype, rank;
    int64_t dims[MAX_RANK], strides[MAX_RANK], offset;
    char *data; /* address on the device */
    uint64_t storage_bytes;
};

typedef long double number; /* holds every int64 */

struct operation {
    const char *name;
    void (*kernel)(struct operation *, char *workspace);
    int count;                     /* tensors, some of them absent */
    struct tensor t[MAX_TENSORS];
    unsigned written;              /* bit i: tensor i is an output, or overwritten */
    bool keeps_executor_without_workspace;
    bool nothing_to_do;
    bool deterministic; /* the option of the context in the first phase */
    uint64_t workspace;
    int64_t dim, vocab_start, vocab_end;
    float scale, label_smoothing;
    enum si_reduction { REDUCTION_NONE, REDUCTION_SUM, REDUCTION_MEAN } reduction;
    int64_t ignore_index;
    bool on_every_system; /* the operators that every system has: nothing depends on the system's kernels */
    enum si_liberty { CONVERTS = 1, SPREADS = 2, SCALARS_MAY_BE_ABSENT = 4 } liberties; /* of an elementwise operator */
    number (*value)(const struct operation *, const number *x);
    number scalars[MAX_SCALARS]; /* NaN: absent */
    int64_t index;               /* of the element that `value` is asked for */
    unsigned axes;               /* bit k: axis k is reduced */
};

int si_tensor_new(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
                  const int64_t *storage_dims, uint64_t storage_rank, void *data, void **handle);
int si_tensor_destroy(const void *handle);
/* Shorten a dimension of a result whose length depends on values. aclGetViewShape then returns the new length. */
void si_tensor_shorten(const struct tensor *t, int dim, int64_t length);
int si_executor_repeat(void *handle);
int si_executor_destroy(void *handle);

/* First phase: si_prepare takes the lock and looks the tensors up; whatever happened then, si_finish ends the call. */
int si_prepare(struct operation *op, const char *function, const void *const *tensors, uint64_t *workspace_size,
               void **executor);
int si_finish(struct operation *op, int code, uint64_t *workspace_size, void **executor);
/* Second phase. */
int si_launch(const char *function, void *workspace, uint64_t workspace_size, void *executor, void *stream);
#define PHASE_2(name)                                                                                                  \
    int name(void *workspace, uint64_t size, void *executor, void *stream);                                            \
    int name(void *workspace, uint64_t size, void *executor, void *stream)                                             \
    {                                                                                                                  \
        return si_launch(#name, workspace, size, executor, stream);                                                    \
    }

int64_t si_numel(const struct tensor *t);
bool si_contiguous(const struct tensor *t);
int si_check_dim(struct operation *op); /* makes a negative dim the one it means */
bool si_same_shape(const struct tensor *a, const struct tensor *b);
bool si_has_shape(const struct tensor *t, int rank, const int64_t *dims);
int si_need(const struct operation *op, int index, const char *name);
int si_need_first(const struct operation *op, int count); /* these tensors */
int si_need_dtype(const struct operation *op, int index, const char *name, const char *allowed);

/* What an operator takes as one of its tensors. An absent tensor is right. */
struct si_expectation {
    int index;
    const char *name, *types;
    int rank;
    int64_t dims[3]; /* -1: any */
};

int si_check_dtypes(const struct operation *op, const struct si_expectation *expected, int count);
int si_check_equal_dtypes(const struct operation *op, int a, int b);
int si_check_shapes(const struct operation *op, const struct si_expectation *expected, int count, int code);

/* --- arguments.c -------------------------------------------------------------------------------------------------- */

enum si_argument_kind { SI_SCALAR, SI_INTEGERS, SI_BOOLEANS, SI_TENSORS };

struct si_argument {
    enum si_argument_kind kind;
    number value;
    int64_t count, items[]; /* integers, booleans, handles of tensors */
};

/* --- elementwise.c ------------------------------------------------------------------------------------------------ */

/* Run the first phase of an operator that every system has. `tensors` are the inputs, followed by `results` results. */
int si_prepare_plain(struct operation *op, const char *function, const void *const *tensors, int count, int results,
                     const void *const *scalars, int scalar_count);
int si_finish_plain(struct operation *op, int code, uint64_t *workspace_size, void **executor);
/* The element of a tensor at this index of a result, to whose shape the tensor is broadcast. */
char *si_element(const struct tensor *t, const struct tensor *result, int64_t index);
bool si_broadcasts(const struct tensor *t, const struct tensor *result);

#define BARE(...) __VA_ARGS__
#define PHASE_1(name, parameters)                                                                                      \
    int aclnn##name##GetWorkspaceSize(BARE parameters, uint64_t *workspace_size, void **executor);                     \
    PHASE_2(aclnn##name)                                                                                               \
    int aclnn##name##GetWorkspaceSize(BARE parameters, uint64_t *workspace_size, void **executor)

/* --- systems.c ---------------------------------------------------------------------------------------------------- */

bool si_soc_in(const char *families); /* of 910 910B 910_93 310P 310B 950, between spaces */
int si_find_kernel(const struct operation *op); /* what the first phase answers after all its checks */

/* --- numbers.c ---------------------------------------------------------------------------------------------------- */

uint64_t si_size(int dtype); /* bytes of an element; 0 for an unknown type */
const char *si_dtype_name(int dtype);
number si_number(const void *element, int dtype); /* exactly */
void si_put(char *element, int dtype, number value); /* rounded, integers modulo their range */
double si_load(const char *element, int dtype);
void si_store(char *element, int dtype, double value); /* rounded to float first, then to the type */
float si_round_to(int dtype, float value);
/* All elements of a tensor, in the order of its indices, to or from an array; the caller frees it. */
double *si_gather(const struct tensor *t);
float *si_gather_float(const struct tensor *t);
void si_scatter(const struct tensor *t, const double *values);
void *si_allocate(uint64_t count, uint64_t size);

#endif
