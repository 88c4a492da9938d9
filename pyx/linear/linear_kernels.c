/* The linear kernels with AG_KERNEL_LANES lanes: setup.py compiles this file once for each number of lanes. */
#include "ascend_grad/linear/linear.h"
