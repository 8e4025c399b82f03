#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#define MIB (1ull << 20)
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
static CUmemAllocationProp prop;
static CUmemAccessDesc acc;
static CUcontext ctx;
static void ck(CUresult r, const char *w) { if (r) { const char *n; cuGetErrorName(r, &n); printf("%s: %d %s\n", w, r, n ? n : "?"); } }
#define CK(x) ck((x), #x)
static int cmp(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }
static double med(double *v, int n) { qsort(v, n, sizeof *v, cmp); return v[n / 2]; }
static void handles(size_t size, int n, int one_call) {
    enum { R = 9 };
    double t[6][R];
    CUmemGenericAllocationHandle *h = calloc(n, sizeof *h);
    for (int r = 0; r < R; r++) {
        CUdeviceptr p; CK(cuMemAddressReserve(&p, size * n, 0, 0, 0));
        double a = now();
        for (int i = 0; i < n; i++) CK(cuMemCreate(&h[i], size, &prop, 0));
        double b = now(); t[0][r] = (b - a) / n;
        for (int i = 0; i < n; i++) CK(cuMemMap(p + i * size, size, 0, h[i], 0));
        a = now(); t[1][r] = (a - b) / n;
        if (one_call) CK(cuMemSetAccess(p, size * n, &acc, 1));
        else for (int i = 0; i < n; i++) CK(cuMemSetAccess(p + i * size, size, &acc, 1));
        b = now(); t[2][r] = (b - a) / n;
        if (one_call) CK(cuMemUnmap(p, size * n));
        else for (int i = 0; i < n; i++) CK(cuMemUnmap(p + i * size, size));
        a = now(); t[3][r] = (a - b) / n;
        for (int i = 0; i < n; i++) CK(cuMemRelease(h[i]));
        b = now(); t[4][r] = (b - a) / n;
        CK(cuMemAddressFree(p, size * n));
        a = now(); t[5][r] = a - b;
    }
    printf("handle %5llu MiB x %5d %s: create %8.2f map %6.2f access %8.2f unmap %8.2f release %8.2f us each; sum per 2 MiB %.2f\n",
        size / MIB, n, one_call ? "one call " : "each call", med(t[0], R), med(t[1], R), med(t[2], R), med(t[3], R), med(t[4], R),
        (med(t[0], R) + med(t[1], R) + med(t[2], R)) / (size / MIB / 2));
    fflush(stdout);
    free(h);
}
static void plain(size_t size, int n) {
    enum { R = 9 };
    double t[2][R]; CUdeviceptr *p = calloc(n, sizeof *p);
    for (int r = 0; r < R; r++) {
        double a = now();
        for (int i = 0; i < n; i++) CK(cuMemAlloc(&p[i], size));
        double b = now(); t[0][r] = (b - a) / n;
        for (int i = 0; i < n; i++) CK(cuMemFree(p[i]));
        a = now(); t[1][r] = (a - b) / n;
    }
    printf("cuMemAlloc %5llu MiB x %d: %.2f, cuMemFree %.2f us each; per 2 MiB %.2f\n", size / MIB, n, med(t[0], R), med(t[1], R), med(t[0], R) / (size / MIB / 2.));
    free(p); fflush(stdout);
}
static void offsets(void) {
    CUmemGenericAllocationHandle h; CUdeviceptr p;
    CK(cuMemCreate(&h, 64 * MIB, &prop, 0));
    CK(cuMemAddressReserve(&p, 256 * MIB, 0, 0, 0));
    printf("map whole: "); CK(cuMemMap(p, 64 * MIB, 0, h, 0)); puts("");
    printf("map 2 MiB at offset 0 a second time: "); ck(cuMemMap(p + 64 * MIB, 2 * MIB, 0, h, 0), "refused"); puts("");
    printf("map 2 MiB at offset 2 MiB: "); ck(cuMemMap(p + 128 * MIB, 2 * MIB, 2 * MIB, h, 0), "refused"); puts("");
    printf("map 62 MiB at offset 2 MiB: "); ck(cuMemMap(p + 192 * MIB, 62 * MIB, 2 * MIB, h, 0), "refused"); puts("");
    printf("access: "); ck(cuMemSetAccess(p, 64 * MIB, &acc, 1), "refused"); puts("");
    printf("access of 2 MiB within: "); ck(cuMemSetAccess(p + 8 * MIB, 2 * MIB, &acc, 1), "refused"); puts("");
    printf("unmap 2 MiB within: "); ck(cuMemUnmap(p + 8 * MIB, 2 * MIB), "refused"); puts("");
    printf("unmap of nothing: "); ck(cuMemUnmap(p + 240 * MIB, 2 * MIB), "refused"); puts("");
    printf("unmap whole: "); ck(cuMemUnmap(p, 64 * MIB), "refused"); puts("");
    fflush(stdout);
}
struct work { CUdeviceptr p; int n; CUmemGenericAllocationHandle *h; double create, access, unmap; };
static void *thread(void *arg) {
    struct work *w = arg; cuCtxSetCurrent(ctx);
    double a = now();
    for (int i = 0; i < w->n; i++) CK(cuMemCreate(&w->h[i], 2 * MIB, &prop, 0));
    double b = now(); w->create = b - a;
    for (int i = 0; i < w->n; i++) CK(cuMemMap(w->p + i * 2 * MIB, 2 * MIB, 0, w->h[i], 0));
    a = now();
    CK(cuMemSetAccess(w->p, w->n * 2 * MIB, &acc, 1));
    b = now(); w->access = b - a;
    CK(cuMemUnmap(w->p, w->n * 2 * MIB));
    a = now(); w->unmap = a - b;
    for (int i = 0; i < w->n; i++) CK(cuMemRelease(w->h[i]));
    return NULL;
}
static void threads(int k, int n) {
    pthread_t t[16]; struct work w[16];
    for (int i = 0; i < k; i++) { w[i].n = n; w[i].h = calloc(n, 8); CK(cuMemAddressReserve(&w[i].p, n * 2 * MIB, 0, 0, 0)); }
    double a = now();
    for (int i = 0; i < k; i++) pthread_create(&t[i], NULL, thread, &w[i]);
    for (int i = 0; i < k; i++) pthread_join(t[i], NULL);
    double b = now();
    printf("%d threads x %d pages: %.2f us a page in all; thread 0: create %.2f access %.2f unmap %.2f each\n", k, n, (b - a) / n / k, w[0].create / n, w[0].access / n, w[0].unmap / n);
    for (int i = 0; i < k; i++) { CK(cuMemAddressFree(w[i].p, n * 2 * MIB)); free(w[i].h); }
    fflush(stdout);
}
static double speed(CUdeviceptr p, CUdeviceptr q, size_t bytes) {
    CUevent e[2]; float ms; double v[15];
    cuEventCreate(&e[0], 0); cuEventCreate(&e[1], 0);
    for (int r = 0; r < 15; r++) {
        cuEventRecord(e[0], 0);
        for (int k = 0; k < 4; k++) CK(cuMemcpyDtoDAsync(q, p, bytes, 0));
        cuEventRecord(e[1], 0); cuEventSynchronize(e[1]); cuEventElapsedTime(&ms, e[0], e[1]); v[r] = ms / 4;
    }
    return 2. * bytes / 1e6 / med(v, 15);
}
static double setspeed(CUdeviceptr p, size_t bytes) {
    CUevent e[2]; float ms; double v[15];
    cuEventCreate(&e[0], 0); cuEventCreate(&e[1], 0);
    for (int r = 0; r < 15; r++) {
        cuEventRecord(e[0], 0);
        for (int k = 0; k < 4; k++) CK(cuMemsetD32Async(p, r, bytes / 4, 0));
        cuEventRecord(e[1], 0); cuEventSynchronize(e[1]); cuEventElapsedTime(&ms, e[0], e[1]); v[r] = ms / 4;
    }
    return bytes / 1e6 / med(v, 15);
}
static void speeds(size_t bytes, size_t unit, int shuffle) {
    int n = 2 * bytes / unit; CUdeviceptr home, view; CUmemGenericAllocationHandle *h = calloc(n, sizeof *h);
    int *order = calloc(n, sizeof *order); for (int i = 0; i < n; i++) order[i] = i;
    srand(1); for (int i = n - 1; i > 0; i--) { int j = rand() % (i + 1), t = order[i]; order[i] = order[j]; order[j] = t; }
    CK(cuMemAddressReserve(&home, 2 * bytes, 0, 0, 0));
    for (int i = 0; i < n; i++) { CK(cuMemCreate(&h[i], unit, &prop, 0)); }
    for (int i = 0; i < n; i++) CK(cuMemMap(home + i * unit, unit, 0, h[shuffle ? order[i] : i], 0));
    CK(cuMemSetAccess(home, 2 * bytes, &acc, 1));
    printf("%5zu MiB of %3zu MiB handles%s: copy %.0f set %.0f GB/s\n", bytes >> 20, unit >> 20, shuffle ? " shuffled" : "", speed(home, home + bytes, bytes), setspeed(home, bytes));
    fflush(stdout);
    CK(cuMemUnmap(home, 2 * bytes)); for (int i = 0; i < n; i++) CK(cuMemRelease(h[i])); CK(cuMemAddressFree(home, 2 * bytes)); free(h); free(order); (void)view;
}
static void plains(size_t bytes) {
    CUdeviceptr a, b; CK(cuMemAlloc(&a, bytes)); CK(cuMemAlloc(&b, bytes));
    printf("%5zu MiB of cuMemAlloc: copy %.0f set %.0f GB/s\n", bytes >> 20, speed(a, b, bytes), setspeed(a, bytes)); fflush(stdout);
    cuMemFree(a); cuMemFree(b);
}
static void busy(void) {
    CUstream s; CUdeviceptr a, b, p; CUmemGenericAllocationHandle h; CK(cuStreamCreate(&s, 1));
    CK(cuMemAlloc(&a, 1024 * MIB)); CK(cuMemAlloc(&b, 1024 * MIB)); CK(cuMemAddressReserve(&p, 64 * MIB, 0, 0, 0));
    for (int i = 0; i < 600; i++) CK(cuMemcpyDtoDAsync(b, a, 1024 * MIB, s));
    double t0 = now(); CK(cuMemCreate(&h, 2 * MIB, &prop, 0)); double t1 = now(); CK(cuMemMap(p, 2 * MIB, 0, h, 0)); double t2 = now();
    CK(cuMemSetAccess(p, 2 * MIB, &acc, 1)); double t3 = now(); CK(cuMemUnmap(p, 2 * MIB)); double t4 = now(); CK(cuMemRelease(h)); double t5 = now();
    CUdeviceptr c; CK(cuMemAlloc(&c, 20 * MIB)); double t6 = now();
    int pending = cuStreamQuery(s) == CUDA_ERROR_NOT_READY;
    CK(cuMemFree(c)); double t7 = now();
    printf("busy card: create %.1f map %.1f access %.1f unmap %.1f release %.1f alloc %.1f (still busy: %d) free %.1f us, done after it: %d\n", t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, t6 - t5, pending, t7 - t6, cuStreamQuery(s) == CUDA_SUCCESS);
    fflush(stdout);
}
int main(void) {
    CUdevice d; cuInit(0); CK(cuDeviceGet(&d, 0)); CK(cuDevicePrimaryCtxRetain(&ctx, d)); CK(cuCtxSetCurrent(ctx));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED; prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE; prop.location.id = d;
    acc.location = prop.location; acc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    size_t g; cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED); printf("granularity recommended %zu", g);
    cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM); printf(", minimum %zu\n", g);
    size_t sizes[] = {2048, 1024, 256, 64};
    for (int k = 0; k < 4; k++) {
        plains(sizes[k] * MIB);
        for (size_t u = 2; u <= 64; u *= 2) if (u <= sizes[k]) speeds(sizes[k] * MIB, u * MIB, 0);
        for (size_t u = 2; u <= 64; u *= 2) if (u <= sizes[k]) speeds(sizes[k] * MIB, u * MIB, 1);
        plains(sizes[k] * MIB);
    }
    return 0;
}
