/* Drives _engine.c from C, at random, for the sanitizers: stress DIRECTORY SECONDS SEED.
 *
 * Groups are measured, fetched, discarded and collected in no order, the concurrency changes,
 * engines close in the middle. The linker puts us between the engine and the system (--wrap): some
 * calls are slow, cut short, interrupted, stale or refused, and some threads are not to be had.
 * Every promised byte is checked, and that a discarded group's memory is left alone once it
 * has settled.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64

#include "../../rayloader/storage/_engine.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FILES = 64, LIVE = 12, MOST = 24, ROOM = 1 << 20, PART = 8192, PAGE = 4096 };

static _Atomic unsigned trouble; /* the next wrapped call takes a number */
static _Atomic int troubled;     /* calls go wrong */
static const int wrong_open[] = {EMFILE, ESTALE, EINTR};
static const int wrong_read[] = {ESTALE, EINTR, EAGAIN};

typedef void *body(void *);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *with, body *run, void *x);
ssize_t __real_pread64(int fd, void *into, size_t bytes, off_t offset);
int __real_openat64(int root, const char *name, int flags, ...);

static unsigned dice(void)
{
    unsigned x = atomic_fetch_add(&trouble, 1) * 2654435761u;
    return (x ^ x >> 15) * 2246822519u >> 8;
}

static void doze(void)
{
    struct timespec pause = {.tv_nsec = 100000 + dice() % 3000000};
    nanosleep(&pause, NULL);
}

ssize_t __wrap_pread64(int fd, void *into, size_t bytes, off_t offset)
{
    unsigned x = atomic_load(&troubled) ? dice() % 64 : 63;
    if (x < 3) {
        errno = wrong_read[x];
        return -1;
    }
    if (x < 8)
        doze();
    return __real_pread64(fd, into, x < 16 && bytes > 1 ? bytes / 2 : bytes, offset);
}

int __wrap_openat64(int root, const char *name, int flags, ...)
{
    unsigned x = atomic_load(&troubled) ? dice() % 128 : 127;
    if (x < 3) {
        errno = wrong_open[x];
        return -1;
    }
    if (x < 6)
        doze();
    return __real_openat64(root, name, flags);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *with, body *run, void *x)
{
    if (atomic_load(&troubled) && dice() % 4 == 0)
        return EAGAIN;
    return __real_pthread_create(thread, with, run, x);
}

static unsigned state;
static unsigned any(unsigned below)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % below;
}

static void must(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "stress: %s\n", what);
    abort();
}

static int64_t size_of(int file) { return file % 8 == 7 ? 5 * PART + file : file * 331; }

static unsigned char byte_of(int file, int64_t at)
{
    return (unsigned char)(file * 37 + at * 11 + at / 251);
}

static void make_files(const char *directory)
{
    char path[4096];
    for (int f = 0; f < FILES; f++) {
        snprintf(path, sizeof path, "%s/f%02d", directory, f);
        FILE *out = fopen(path, "wb");
        must(out != NULL, "fopen");
        for (int64_t i = 0; i < size_of(f); i++)
            putc(byte_of(f, i), out);
        fclose(out);
    }
}

typedef struct {
    enum { FREE, MEASURING, MEASURED, FETCHING, QUARANTINE } state;
    int n, files[MOST]; /* FILES: one that does not exist */
    int64_t places[MOST];
} slot;

static char *arena;
static slot slots[LIVE];

/* Some places for files of these sizes, each slot in memory of its own. */
static void place(int at, const int64_t *sizes)
{
    slot *s = &slots[at];
    int64_t next = (int64_t)at * ROOM;
    for (int i = 0; i < s->n; i++) {
        unsigned x = any(8);
        s->places[i] = sizes[i] < 0 || x == 0 ? PLACE_SKIP : x == 1 ? PLACE_DROP : next;
        if (s->places[i] >= 0)
            next += (sizes[i] + PAGE - 1) / PAGE * PAGE;
    }
}

/* Begins a group, in two steps or, its sizes being known, in one. */
static void begin(engine *e, int at, const char *root)
{
    slot *s = &slots[at];
    char blob[MOST * 3 + 1];
    int64_t offsets[MOST + 1] = {0}, sizes[MOST], bad;
    s->n = (int)any(MOST + 1);
    for (int i = 0; i < s->n; i++) {
        s->files[i] = (int)any(FILES + 1);
        snprintf(blob + 3 * i, 4, "f%02d", s->files[i]);
        offsets[i + 1] = 3 * (i + 1);
    }
    bool known = any(2);
    int error;
    for (int i = 0; i < s->n; i++)
        sizes[i] = s->files[i] == FILES ? -1 : size_of(s->files[i]);
    if (known) {
        place(at, sizes);
        error = engine_read(e, at, root, (int64_t)strlen(root), blob, 3 * s->n, offsets, sizes,
                            s->places, s->n, &bad);
    } else {
        error = engine_measure(e, at, root, (int64_t)strlen(root), blob, 3 * s->n, offsets, s->n);
    }
    must(error == 0 || (error == EAGAIN && atomic_load(&troubled)), "begin");
    s->state = error ? FREE : known ? FETCHING : MEASURING;
}

static void fetch(engine *e, int at, const int64_t *sizes)
{
    slot *s = &slots[at];
    int64_t bad;
    place(at, sizes);
    must(!engine_fetch(e, at, s->places, s->n, &bad), "fetch");
    s->state = FETCHING;
}

static void check(const slot *s, int i, int64_t size)
{
    if (s->places[i] == PLACE_SKIP) {
        must(size == -1, "what was skipped has no size");
        return;
    }
    if (size < 0)
        return; /* trouble */
    must(size == size_of(s->files[i]), "the size is right");
    for (int64_t b = 0; s->places[i] >= 0 && b < size; b++)
        must((unsigned char)arena[s->places[i] + b] == byte_of(s->files[i], b), "bytes are right");
}

static void collect(engine *e, int64_t sizes[LIVE][MOST])
{
    int32_t codes[MOST];
    for (group *g = engine_collect(e), *next; g; g = next) {
        next = group_next(g);
        int at = (int)group_number(g);
        slot *s = &slots[at];
        must(group_count(g) == s->n, "the group is whole");
        group_results(g, sizes[at], codes);
        must(s->state == MEASURING || s->state == FETCHING, "the group was expected");
        for (int i = 0; i < s->n; i++) {
            must((sizes[at][i] >= 0) || codes[i] || s->state == FETCHING, "failure has a code");
            if (s->state == FETCHING)
                check(s, i, sizes[at][i]);
            else if (s->files[i] == FILES)
                must(codes[i] == ENOENT || codes[i] == ESTALE, "what is missing is missing");
        }
        s->state = s->state == MEASURING ? MEASURED : FREE;
        engine_release(g);
    }
}

static void leave_quarantine(engine *e)
{
    bool all = engine_settled(e, NULL);
    for (int at = 0; at < LIVE; at++) {
        int64_t number = at;
        if (slots[at].state != QUARANTINE || !(all || engine_settled(e, &number)))
            continue;
        char *mine = arena + (int64_t)at * ROOM;
        memset(mine, 0x5a, ROOM); /* a late read into it is a race, and seen */
        slots[at].state = FREE;
    }
}

static void step(engine *e, const char *root, int64_t sizes[LIVE][MOST])
{
    int at = (int)any(LIVE);
    slot *s = &slots[at];
    char name[64];
    int64_t length = sizeof name;
    engine_totals totals;
    switch (any(12)) {
    case 0:
        engine_set_concurrency(e, 1 + (int)any(40), PAGE * (1 + (int64_t)any(4)));
        break;
    case 1:
        engine_totals_now(e, &totals);
        must(totals.peak <= 64, "the peak is no more than was ever allowed");
        break;
    case 2:
        engine_oldest_ns(e, name, &length);
        break;
    case 3:
        if (s->state == MEASURING || s->state == MEASURED || s->state == FETCHING) {
            engine_discard(e, at);
            s->state = QUARANTINE;
        }
        break;
    default:
        if (s->state == FREE)
            begin(e, at, root);
        else if (s->state == MEASURED)
            fetch(e, at, sizes[at]);
    }
    leave_quarantine(e);
}

/* Whatever was begun comes to its end. */
static void let_end(engine *e, int64_t sizes[LIVE][MOST])
{
    for (int waits = 0, under_way = 1; under_way; waits++) {
        struct pollfd ready = {.fd = engine_fileno(e), .events = POLLIN};
        must(waits < 10000, "what was begun ends");
        if (poll(&ready, 1, 2) > 0)
            collect(e, sizes);
        leave_quarantine(e);
        under_way = 0;
        for (int at = 0; at < LIVE; at++)
            under_way |= slots[at].state != FREE && slots[at].state != MEASURED;
    }
}

static void one_engine(const char *root)
{
    static int64_t sizes[LIVE][MOST];
    int error;
    engine_options options = {
        .concurrency = 1 + (int)any(64), .cpus = 1 + (int)any(3), .part_bytes = PART,
        .scratch_part_bytes = PAGE, .direct = any(4) ? DIRECT_NO : DIRECT_PREFERRED,
        .drop_cache = any(4) == 0, .fd_budget = any(2) ? 1000 : any(40)};
    atomic_store(&troubled, any(3) != 0);
    engine *e = engine_open(&options, &error);
    must(e != NULL, "open");
    engine_attach(e, arena, (int64_t)LIVE * ROOM);
    memset(slots, 0, sizeof slots);
    for (unsigned steps = any(3000); steps; steps--) {
        struct pollfd ready = {.fd = engine_fileno(e), .events = POLLIN};
        if (poll(&ready, 1, any(4) ? 0 : 1) > 0)
            collect(e, sizes);
        step(e, root, sizes);
    }
    if (any(2))
        let_end(e, sizes);
    must(engine_close(e, 2000000000) == 0, "all threads end");
}

int main(int count, char **arguments)
{
    struct timespec start, now;
    must(count == 4, "DIRECTORY SECONDS SEED");
    state = (unsigned)atoi(arguments[3]) | 1u;
    atomic_store(&trouble, state);
    arena = aligned_alloc(PAGE, (size_t)LIVE * ROOM);
    make_files(arguments[1]);
    clock_gettime(CLOCK_MONOTONIC, &start);
    int engines = 0;
    do {
        one_engine(arguments[1]);
        engines++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - start.tv_sec < atoi(arguments[2]));
    free(arena);
    printf("%d engines\n", engines);
    return 0;
}
