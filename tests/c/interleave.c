/* Runs the steps of a few threads in every order.
 *
 * To find a thread's next operation, its function runs again from the start with the results that its operations had so
 * far.  So a state is these results and the model's memory.  All states are visited, each once.  Results only grow, so
 * there are no cycles: every state in which nothing can run must be a good end.
 *
 * The model's memory is weak.  A place remembers the values stored in it.  A load may return any value that is not
 * older than what its thread knows of; what a thread knows passes from release to acquire, through read-modify-write
 * steps too. These steps, and the kernel's look at a futex, see the newest value.  A sleeper may wake and a weak
 * exchange may fail for no reason.  (Not modelled: stores that become visible later, fences, and consume.) */
#include "interleave.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

enum { N_THREADS = 3, N_PLACES = 12, N_MESSAGES = 12, N_RESULTS = 64 };

struct message {
    uint64_t value;
    uint8_t view[N_PLACES]; /* what a thread knows of once it acquires this */
};

enum status { AWAKE, ASLEEP, DONE };

struct thread {
    enum status status;
    int round;
    int sleeps_on;
    enum interleave_kind last;
    int n_results;
    uint8_t view[N_PLACES]; /* for each place: the oldest message that the thread may still read */
    uint64_t results[N_RESULTS];
    struct interleave_op next;
    int place; /* of `next` */
};

struct state {
    int n_messages[N_PLACES];
    struct message messages[N_PLACES][N_MESSAGES];
    struct thread threads[N_THREADS];
    int n_spurious; /* wakes and failures of weak exchanges that are left to try */
};

static struct {
    const struct interleave_scenario *scenario;
    interleave_mutate *mutate;
    const volatile void *addresses[N_PLACES];
    int n_places;
    struct state *state; /* the one being run */
    int thread;
    int position; /* in the results of `thread` */
    struct interleave_op op;
    jmp_buf out;
    struct interleave_result result;
    uint64_t (*seen)[2];
    size_t n_room;
} model;

/* ---- what the code under test calls ---- */

void
interleave_expect(bool good, const char *what) {
    if (!good && model.result.why == NULL) {
        model.result.why = what;
    }
}

static void
give_up(const char *why) {
    interleave_expect(false, why);
    model.result.is_too_large = true;
}

static int
place_of(const volatile void *address) {
    for (int i = 0; i < model.n_places; i++) {
        if (model.addresses[i] == address) {
            return i;
        }
    }
    interleave_expect(false, "a place was not declared");
    return 0;
}

static uint64_t
result(void) {
    return model.state->threads[model.thread].results[model.position++];
}

uint64_t
interleave_step(struct interleave_op op) {
    if (model.position == model.state->threads[model.thread].n_results) {
        model.op = op;
        longjmp(model.out, 1);
    }
    return result();
}

bool
interleave_compare(struct interleave_op op, uint64_t *was) {
    uint64_t value = interleave_step(op);
    bool is_done = result() != 0;
    if (!is_done) {
        *was = value;
    }
    return is_done;
}

long
interleave_futex(const uint32_t *address, int what, uint32_t value) {
    enum interleave_kind kind = (what & FUTEX_CMD_MASK) == FUTEX_WAIT ? WAIT : WAKE;
    return (long)interleave_step((struct interleave_op){
        .kind = kind, .address = address, .value = value, .expected = value});
}

/* ---- the model ---- */

static bool
acquires(int order) {
    return order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}

static bool
releases(int order) {
    return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}

static void
join(uint8_t *view, const uint8_t *other) {
    for (int i = 0; i < N_PLACES; i++) {
        view[i] = view[i] < other[i] ? other[i] : view[i];
    }
}

uint64_t
interleave_newest(const volatile void *address) {
    int place = place_of(address);
    return model.state->messages[place][model.state->n_messages[place] - 1].value;
}

void
interleave_place(const volatile void *address, uint64_t value) {
    int place = model.n_places;
    if (place == N_PLACES) {
        give_up("more places than the model has room for");
        return;
    }
    model.n_places++;
    model.addresses[place] = address;
    model.state->n_messages[place] = 1;
    model.state->messages[place][0].value = value;
}

static void
give_result(struct thread *thread, uint64_t value) {
    if (thread->n_results == N_RESULTS) {
        give_up("a thread has more steps than the model has room for");
        return;
    }
    thread->results[thread->n_results++] = value;
}

static void
read_message(struct state *state, struct thread *thread, int place, int i, int order) {
    thread->view[place] = (uint8_t)i;
    if (acquires(order)) {
        join(thread->view, state->messages[place][i].view);
    }
}

/* replaced: the message that a read-modify-write step read; what it carries passes on. */
static void
write_message(
    struct state *state, struct thread *thread, const struct interleave_op *op, uint64_t value,
    const struct message *replaced) {
    int place = thread->place;
    int i = state->n_messages[place];
    if (i == N_MESSAGES) {
        give_up("a place has more values than the model has room for");
        return;
    }
    struct message *message = &state->messages[place][i];
    state->n_messages[place]++;
    message->value = value;
    thread->view[place] = (uint8_t)i;
    if (replaced != NULL) {
        join(message->view, replaced->view);
    }
    message->view[place] = (uint8_t)i;
    if (releases(op->order)) {
        join(message->view, thread->view);
    }
}

/* Drops messages that nobody can read any more, so that states differ only in what matters. */
static void
forget_old(struct state *state) {
    for (int p = 0; p < model.n_places; p++) {
        int oldest = state->n_messages[p] - 1;
        for (int t = 0; t < model.scenario->n_threads; t++) {
            const struct thread *thread = &state->threads[t];
            oldest = thread->status != DONE && thread->view[p] < oldest ? thread->view[p] : oldest;
        }
        if (oldest == 0) {
            continue;
        }
        int left = state->n_messages[p] - oldest;
        memmove(
            state->messages[p], state->messages[p] + oldest, (size_t)left * sizeof(struct message));
        memset(state->messages[p] + left, 0, (size_t)oldest * sizeof(struct message));
        state->n_messages[p] = left;
        for (int t = 0; t < N_THREADS; t++) {
            int view = state->threads[t].view[p] - oldest;
            state->threads[t].view[p] = (uint8_t)(view < 0 ? 0 : view);
        }
        for (int q = 0; q < model.n_places; q++) {
            for (int i = 0; i < state->n_messages[q]; i++) {
                int view = state->messages[q][i].view[p] - oldest;
                state->messages[q][i].view[p] = (uint8_t)(view < 0 ? 0 : view);
            }
        }
    }
}

/* False: the thread has one more operation to do, model.op. */
static bool
runs_to_end(int t, int round) {
    model.thread = t;
    model.position = 0;
    if (setjmp(model.out) != 0) {
        return false;
    }
    model.scenario->run(t, round);
    return true;
}

/* Runs the thread up to its next operation. */
static void
settle(struct state *state, int t) {
    struct thread *thread = &state->threads[t];
    model.state = state;
    while (runs_to_end(t, thread->round)) {
        memset(thread->results, 0, sizeof thread->results);
        thread->n_results = 0;
        if (++thread->round == model.scenario->n_rounds) {
            thread->status = DONE;
            return;
        }
    }
    thread->next = model.op;
    thread->place = place_of(model.op.address);
}

enum outcome { DID, NO_SUCH, NO_MORE };

/* One of the messages that the step may see: choice 0 is the oldest that the thread may read. */
static enum outcome
compare(struct state *state, struct thread *thread, const struct interleave_op *op, int choice) {
    int n = state->n_messages[thread->place];
    int i = thread->view[thread->place] + choice;
    const struct message *newest_one = &state->messages[thread->place][n - 1];
    if (i == n && op->is_weak && state->n_spurious > 0 && newest_one->value == op->expected) {
        state->n_spurious--;
        read_message(state, thread, thread->place, n - 1, op->order_failed);
        give_result(thread, op->expected);
        give_result(thread, 0);
        return DID;
    }
    if (i >= n) {
        return NO_MORE;
    }
    struct message read = state->messages[thread->place][i];
    bool is_equal = read.value == op->expected;
    if (is_equal && i < n - 1 && !op->is_torn) {
        return NO_SUCH;
    }
    read_message(state, thread, thread->place, i, is_equal ? op->order : op->order_failed);
    if (is_equal) {
        write_message(state, thread, op, op->value, &read);
    }
    give_result(thread, read.value);
    give_result(thread, is_equal);
    return DID;
}

static enum outcome
read_and_write(
    struct state *state, struct thread *thread, const struct interleave_op *op, int choice) {
    int n = state->n_messages[thread->place];
    bool may_be_old = op->kind == LOAD || op->is_torn;
    int i = may_be_old ? thread->view[thread->place] + choice : n - 1 + choice;
    if (i >= n) {
        return NO_MORE;
    }
    struct message read = state->messages[thread->place][i];
    uint64_t value = op->kind == ADD  ? read.value + op->value
                     : op->kind == OR ? read.value | op->value
                                      : op->value;
    read_message(state, thread, thread->place, i, op->order);
    if (op->kind != LOAD) {
        write_message(state, thread, op, value, op->is_torn ? NULL : &read);
    }
    give_result(thread, op->is_blind ? 0 : read.value);
    return DID;
}

static enum outcome
futex_wait(struct state *state, struct thread *thread, const struct interleave_op *op, int choice) {
    const struct message *message =
        &state->messages[thread->place][state->n_messages[thread->place] - 1];
    if (choice > 0) {
        return NO_MORE;
    }
    if (message->value == op->expected || op->is_blind) {
        thread->status = ASLEEP;
        thread->sleeps_on = thread->place;
        model.result.n_sleeps++;
    }
    give_result(thread, 0);
    return DID;
}

/* Wakes one of the sleepers. */
static enum outcome
futex_wake(struct state *state, struct thread *thread, const struct interleave_op *op, int choice) {
    int n_sleepers = 0;
    for (int t = 0; t < model.scenario->n_threads; t++) {
        struct thread *other = &state->threads[t];
        bool sleeps = other->status == ASLEEP && other->sleeps_on == thread->place && op->value > 0;
        if (sleeps && n_sleepers++ == choice) {
            other->status = AWAKE;
            give_result(thread, 1);
            return DID;
        }
    }
    if (choice > 0 || n_sleepers > 0) {
        return NO_MORE;
    }
    give_result(thread, 0);
    return DID;
}

static enum outcome
apply(struct state *state, int t, int choice) {
    struct thread *thread = &state->threads[t];
    struct interleave_op op = thread->next;
    model.state = state;
    if (model.mutate != NULL) {
        model.mutate(&op, thread->last);
    }
    thread->last = op.kind;
    switch (op.kind) {
    case COMPARE:
        return compare(state, thread, &op, choice);
    case WAIT:
        return futex_wait(state, thread, &op, choice);
    case WAKE:
        return futex_wake(state, thread, &op, choice);
    case STORE:
        if (choice > 0) {
            return NO_MORE;
        }
        write_message(state, thread, &op, op.value, NULL);
        give_result(thread, 0);
        return DID;
    case LOAD:
    case EXCHANGE:
    case ADD:
    case OR:
        return read_and_write(state, thread, &op, choice);
    }
    return NO_MORE;
}

static void
mix(uint64_t key[2], const void *data, size_t bytes) {
    const unsigned char *from = data;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, from + i, bytes - i < 8 ? bytes - i : 8);
        key[0] = (key[0] ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        key[0] ^= key[0] >> 29;
        key[1] = (key[1] + word) * UINT64_C(0xC2B2AE3D27D4EB4F);
        key[1] ^= key[1] >> 31;
    }
}

static void
state_key(const struct state *state, uint64_t key[2]) {
    key[0] = 1;
    key[1] = (uint64_t)state->n_spurious;
    for (int p = 0; p < model.n_places; p++) {
        mix(key, &state->n_messages[p], sizeof(int));
        mix(key, state->messages[p], (size_t)state->n_messages[p] * sizeof(struct message));
    }
    for (int t = 0; t < model.scenario->n_threads; t++) {
        const struct thread *thread = &state->threads[t];
        const int where[] = {
            (int)thread->status, thread->round, thread->sleeps_on, thread->n_results};
        mix(key, where, sizeof where);
        mix(key, thread->view, sizeof thread->view);
        mix(key, thread->results, (size_t)thread->n_results * sizeof(uint64_t));
    }
    key[0] |= 1; /* never 0, which marks an empty slot */
}

static size_t
seen_slot(uint64_t (*table)[2], size_t n_room, const uint64_t key[2]) {
    size_t i = (size_t)(key[0] >> 7) & (n_room - 1);
    while (table[i][0] != 0 && (table[i][0] != key[0] || table[i][1] != key[1])) {
        i = (i + 1) & (n_room - 1);
    }
    return i;
}

static void
seen_grow(void) {
    size_t n_room = model.n_room == 0 ? 1024 : model.n_room * 2;
    uint64_t(*table)[2] = calloc(n_room, sizeof *table);
    for (size_t i = 0; table != NULL && i < model.n_room; i++) {
        if (model.seen[i][0] != 0) {
            memcpy(table[seen_slot(table, n_room, model.seen[i])], model.seen[i], sizeof *table);
        }
    }
    if (table == NULL) {
        give_up("no host memory");
        return;
    }
    free(model.seen);
    model.seen = table;
    model.n_room = n_room;
}

static bool
is_new(const struct state *state) {
    uint64_t key[2];
    if (2 * (model.result.n_states + 1) > model.n_room) {
        seen_grow();
    }
    state_key(state, key);
    uint64_t *slot = model.seen[seen_slot(model.seen, model.n_room, key)];
    if (slot[0] != 0) {
        return false;
    }
    memcpy(slot, key, sizeof key);
    model.result.n_states++;
    return true;
}

static void
explore(struct state *state) { // NOLINT(misc-no-recursion): as deep as a run is long
    bool is_over = true;
    bool is_stuck = true;
    if (model.result.why != NULL || !is_new(state)) {
        return;
    }
    for (int t = 0; t < model.scenario->n_threads; t++) {
        enum status status = state->threads[t].status;
        is_over = is_over && status == DONE;
        is_stuck = is_stuck && status != AWAKE;
        if (status == ASLEEP && state->n_spurious > 0) {
            struct state after = *state;
            after.n_spurious--;
            after.threads[t].status = AWAKE;
            explore(&after);
        }
        enum outcome outcome = status == AWAKE ? DID : NO_MORE;
        for (int choice = 0; outcome != NO_MORE && model.result.why == NULL; choice++) {
            struct state after = *state;
            outcome = apply(&after, t, choice);
            if (outcome == DID && model.result.why == NULL) {
                settle(&after, t);
                forget_old(&after);
                explore(&after);
            }
        }
    }
    if (is_over) {
        model.result.n_ends++;
        model.state = state;
        model.scenario->check_end();
    } else if (is_stuck) {
        interleave_expect(false, "everybody sleeps");
    }
}

struct interleave_result
interleave_try(const struct interleave_scenario *scenario, interleave_mutate *mutate) {
    struct state start = {.n_spurious = scenario->n_spurious};
    memset(&model, 0, sizeof model);
    model.scenario = scenario;
    model.mutate = mutate;
    model.state = &start;
    scenario->declare();
    for (int t = 0; t < N_THREADS; t++) {
        start.threads[t].status = t < scenario->n_threads ? AWAKE : DONE;
        if (t < scenario->n_threads) {
            settle(&start, t);
        }
    }
    explore(&start);
    free(model.seen);
    model.seen = NULL;
    return model.result;
}
