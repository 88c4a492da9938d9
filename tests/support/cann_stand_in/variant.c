/* Test double of an Ascend installation: what this variant of it answers at start. Chosen when it is compiled. */
#include "stand_in.h"

#ifndef INIT_CODE
#define INIT_CODE 0
#endif
#ifndef DEVICE_COUNT_CODE
#define DEVICE_COUNT_CODE 0
#endif
#ifndef HAS_DEVICES
#define HAS_DEVICES true
#endif
#ifndef KERNEL_CODE
#define KERNEL_CODE 0
#endif
#ifndef BEFORE_9_2
#define BEFORE_9_2 false
#endif

const struct si_variant si_variant = {INIT_CODE, DEVICE_COUNT_CODE, HAS_DEVICES, KERNEL_CODE, BEFORE_9_2};
