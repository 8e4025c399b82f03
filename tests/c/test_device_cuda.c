/* What becomes of the driver's answers, on the host-memory runtime, which can be told to fail.  Without it, the only
 * test is that a device cannot be opened. */
#include "check.h"

#include "device/cuda.h"
#include "driver.h"

/* NULL: no device, or a card. */
static struct pya_device *
open_card(void) {
    struct pya_device *dev = NULL;
    if (!fail_nth(0, NULL, 0)) {
        CHECK(pya_cuda_open(PYA_MAX_DEVICES, &dev) != PYA_OK);
        return NULL;
    }
    return CHECK_OK(pya_cuda_open(0, &dev)) ? dev : NULL;
}

static void
test_errors_are_told_apart(void) {
    static const struct {
        int code;
        pya_status status;
        bool is_sticky;
    } each[] = {
        {2, PYA_E_NOMEM, false},    {600, PYA_E_NOMEM, false},   {801, PYA_E_NOTSUP, false},
        {899, PYA_E_DEVICE, false}, {900, PYA_E_CAPTURE, false}, {908, PYA_E_CAPTURE, false},
        {909, PYA_E_DEVICE, false}, {1, PYA_E_DEVICE, false},    {999, PYA_E_DEVICE, false},
        {214, PYA_E_DEVICE, true},  {220, PYA_E_DEVICE, true},   {700, PYA_E_DEVICE, true},
        {702, PYA_E_DEVICE, true},  {710, PYA_E_DEVICE, true},   {713, PYA_E_DEVICE, false},
        {714, PYA_E_DEVICE, true},  {719, PYA_E_DEVICE, true},   {720, PYA_E_DEVICE, false},
        {226, PYA_E_DEVICE, true},  {721, PYA_E_DEVICE, true},   {810, PYA_E_DEVICE, true},
    };
    struct pya_device *dev = open_card();
    for (size_t i = 0; dev != NULL && i < sizeof each / sizeof *each; i++) {
        struct pya_device_error error;
        pya_dptr addr = 5;
        CHECK(fail_nth(1, "cuMemAlloc_v2", each[i].code));
        CHECK_EQ(pya_device_plain_alloc(dev, 3 * PYA_PAGE, &addr), each[i].status);
        CHECK_EQ(addr, 5);
        pya_device_error(dev, &error);
        CHECK_EQ(strcmp(error.call, "cuMemAlloc"), 0);
        CHECK_EQ(error.code, each[i].code);
        CHECK_EQ(error.bytes, 3 * PYA_PAGE);
        CHECK_EQ(error.is_sticky, each[i].is_sticky);
        CHECK(error.text[0] != '\0');
    }
    pya_device_close(dev);
}

/* A driver that is shutting down has taken everything back, whether the call says so or entering the context does. */
static void
test_giving_back_at_the_end_is_no_error(void) {
    static const char *const calls[] = {"cuMemFree_v2", "cuCtxGetCurrent"};
    struct pya_device *dev = open_card();
    pya_dptr addr = 0;
    if (dev == NULL || !CHECK_OK(pya_device_plain_alloc(dev, PYA_PAGE, &addr))) {
        return;
    }
    for (int code = 3; code <= 4; code++) {
        for (size_t i = 0; i < 2; i++) {
            CHECK(fail_nth(1, calls[i], code));
            CHECK_OK(pya_device_plain_free(dev, addr));
        }
    }
    CHECK(fail_nth(1, calls[0], 1));
    CHECK_EQ(pya_device_plain_free(dev, addr), PYA_E_DEVICE);
    CHECK(fail_nth(1, calls[1], 4));
    pya_dptr other = 0;
    CHECK_EQ(pya_device_plain_alloc(dev, PYA_PAGE, &other), PYA_E_DEVICE);
    CHECK_OK(pya_device_plain_free(dev, addr));
    pya_device_close(dev);
}

/* Whatever is wrong with an event, it is not done. */
static void
test_an_event_that_cannot_be_asked(void) {
    struct pya_device *dev = open_card();
    pya_event event = 0;
    if (dev == NULL || !CHECK_OK(pya_device_event_create(dev, PYA_STREAM_DEFAULT, &event))) {
        return;
    }
    bool done = true;
    CHECK(fail_nth(1, "cuEventQuery", 600));
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(!done);
    CHECK(fail_nth(1, "cuEventQuery", 700));
    CHECK_EQ(pya_device_event_query(dev, event, &done), PYA_E_DEVICE);
    CHECK(!done);
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done);
    CHECK_OK(pya_device_event_destroy(dev, event));
    pya_device_close(dev);
}

/* May the device use the page at addr? */
static unsigned long long
access_of(int device, pya_dptr addr) {
    const int location[] = {1, device};
    unsigned long long flags = 7;
    int (*get_access)(unsigned long long *, const int *, pya_dptr) = NULL;
    void *symbol = cuda_symbol("cuMemGetAccess");
    memcpy(&get_access, &symbol, sizeof get_access);
    CHECK_OK(get_access(&flags, location, addr));
    return flags;
}

static void
test_peers(void) {
    struct pya_device *dev = open_card();
    struct pya_device_error error;
    pya_page_handle page = 0;
    pya_dptr addr = 0;
    if (dev == NULL || !CHECK_EQ(pya_cuda_count(), 2)) {
        return;
    }
    for (int wrong = -1; wrong <= PYA_MAX_DEVICES; wrong++) {
        if (wrong != 1) {
            CHECK_EQ(pya_device_set_peer(dev, wrong, true), PYA_E_INVAL);
            CHECK_EQ(pya_device_set_peer(dev, wrong, false), PYA_E_INVAL);
        }
    }
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_OK(pya_device_range_reserve(dev, PYA_PAGE, &addr));
    CHECK_OK(pya_device_map(dev, addr, page, 1));
    CHECK(fail_nth(1, "cuDeviceCanAccessPeer", 999));
    CHECK_EQ(pya_device_set_peer(dev, 1, true), PYA_E_DEVICE);
    CHECK_OK(pya_device_set_access(dev, addr, PYA_PAGE));
    CHECK_EQ(access_of(1, addr), 0);
    CHECK_OK(pya_device_set_peer(dev, 1, true));
    CHECK(fail_nth(1, "cuMemSetAccess", 205));
    CHECK_EQ(pya_device_set_access(dev, addr, PYA_PAGE), PYA_E_DEVICE);
    pya_device_error(dev, &error);
    CHECK_EQ(error.code, 205);
    CHECK_EQ(error.peers, 1 << 1);
    CHECK_OK(pya_device_set_access(dev, addr, PYA_PAGE));
    CHECK_EQ(access_of(1, addr), 3);
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_set_peer(dev, 1, false));
    CHECK_OK(pya_device_map(dev, addr, page, 1));
    CHECK_OK(pya_device_set_access(dev, addr, PYA_PAGE));
    CHECK_EQ(access_of(1, addr), 0);
    /* Only the other device is given access to what is already accessible here. */
    CHECK_OK(pya_device_open_peer(dev, 1, addr, PYA_PAGE));
    CHECK_EQ(access_of(1, addr), 3);
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_map(dev, addr, page, 1));
    CHECK_OK(pya_device_open_peer(dev, 1, addr, PYA_PAGE));
    CHECK_EQ(access_of(0, addr), 0);
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, page));
    CHECK_OK(pya_device_range_release(dev, addr, PYA_PAGE));
    pya_device_close(dev);
}

/* The context of another device is fetched when its default stream is first met. */
static void
test_failed_call_is_named(void) {
    static const char *const calls[] = {
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuEventCreate"};
    struct pya_device *dev = open_card();
    for (size_t i = 0; dev != NULL && i < sizeof calls / sizeof *calls; i++) {
        struct pya_device_error error;
        pya_event event = 0;
        CHECK(fail_nth(1, calls[i], 999));
        CHECK(pya_device_event_create(dev, pya_stream_of_device(0, 0), &event) == PYA_E_DEVICE);
        pya_device_error(dev, &error);
        CHECK_EQ(strncmp(error.call, calls[i], strlen(error.call)), 0);
    }
    pya_device_close(dev);
}

static const struct check_case cases[] = {
    {"errors_are_told_apart", test_errors_are_told_apart},
    {"giving_back_at_the_end", test_giving_back_at_the_end_is_no_error},
    {"event_that_cannot_be_asked", test_an_event_that_cannot_be_asked},
    {"peers", test_peers},
    {"failed_call_is_named", test_failed_call_is_named},
};

int
main(int argc, char **argv) {
    (void)setenv("PYALLOC_HOSTCUDA_DEVICES", "2", 1); /* before the driver is first used */
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
