/* Functions of the dynamic loader and of threads, bound to symbol versions that every GNU C library has.
 *
 * GLIBC 2.34 moved these functions from libdl and libpthread to libc and gave their symbols new versions, although
 * nothing else changed. A module linked against the new versions would not load with an older C library, whichever tag
 * its wheel has. The old versions are still in libc. An older C library has them in libdl and libpthread, which the
 * interpreter has loaded for its own extension modules. */
#ifndef ASCEND_GRAD_GLIBC_H
#define ASCEND_GRAD_GLIBC_H

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

/* The conditions are nested, as other C libraries do not define __GLIBC_PREREQ, which has arguments. */
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 34)
#if defined(__x86_64__)
#define AG_GLIBC_VERSION "GLIBC_2.2.5"
#define AG_DLINFO_VERSION "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define AG_GLIBC_VERSION "GLIBC_2.17"
#define AG_DLINFO_VERSION "GLIBC_2.17"
#endif
#endif
#endif

#ifdef AG_GLIBC_VERSION
__asm__(".symver dlopen, dlopen@" AG_GLIBC_VERSION);
__asm__(".symver dlsym, dlsym@" AG_GLIBC_VERSION);
__asm__(".symver dladdr, dladdr@" AG_GLIBC_VERSION);
__asm__(".symver dlerror, dlerror@" AG_GLIBC_VERSION);
__asm__(".symver dlinfo, dlinfo@" AG_DLINFO_VERSION);
__asm__(".symver pthread_create, pthread_create@" AG_GLIBC_VERSION);
__asm__(".symver pthread_join, pthread_join@" AG_GLIBC_VERSION);
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@" AG_GLIBC_VERSION);
#endif

#endif
