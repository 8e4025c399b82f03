/* The options parser: the input is a size for the message, a byte that says what was set before, and the text. */
#include "core/options.h"
#include "fuzz.h"

enum { MAX_TEXT = 4096, MAX_MESSAGE = 300 };

/* A message fits its buffer, is terminated, and is not empty if there is room. */
static void
check_message(const char *message, size_t room) {
    for (size_t i = room; i < MAX_MESSAGE; i++) {
        REQUIRE(message[i] == '#');
    }
    REQUIRE(room == 0 || memchr(message, '\0', room) != NULL);
    REQUIRE(room <= 1 || message[0] != '\0');
}

static void
format_all(const struct pya_options *options, char *text, size_t room) {
    size_t n = 0;
    for (size_t i = 0; pya_option_name(i) != NULL; i++) {
        char value[64];
        int n_value = pya_option_format(options, i, value, sizeof value);
        REQUIRE(n_value > 0 && n_value < (int)sizeof value && pya_option_help(i) != NULL);
        n += (size_t)snprintf(
            text + n, room - n, "%s%s:%s", i == 0 ? "" : ",", pya_option_name(i), value);
        REQUIRE(n < room);
    }
}

/* Settings can be written down and read again with the same meaning. */
static void
check_round_trip(const struct pya_options *options) {
    char text[1000], again[1000], message[MAX_MESSAGE];
    struct pya_options parsed;
    pya_options_init(&parsed);
    format_all(options, text, sizeof text);
    REQUIRE_EQ(pya_options_parse(&parsed, text, message, sizeof message), PYA_OK);
    format_all(&parsed, again, sizeof again);
    REQUIRE(strcmp(text, again) == 0);
    REQUIRE(parsed.memory == options->memory && parsed.limit == options->limit);
    REQUIRE(options->memory >= PYA_MEMORY_TIGHT && options->memory <= PYA_MEMORY_FAST);
    REQUIRE(options->per_process_memory_fraction >= 0 && options->per_process_memory_fraction <= 1);
    REQUIRE(options->limit <= PYA_REQUEST_MAX && options->max_split_size <= PYA_REQUEST_MAX);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct fuzz_input in = {data, data + n};
    char text[MAX_TEXT + 1], message[MAX_MESSAGE];
    struct pya_options options, before;
    memset(&before, 0, sizeof before); /* padding too: they are compared as bytes */
    memset(message, '#', sizeof message);
    size_t room = fuzz_byte(&in);
    pya_options_init(&before);
    before.memory = fuzz_byte(&in) % 2 == 0 ? PYA_MEMORY_TIGHT : PYA_MEMORY_FAST;
    size_t n_text = fuzz_left(&in) < MAX_TEXT ? fuzz_left(&in) : MAX_TEXT;
    memcpy(text, in.at, n_text);
    text[n_text] = '\0';
    memcpy(&options, &before, sizeof options);
    pya_status st = pya_options_parse(&options, text, message, room);
    if (st == PYA_OK) {
        check_round_trip(&options);
        return 0;
    }
    REQUIRE_EQ(st, PYA_E_INVAL);
    REQUIRE(memcmp(&options, &before, sizeof options) == 0);
    check_message(message, room);
    return 0;
}
