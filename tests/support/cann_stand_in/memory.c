/* Test double of the Ascend runtime: device and page-locked memory, and the rules of copies. See stand_in.h.
 *
 * All devices' memory is one file in memory, mapped twice: the addresses handed out cannot be read or written, so that
 * a host that touches them crashes; only the stand-in uses the alias. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fcntl.h>

#define SPAN ((uint64_t)8 << 30) /* addresses per device */
enum { PAGE = 4096, ALIGNMENT = 64, POISON = 0xff /* NaN in every floating type */, POISONED = 1 << 20 };

struct allocation {
    char *start;
    uint64_t bytes;
    int device; /* -1: page-locked host memory */
    struct allocation *next;
};

static char *handed_out, *alias;
static int memory_file = -1;
static struct allocation *device_allocations, *host_allocations; /* device_allocations in the order of addresses */
static uint64_t next_page[MAX_DEVICES];           /* so that a freed address does not come back at once */
static int64_t device_bytes[MAX_DEVICES], device_count, host_bytes, host_count;

static uint64_t up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

static int map(void)
{
    if (handed_out)
        return OK;
    uint64_t size = SPAN * MAX_DEVICES;
    memory_file = memfd_create("cann_stand_in", MFD_CLOEXEC);
    if (memory_file < 0 || ftruncate(memory_file, (off_t)size))
        return si_fail(MEMORY_ALLOCATION, "no file in memory");
    char *first = mmap(NULL, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    char *second = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    if (first == MAP_FAILED || second == MAP_FAILED)
        return si_fail(MEMORY_ALLOCATION, "no addresses");
    madvise(second, size, MADV_DONTFORK);
    handed_out = first;
    alias = second;
    return OK;
}

static bool of_devices(const void *address)
{
    return handed_out && (const char *)address >= handed_out && (const char *)address < handed_out + SPAN * MAX_DEVICES;
}

char *si_alias(const void *address) { return alias + ((const char *)address - handed_out); }
char *si_reach(const void *address) { return of_devices(address) ? si_alias(address) : (char *)(uintptr_t)address; }

static struct allocation *allocation_around(struct allocation *list, const char *start, uint64_t bytes)
{
    for (; list; list = list->next)
        if (start >= list->start && start <= list->start + list->bytes &&
            bytes <= (uint64_t)(list->start + list->bytes - start))
            return list;
    return NULL;
}

enum si_place si_place(const void *address, uint64_t bytes, int *device)
{
    struct allocation *allocation;
    *device = -1;
    if (of_devices(address)) {
        if (!(allocation = allocation_around(device_allocations, address, bytes)))
            return PLACE_STRAY;
        *device = allocation->device;
        return PLACE_DEVICE;
    }
    return allocation_around(host_allocations, address, bytes) ? PLACE_LOCKED : PLACE_HOST;
}

/* Return the first page from `page` on that starts a gap of `pages` pages, or a page number beyond the device. */
static uint64_t gap(int device, uint64_t page, uint64_t pages)
{
    for (struct allocation *p = device_allocations; p; p = p->next) {
        if (p->device != device)
            continue;
        uint64_t offset = (uint64_t)(p->start - handed_out) - SPAN * (uint64_t)device;
        uint64_t first = offset / PAGE, end = up(offset + p->bytes, PAGE) / PAGE;
        if (end <= page)
            continue;
        if (page + pages <= first)
            break;
        page = end;
    }
    return page;
}

int si_device_malloc(int device, void **result, uint64_t bytes)
{
    if (bytes == 0)
        return si_misuse(INVALID_PARAM, "size is 0");
    if (device_bytes[device] + (int64_t)bytes > si_memory_limit() || bytes > SPAN / 2)
        return si_fail(MEMORY_ALLOCATION, "%llu bytes do not fit on device %d: %lld of %lld are in use",
                       (unsigned long long)bytes, device, (long long)device_bytes[device], (long long)si_memory_limit());
    int code = map();
    if (code)
        return code;
    /* 64 bytes into its first page: the alignment that is promised, and no better one */
    uint64_t pages = up(ALIGNMENT + bytes, PAGE) / PAGE + 1, page = gap(device, next_page[device], pages);
    if (page + pages > SPAN / PAGE)
        page = gap(device, 0, pages);
    if (page + pages > SPAN / PAGE)
        return si_fail(MEMORY_ALLOCATION, "no addresses left on device %d", device);
    next_page[device] = page + pages;
    struct allocation *allocation = si_allocate(1, sizeof *allocation), **place = &device_allocations;
    allocation->start = handed_out + SPAN * (uint64_t)device + page * PAGE + ALIGNMENT;
    allocation->bytes = bytes;
    allocation->device = device;
    while (*place && (*place)->start < allocation->start)
        place = &(*place)->next;
    allocation->next = *place;
    *place = allocation;
    memset(si_alias(allocation->start), POISON, bytes);
    device_count++;
    device_bytes[device] += (int64_t)bytes;
    ++*si_statistic("mallocs");
    int64_t total = si_memory_counter("device_bytes"), *peak = si_statistic("peak_device_bytes");
    if (total > *peak)
        *peak = total;
    *result = allocation->start;
    return OK;
}

static struct allocation *take(struct allocation **list, const void *start)
{
    for (; *list; list = &(*list)->next)
        if ((*list)->start == start) {
            struct allocation *allocation = *list;
            *list = allocation->next;
            return allocation;
        }
    return NULL;
}

int si_device_free(void *address)
{
    if (!address)
        return si_misuse(PARAM_INVALID, "NULL");
    struct allocation *allocation = take(&device_allocations, address);
    if (!allocation)
        return si_misuse(PARAM_INVALID, "%p is not the start of an allocation on a device", address);
    const char *user = si_conflict((struct si_range){allocation->start, allocation->bytes, true}, NULL);
    if (user)
        si_violation("memory that queued work still uses (%s)", user);
    uint64_t first = (uint64_t)(allocation->start - handed_out) - ALIGNMENT;
    fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first,
              (off_t)up(ALIGNMENT + allocation->bytes, PAGE));
    device_count--;
    device_bytes[allocation->device] -= (int64_t)allocation->bytes;
    free(allocation);
    return OK;
}

int si_host_malloc(void **result, uint64_t bytes)
{
    if (bytes == 0)
        return si_misuse(INVALID_PARAM, "size is 0");
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return si_fail(MEMORY_ALLOCATION, "%llu bytes of host memory", (unsigned long long)bytes);
    memset(start, POISON, bytes < POISONED ? bytes : POISONED); /* the rest stays 0, which is quicker */
    struct allocation *allocation = si_allocate(1, sizeof *allocation);
    *allocation = (struct allocation){start, bytes, -1, host_allocations};
    host_allocations = allocation;
    host_count++;
    host_bytes += (int64_t)bytes;
    ++*si_statistic("host_mallocs");
    *result = start;
    return OK;
}

int si_host_free(void *address)
{
    struct allocation *allocation = take(&host_allocations, address);
    if (!allocation)
        return si_misuse(PARAM_INVALID, "%p is not the start of page-locked memory", address);
    struct si_range range = {allocation->start, allocation->bytes, true};
    const char *user = si_conflict(range, NULL);
    if (user)
        si_violation("memory that queued work still uses (%s)", user);
    while (si_conflict(range, NULL))
        si_wait(); /* else the stand-in would crash, at a place that says nothing */
    munmap(allocation->start, allocation->bytes);
    host_count--;
    host_bytes -= (int64_t)allocation->bytes;
    free(allocation);
    return OK;
}

int64_t si_memory_counter(const char *name)
{
    if (strcmp(name, "device_allocations") == 0)
        return device_count;
    if (strcmp(name, "device_bytes") == 0) {
        int64_t total = 0;
        for (int i = 0; i < MAX_DEVICES; i++)
            total += device_bytes[i];
        return total;
    }
    if (strcmp(name, "host_allocations") == 0)
        return host_count;
    return strcmp(name, "host_bytes") == 0 ? host_bytes : -1;
}

static bool peers[MAX_DEVICES][MAX_DEVICES];

void si_allow_peer(int device, int peer)
{
    if (device >= 0 && device < MAX_DEVICES && peer >= 0 && peer < MAX_DEVICES)
        peers[device][peer] = peers[peer][device] = true;
}

static int check_end(const char *which, const void *address, uint64_t bytes, bool on_device, int device, bool later,
                     bool between_devices)
{
    static const char *const places[] = {"host memory", "page-locked memory", "device memory",
                                         "no allocation of any device, or beyond the end of one"};
    int owner;
    enum si_place place = si_place(address, bytes, &owner);
    if (on_device != (place == PLACE_DEVICE))
        return si_misuse(PARAM_INVALID, "%s is said to be on the %s, but is %s", which, on_device ? "device" : "host",
                         places[place]);
    if (on_device && owner != device && !(between_devices && peers[device][owner]))
        return si_misuse(PARAM_INVALID, "%s is on device %d, but device %d is current", which, owner, device);
    if (later && place == PLACE_HOST)
        return si_misuse(PARAM_INVALID, "%s is not page-locked, the copy would not be asynchronous", which);
    return OK;
}

int si_check_copy(void *dst, uint64_t dst_max, const void *src, uint64_t bytes, int kind, int device, bool later)
{
    static const char *const counts[] = {"copies_h2h", "copies_h2d", "copies_d2h", "copies_d2d"};
    static const char *const totals[] = {"bytes_h2h", "bytes_h2d", "bytes_d2h", "bytes_d2d"};
    if (!dst || !src)
        return si_misuse(PARAM_INVALID, "NULL");
    if (bytes == 0 || bytes > dst_max)
        return si_misuse(PARAM_INVALID, "%llu bytes into %llu", (unsigned long long)bytes, (unsigned long long)dst_max);
    if (kind < 0 || kind > 3)
        return si_misuse(PARAM_INVALID, "kind %d", kind);
    int code = check_end("dst", dst, bytes, kind == 1 || kind == 3, device, later, kind == 3);
    if (code == OK)
        code = check_end("src", src, bytes, kind == 2 || kind == 3, device, later, kind == 3);
    if (code == OK) {
        ++*si_statistic(counts[kind]);
        *si_statistic(totals[kind]) += (int64_t)bytes;
    }
    return code;
}
