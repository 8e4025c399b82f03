/* What messages say: the advice when memory is out, device errors, and a device that does not open. */
#include "pools.h"

static void
test_advice(void) {
    static const struct {
        struct pya_oom_info info;
        const char *says;
    } rows[] = {
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .free_bytes = 50 * MIB,
          .limit_bytes = 40 * MIB},
         "the device has room, but the limit is 40.00 MiB: raise it"},
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .limit_bytes = SIZE_MAX,
          .reserved_bytes = 20 * MIB,
          .allocated_bytes = 20 * MIB},
         "80.00 MiB of the device are held outside"},
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .limit_bytes = SIZE_MAX,
          .reserved_bytes = 100 * MIB,
          .allocated_bytes = 20 * MIB,
          .private_bytes = 60 * MIB},
         "60.00 MiB lie idle in private pools"},
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .limit_bytes = SIZE_MAX,
          .reserved_bytes = 100 * MIB,
          .allocated_bytes = 20 * MIB,
          .has_vmm = true},
         "pieces smaller than a page"},
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .limit_bytes = SIZE_MAX,
          .reserved_bytes = 100 * MIB,
          .allocated_bytes = 20 * MIB},
         "virtual memory calls"},
        {{.requested_bytes = 8 * MIB,
          .total_bytes = 100 * MIB,
          .limit_bytes = SIZE_MAX,
          .reserved_bytes = 100 * MIB,
          .allocated_bytes = 99 * MIB},
         "use a smaller batch, or run `pyalloc report`"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[PYA_OOM_TEXT_BYTES];
        (void)pya_oom_text(&rows[i].info, text, sizeof text);
        if (!CHECK(strstr(text, rows[i].says) != NULL)) {
            fprintf(stderr, "    %s\n", text);
        }
    }
}

/* Free memory that the request could have used and, apart from it, what lies in private pools. */
static void
test_idle_memory_of_pools_is_told_apart(void) {
    struct world world = {.config = {0}};
    struct pya_oom_info info;
    pya_dptr ptr;
    pools_init(&world, "");
    pya_dptr held = take(&world, MIB, 0);
    pool_begin(&world);
    give(&world, take(&world, 20 * MIB, 0));
    CHECK_EQ(pya_alloc(world.heap, 0, 1024 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    CHECK_EQ(info.private_bytes, 0);
    CHECK_EQ(info.largest_free_bytes, 20 * MIB);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    CHECK_EQ(pya_alloc(world.heap, 0, 1024 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    CHECK(info.private_bytes >= 20 * MIB);
    CHECK(info.largest_free_bytes > 0 && info.largest_free_bytes < 4 * MIB);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    give(&world, held);
    world_fini(&world);
}

/* ---- device errors ---- */

static void
test_a_lost_device_is_explained_once(void) {
    struct world world = {.config = {.capacity_bytes = 256 * MIB}};
    char text[512];
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr first = take(&world, 4 * MIB, 0);
    pya_sim_fail(world.sim, PYA_SIM_ANY_CALL, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 60 * MIB, 0, &ptr), PYA_E_DEVICE);
    (void)pya_heap_error_text(world.heap, PYA_E_DEVICE, "allocation failed", 0, text, sizeof text);
    CHECK(strstr(text, "cuMemCreate of 2097152 bytes on GPU 0 returned ") != NULL);
    CHECK(strstr(text, "CUDA_LAUNCH_BLOCKING=1") != NULL);
    (void)pya_heap_error_text(world.heap, PYA_E_DEVICE, "trimming failed", -1, text, sizeof text);
    CHECK(strstr(text, "trimming failed: GPU 0 failed earlier") != NULL);
    CHECK(strstr(text, "CUDA_LAUNCH_BLOCKING") == NULL);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(pya_free(world.heap, first));
    (void)pya_sim_fail_clear(world.sim);
    world_fini(&world);
}

static void
test_error_text_without_a_device(void) {
    struct world world = {.config = {.capacity_bytes = 256 * MIB}};
    char text[512];
    world_init(&world, "");
    (void)pya_heap_error_text(world.heap, PYA_E_FOREIGN, "freeing failed", -1, text, sizeof text);
    CHECK(strcmp(text, "freeing failed: the pointer was not handed out by this allocator") == 0);
    (void)pya_heap_error_text(NULL, PYA_E_DEVICE, "it failed", 0, text, sizeof text);
    CHECK(strcmp(text, "it failed: a device call failed") == 0);
    world_fini(&world);
}

static const char *open_failed_in; /* "": unknown */

static void
why_not_open(void *arg, struct pya_device_error *out) {
    (void)arg;
    *out = (struct pya_device_error){.code = 35, .text = "too old"};
    (void)snprintf(out->call, sizeof out->call, "%s", open_failed_in);
}

/* Why a device could not be opened is said if known, for a status that can come of it, and never of an open device. */
static void
test_error_text_of_a_device_that_does_not_open(void) {
    static const struct {
        const char *call;
        pya_status status;
        int device;
        const char *says;
    } rows[] = {
        {"cuInit", PYA_E_DEVICE, 1,
         "it failed: a device call failed: GPU 1 could not be opened: cuInit returned 35 (too old). Check"},
        {"cuInit", PYA_E_NOTSUP, 1, "GPU 1 could not be opened: cuInit returned 35"},
        {"", PYA_E_DEVICE, 1, NULL},
        {"cuInit", PYA_E_FOREIGN, 1, NULL},
        {"cuInit", PYA_E_DEVICE, 0, NULL},
        {"cuInit", PYA_E_DEVICE, -1, NULL},
    };
    struct world world = {
        .config = {.capacity_bytes = 256 * MIB}, .hooks = {.open_error = why_not_open}};
    world_init(&world, "");
    give(&world, take(&world, MIB, 0));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[512];
        char plain[512];
        open_failed_in = rows[i].call;
        (void)pya_heap_error_text(
            world.heap, rows[i].status, "it failed", rows[i].device, text, sizeof text);
        (void)snprintf(plain, sizeof plain, "it failed: %s", pya_status_text(rows[i].status));
        const bool is_said =
            rows[i].says == NULL ? strcmp(text, plain) == 0 : strstr(text, rows[i].says) != NULL;
        if (!CHECK(is_said)) {
            fprintf(stderr, "    %s\n", text);
        }
    }
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"advice", test_advice},
    {"idle_memory_of_pools", test_idle_memory_of_pools_is_told_apart},
    {"a_lost_device_once", test_a_lost_device_is_explained_once},
    {"error_text_without_a_device", test_error_text_without_a_device},
    {"error_text_of_no_opening", test_error_text_of_a_device_that_does_not_open},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
