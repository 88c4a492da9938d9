from ascend_grad._call cimport Call

cpdef object run(Call call, int threads)
cpdef tuple description(Call call, int threads)
