/* The options table: parsing, formatting, nearest names.  Floor 1. */
#define _GNU_SOURCE /* uselocale under -std=c11 */
#include "options.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "numerals.h"

enum option_kind { KIND_CHOICE, KIND_BOOL, KIND_BYTES, KIND_REAL, KIND_SECONDS, KIND_COUNT };

struct option {
    const char *name;
    const char *help;
    enum option_kind kind;
    size_t offset;
};

static const struct option option_table[] = {
#define X(kind, name, initial, help) {#name, help, KIND_##kind, offsetof(struct pya_options, name)},
    PYA_OPTION_TABLE(X)
#undef X
};

enum { N_OPTIONS = sizeof option_table / sizeof option_table[0] };

/* 31 years; also in nanoseconds far below 64 bits. */
#define SECONDS_MAX 1e9

/* torch's keys without effect here: what they request is always so, or does not exist.  All keys of pinned host
 * memory (pinned_*) are accepted as well. */
static const char *const ignored_keys[] = {
    "backend",
    "expandable_segments",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
};

struct choice {
    const char *option;
    const char *name;
    int value;
};

static const struct choice choice_table[] = {
    {"memory", "tight", PYA_MEMORY_TIGHT},
    {"memory", "balanced", PYA_MEMORY_BALANCED},
    {"memory", "fast", PYA_MEMORY_FAST},
};

enum { N_CHOICES = sizeof choice_table / sizeof choice_table[0], TOKEN_BYTES = 96 };

void
pya_options_init(struct pya_options *options) {
#define X(kind, name, initial, help) options->name = initial;
    PYA_OPTION_TABLE(X)
#undef X
    options->layouts = NULL;
}

static size_t
smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Number of edits that turn one short name into the other. */
static size_t
edit_distance(const char *a, const char *b) {
    size_t row[TOKEN_BYTES + 1];
    size_t n = strlen(b);
    if (n > TOKEN_BYTES) {
        return SIZE_MAX;
    }
    for (size_t j = 0; j <= n; j++) {
        row[j] = j;
    }
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = smaller(change, smaller(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

static const char *
nearest_name(const char *key) {
    const char *best = NULL;
    size_t best_distance = strlen(key) / 2 + 1;
    for (size_t i = 0; i < N_OPTIONS; i++) {
        size_t distance = edit_distance(key, option_table[i].name);
        if (distance < best_distance) {
            best = option_table[i].name;
            best_distance = distance;
        }
    }
    return best;
}

/* strtod() with a decimal point in every locale. */
static double
parse_decimal(const char *text, char **end) {
    struct pya_numerals numerals = pya_numerals_begin();
    double value = strtod(text, end);
    pya_numerals_end(numerals);
    return value;
}

/* "4096", "512MB", "1.5 GiB": K, M, G and T are powers of 1024, as everywhere in GPU memory. */
static bool
parse_bytes(const char *text, size_t *out) {
    char *end;
    double value = parse_decimal(text, &end);
    if (end == text || !(value >= 0)) {
        return false;
    }
    end += strspn(end, " ");
    static const char units[] = "KMGT";
    const char *unit = isalpha((unsigned char)*end) ? strchr(units, *end & ~0x20) : NULL;
    if (unit != NULL) {
        value *= (double)((uint64_t)1 << (10 * (unit - units + 1)));
        end++;
        end += (*end | 0x20) == 'i';
    }
    end += (*end | 0x20) == 'b';
    if (*end != '\0' || value >= (double)PYA_REQUEST_MAX) {
        return false;
    }
    /* Whoever writes half a byte means a share of the card; and 0 bytes would mean no limit. */
    const bool is_fraction = unit == NULL ? (double)(size_t)value != value : value > 0 && value < 1;
    if (is_fraction) {
        return false;
    }
    *out = (size_t)value;
    return true;
}

static bool
parse_bool(const char *text, int *out) {
    static const char *const yes[] = {"true", "1", "on", "yes"};
    static const char *const no[] = {"false", "0", "off", "no"};
    for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++) {
        if (strcasecmp(text, yes[i]) == 0 || strcasecmp(text, no[i]) == 0) {
            *out = strcasecmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

static bool
parse_choice(const char *option, const char *text, int *out) {
    for (size_t i = 0; i < N_CHOICES; i++) {
        if (strcmp(choice_table[i].option, option) == 0 &&
            strcmp(choice_table[i].name, text) == 0) {
            *out = choice_table[i].value;
            return true;
        }
    }
    return false;
}

static bool
parse_real(const char *text, double most, double *out) {
    char *end;
    double value = parse_decimal(text, &end);
    if (end == text || *end != '\0' || !(value >= 0 && value <= most)) {
        return false;
    }
    *out = value;
    return true;
}

static bool
parse_count(const char *text, size_t *out) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || text[0] == '-' || value > 1U << 20) {
        return false;
    }
    *out = (size_t)value;
    return true;
}

static bool
option_set(struct pya_options *options, const struct option *option, const char *text) {
    void *field = (char *)options + option->offset;
    switch (option->kind) {
    case KIND_CHOICE:
        return parse_choice(option->name, text, field);
    case KIND_BOOL:
        return parse_bool(text, field);
    case KIND_BYTES:
        return parse_bytes(text, field);
    case KIND_REAL:
        return parse_real(text, 1, field);
    case KIND_SECONDS:
        return parse_real(text, SECONDS_MAX, field);
    case KIND_COUNT:
        return parse_count(text, field);
    }
    return false;
}

static const struct option *
option_find(const char *key) {
    for (size_t i = 0; i < N_OPTIONS; i++) {
        if (strcmp(option_table[i].name, key) == 0) {
            return &option_table[i];
        }
    }
    return NULL;
}

static bool
key_is_ignored(const char *key) {
    for (size_t i = 0; i < sizeof ignored_keys / sizeof ignored_keys[0]; i++) {
        if (strcmp(ignored_keys[i], key) == 0) {
            return true;
        }
    }
    return strncmp(key, "pinned_", 7) == 0;
}

/* NULL: the option's help begins with the accepted names. */
static const char *
kind_wants(enum option_kind kind) {
    switch (kind) {
    case KIND_CHOICE:
        return NULL;
    case KIND_BOOL:
        return "True or False";
    case KIND_BYTES:
        return "a size such as 512MB or 20GiB";
    case KIND_REAL:
        return "a number from 0 to 1";
    case KIND_SECONDS:
        return "a number of seconds from 0 to 1000000000";
    case KIND_COUNT:
        return "a whole number up to 1048576";
    }
    return "something else";
}

static pya_status
option_apply(
    struct pya_options *options, const char *key, const char *value, char *message,
    size_t message_bytes) {
    const struct option *option = option_find(key);
    const char *meant = value;
    char with_unit[TOKEN_BYTES + 4];
    if (option == NULL && strcmp(key, "max_split_size_mb") == 0) {
        (void)snprintf(with_unit, sizeof with_unit, "%sMB", value);
        option = option_find("max_split_size");
        meant = with_unit;
    } else if (option == NULL && key_is_ignored(key)) {
        return PYA_OK;
    }
    if (option == NULL) {
        const char *nearest = nearest_name(key);
        (void)snprintf(
            message, message_bytes, "unknown option '%s'; %s%s%s`pyalloc doctor` lists all options",
            key, nearest == NULL ? "" : "did you mean '", nearest == NULL ? "" : nearest,
            nearest == NULL ? "" : "'? ");
        return PYA_E_INVAL;
    }
    if (!option_set(options, option, meant)) {
        const char *wants = meant == with_unit ? "a number of MiB" : kind_wants(option->kind);
        (void)snprintf(
            message, message_bytes, "option '%s' cannot be '%s': it takes %s%s%s", key, value,
            wants == NULL ? "" : wants, wants == NULL ? "" : "; it is: ", option->help);
        return PYA_E_INVAL;
    }
    return PYA_OK;
}

/* Copies the text between the two pointers without surrounding spaces.  False: it does not fit. */
static bool
token_copy(const char *from, const char *end, char *token) {
    while (from < end && *from == ' ') {
        from++;
    }
    while (end > from && end[-1] == ' ') {
        end--;
    }
    size_t n = (size_t)(end - from);
    if (n >= TOKEN_BYTES) {
        return false;
    }
    memcpy(token, from, n);
    token[n] = '\0';
    return true;
}

pya_status
pya_options_parse(
    struct pya_options *options, const char *text, char *message, size_t message_bytes) {
    struct pya_options parsed = *options;
    while (*text != '\0') {
        char key[TOKEN_BYTES], value[TOKEN_BYTES];
        const char *end = text + strcspn(text, ",");
        const char *colon = memchr(text, ':', (size_t)(end - text));
        /* torch writes lists as [256:1,512:2]; no option here needs one. */
        bool is_short =
            colon != NULL && token_copy(text, colon, key) && token_copy(colon + 1, end, value);
        if (!is_short) {
            (void)snprintf(
                message, message_bytes, "'%.*s%s", (int)(end - text > 60 ? 60 : end - text), text,
                colon == NULL ? "' is not of the form key:value, such as memory:tight"
                              : "...' is longer than any option or value");
            return PYA_E_INVAL;
        }
        pya_status st = option_apply(&parsed, key, value, message, message_bytes);
        if (st != PYA_OK) {
            return st;
        }
        text = *end == ',' ? end + 1 : end;
    }
    *options = parsed;
    return PYA_OK;
}

const char *
pya_option_name(size_t index) {
    return index < N_OPTIONS ? option_table[index].name : NULL;
}

const char *
pya_option_help(size_t index) {
    return index < N_OPTIONS ? option_table[index].help : NULL;
}

static const char *
choice_name(const char *option, int value) {
    for (size_t i = 0; i < N_CHOICES; i++) {
        if (strcmp(choice_table[i].option, option) == 0 && choice_table[i].value == value) {
            return choice_table[i].name;
        }
    }
    return "?";
}

static int
format_decimal(double value, char *buffer, size_t bytes) {
    struct pya_numerals numerals = pya_numerals_begin();
    int length = snprintf(buffer, bytes, "%g", value);
    pya_numerals_end(numerals);
    return length;
}

int
pya_option_format(const struct pya_options *options, size_t index, char *buffer, size_t bytes) {
    if (index >= N_OPTIONS) {
        return -1;
    }
    const struct option *option = &option_table[index];
    const char *field = (const char *)options + option->offset;
    int number;
    size_t count;
    double real;
    switch (option->kind) {
    case KIND_CHOICE:
        memcpy(&number, field, sizeof number);
        return snprintf(buffer, bytes, "%s", choice_name(option->name, number));
    case KIND_BOOL:
        memcpy(&number, field, sizeof number);
        return snprintf(buffer, bytes, "%s", number ? "True" : "False");
    case KIND_REAL:
    case KIND_SECONDS:
        memcpy(&real, field, sizeof real);
        return format_decimal(real, buffer, bytes);
    case KIND_BYTES:
    case KIND_COUNT:
        memcpy(&count, field, sizeof count);
        return snprintf(buffer, bytes, "%zu", count);
    }
    return -1;
}
