/* Softmax, log-softmax and their gradients by oneDNN, for arrays of any strides: a rival in the benchmark.

   The benchmark compiles this file where it finds oneDNN. */

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdlib.h>
#include <string.h>

/* With other runtimes, the number of threads would not be that of the other sides. */
#if DNNL_CPU_RUNTIME != DNNL_RUNTIME_OMP
#error "it takes a oneDNN that is built with OpenMP"
#endif

enum { OPERANDS = 3 };

typedef struct {
    dnnl_primitive_t primitive;
    dnnl_stream_t stream;
    dnnl_exec_arg_t operands[OPERANDS];
    int num_operands, num_threads;
} rival;

static dnnl_engine_t engine;

/* Return the library's version as one number, such as 31400 for 3.14.0. */
int rival_version(void)
{
    const dnnl_version_t *version = dnnl_version();
    return 10000 * version->major + 100 * version->minor + version->patch;
}

void rival_free(rival *self)
{
    for (int i = 0; i < self->num_operands; ++i)
        dnnl_memory_destroy(self->operands[i].memory);
    dnnl_primitive_destroy(self->primitive);
    dnnl_stream_destroy(self->stream);
    free(self);
}

/* Prepare a call, or return NULL if oneDNN does not compute it.

   A forward call has two operands, its input and its result. A gradient has three: the upstream gradient, the output of
   the forward call, and the result. A type is 0 for float32, 1 for bfloat16 and 2 for float16. Strides are in elements.
   is_reference is set if oneDNN has only its plain loops for this call, and no kernel. */
rival *rival_new(int is_log, int num_operands, int rank, const int64_t *shape, int axis, const int *types,
                 const int64_t *const *strides, void *const *data, int num_threads, int *is_reference)
{
    static const dnnl_data_type_t TYPES[] = {dnnl_f32, dnnl_bf16, dnnl_f16};
    const int is_backward = num_operands == 3;
    const int forward_roles[] = {DNNL_ARG_SRC, DNNL_ARG_DST};
    const int backward_roles[] = {DNNL_ARG_DIFF_DST, DNNL_ARG_DST, DNNL_ARG_DIFF_SRC};
    const dnnl_alg_kind_t algorithm = is_log ? dnnl_softmax_log : dnnl_softmax_accurate;
    dnnl_memory_desc_t operands[OPERANDS] = {NULL};
    dnnl_primitive_desc_t forward = NULL, backward = NULL, chosen;
    const char *name = "";
    rival *self = calloc(1, sizeof *self);
    int failed = !self || (!engine && dnnl_engine_create(&engine, dnnl_cpu, 0));

    for (int i = 0; i < num_operands && !failed; ++i)
        failed = dnnl_memory_desc_create_with_strides(&operands[i], rank, shape, TYPES[types[i]], strides[i]);
    failed = failed || dnnl_stream_create(&self->stream, engine, dnnl_stream_default_flags);
    failed = failed || dnnl_softmax_forward_primitive_desc_create(
                           &forward, engine, is_backward ? dnnl_forward_training : dnnl_forward_inference, algorithm,
                           operands[is_backward], operands[1], axis, NULL);
    if (is_backward)
        failed = failed || dnnl_softmax_backward_primitive_desc_create(&backward, engine, algorithm, operands[2],
                                                                       operands[0], operands[1], axis, forward, NULL);
    chosen = is_backward ? backward : forward;
    failed = failed || dnnl_primitive_create(&self->primitive, chosen);
    for (int i = 0; i < num_operands && !failed; ++i) {
        self->operands[i].arg = is_backward ? backward_roles[i] : forward_roles[i];
        failed = dnnl_memory_create(&self->operands[i].memory, operands[i], engine, data[i]);
        self->num_operands += !failed;
    }
    if (!failed) {
        self->num_threads = num_threads;
        dnnl_primitive_desc_query(chosen, dnnl_query_impl_info_str, 0, &name);
        *is_reference = !strncmp(name, "ref", 3);
    }
    else if (self) {
        rival_free(self);
        self = NULL;
    }
    for (int i = 0; i < num_operands; ++i)
        dnnl_memory_desc_destroy(operands[i]);
    dnnl_primitive_desc_destroy(backward);
    dnnl_primitive_desc_destroy(forward);
    return self;
}

/* Compute a prepared call. Its result goes to out, or if that is NULL, to where the last one went. */
int rival_run(const rival *self, void *out)
{
    const int before = omp_get_max_threads();
    int failed = out && dnnl_memory_set_data_handle(self->operands[self->num_operands - 1].memory, out);
    omp_set_num_threads(self->num_threads);
    failed = failed || dnnl_primitive_execute(self->primitive, self->stream, self->num_operands, self->operands)
             || dnnl_stream_wait(self->stream);
    omp_set_num_threads(before);
    return failed;
}
