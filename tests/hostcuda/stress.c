/* Threads that map, alias, copy, allocate, record and capture at once, for the sanitizers to watch. Exits with 0 if
 * every answer was right and nothing is left. */

#define _GNU_SOURCE
#include "abi.h"
#include "hostcuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ((size_t)2 << 20)
#define N_THREADS 4
#define N_ROUNDS 60

int cuMemAddressReserve(uintptr_t *, size_t, size_t, uintptr_t, unsigned long long);
int cuMemAddressFree(uintptr_t, size_t);
int cuMemCreate(uint64_t *, size_t, const struct cuda_vmm_prop *, unsigned long long);
int cuMemRelease(uint64_t);
int cuMemMap(uintptr_t, size_t, size_t, uint64_t, unsigned long long);
int cuMemUnmap(uintptr_t, size_t);
int cuMemSetAccess(uintptr_t, size_t, const struct cuda_access_desc *, size_t);
int cuMemAlloc_v2(uintptr_t *, size_t);
int cuMemFree_v2(uintptr_t);
int cuMemcpyHtoD_v2(uintptr_t, const void *, size_t);
int cuMemcpyDtoH_v2(void *, uintptr_t, size_t);
int cuMemcpyDtoD_v2(uintptr_t, uintptr_t, size_t);
int cuMemAllocAsync(uintptr_t *, size_t, void *);
int cuMemFreeAsync(uintptr_t, void *);
int cuStreamCreate(void **, unsigned);
int cuStreamDestroy_v2(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);
int cuEventCreate(void **, unsigned);
int cuEventDestroy_v2(void *);
int cuEventRecord(void *, void *);
int cuEventQuery(void *);
int cuMemsetD8Async(uintptr_t, unsigned char, size_t, void *);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphLaunch(void *, void *);
int cuGraphDestroy(void *);
int cuGraphExecDestroy(void *);
int cuDeviceGetDefaultMemPool(void **, int);
int cuMemPoolTrimTo(void *, size_t);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, unsigned *);

static _Atomic int n_wrong;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            n_wrong++;                                                                             \
        }                                                                                          \
    } while (0)

static void
stress_aliases(uint32_t stamp) {
    struct cuda_vmm_prop prop = {.type = 1, .location = {1, 0}};
    struct cuda_access_desc access = {{1, 0}, 3};
    uintptr_t home = 0;
    uintptr_t alias = 0;
    uint64_t handles[2] = {0, 0};
    CHECK(cuMemAddressReserve(&home, 2 * PAGE, 0, 0, 0) == 0);
    CHECK(cuMemAddressReserve(&alias, 2 * PAGE, 0, 0, 0) == 0);
    for (size_t i = 0; i < 2; i++) {
        CHECK(cuMemCreate(&handles[i], PAGE, &prop, 0) == 0);
        CHECK(cuMemMap(home + i * PAGE, PAGE, 0, handles[i], 0) == 0);
        CHECK(cuMemMap(alias + (1 - i) * PAGE, PAGE, 0, handles[i], 0) == 0);
    }
    CHECK(cuMemSetAccess(home, 2 * PAGE, &access, 1) == 0);
    CHECK(cuMemSetAccess(alias, 2 * PAGE, &access, 1) == 0);
    uint32_t back = 0;
    CHECK(cuMemcpyHtoD_v2(home + 8, &stamp, sizeof stamp) == 0);
    CHECK(cuMemcpyDtoH_v2(&back, alias + PAGE + 8, sizeof back) == 0);
    CHECK(back == stamp);
    CHECK(cuMemUnmap(alias, 2 * PAGE) == 0);
    CHECK(cuMemRelease(handles[0]) == 0);
    CHECK(cuMemUnmap(home, 2 * PAGE) == 0);
    CHECK(cuMemRelease(handles[1]) == 0);
    CHECK(cuMemRelease(handles[1]) == CU_INVALID_VALUE);
    CHECK(cuMemAddressFree(home, 2 * PAGE) == 0);
    CHECK(cuMemAddressFree(alias, 2 * PAGE) == 0);
}

static void
stress_plain(uint32_t stamp, void *stream) {
    uintptr_t plain = 0;
    uintptr_t pooled = 0;
    void *event = NULL;
    uint32_t back = 0;
    CHECK(cuMemAlloc_v2(&plain, PAGE + 1) == 0);
    CHECK(cuMemAllocAsync(&pooled, 100000, stream) == 0);
    CHECK(cuMemcpyHtoD_v2(plain, &stamp, sizeof stamp) == 0);
    CHECK(cuMemcpyDtoD_v2(pooled, plain, 100000) == 0);
    CHECK(cuMemcpyDtoH_v2(&back, pooled, sizeof back) == 0);
    CHECK(back == stamp);
    CHECK(cuEventCreate(&event, 2) == 0);
    CHECK(cuEventRecord(event, stream) == 0);
    CHECK(cuEventQuery(event) == 0);
    CHECK(cuEventDestroy_v2(event) == 0);
    CHECK(cuMemFreeAsync(pooled, stream) == 0);
    CHECK(cuMemFree_v2(plain) == 0);
}

static void
stress_graph(void *stream) {
    uintptr_t plain = 0;
    void *graph = NULL;
    void *exec = NULL;
    unsigned char back = 0;
    CHECK(cuMemAlloc_v2(&plain, PAGE) == 0);
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED) == 0);
    CHECK(cuMemsetD8Async(plain, 7, 100, stream) == 0);
    CHECK(cuStreamEndCapture(stream, &graph) == 0);
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    CHECK(cuGraphDestroy(graph) == CU_INVALID_VALUE);
    CHECK(cuGraphLaunch(exec, stream) == 0);
    CHECK(cuGraphExecDestroy(exec) == 0);
    CHECK(cuMemcpyDtoH_v2(&back, plain + 99, 1) == 0);
    CHECK(back == 7);
    CHECK(cuMemFree_v2(plain) == 0);
}

static void *
stress_thread(void *argument) {
    uint32_t stamp = (uint32_t)(uintptr_t)argument << 16;
    void *stream = NULL;
    void *context = NULL;
    void *found = NULL;
    CHECK(cuGetProcAddress_v2("cuMemMap", &found, 12000, 0, NULL) == 0 && found != NULL);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    CHECK(cuStreamCreate(&stream, STREAM_NON_BLOCKING) == 0);
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        stress_aliases(stamp + round);
        stress_plain(stamp + round, stream);
        stress_graph(stream);
    }
    CHECK(cuStreamDestroy_v2(stream) == 0);
    return NULL;
}

int
main(void) {
    pthread_t threads[N_THREADS];
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, stress_thread, (void *)(i + 1)) == 0);
    }
    for (size_t i = 0; i < N_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    void *pool = NULL;
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0) == 0);
    CHECK(cuMemPoolTrimTo(pool, 0) == 0);
    static const char *const kinds[] = {"plain",   "handles", "reservations", "mappings",
                                        "streams", "events",  "graphs",       "pinned"};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        CHECK(pya_hostcuda_live(kinds[i]) == 0);
    }
    CHECK(pya_hostcuda_used_bytes(0) == 0);
    CHECK(pya_hostcuda_peak_bytes(0) > 0);
    return n_wrong == 0 ? 0 : 1;
}
