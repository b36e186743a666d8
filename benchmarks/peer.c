/*
 * The yardstick: how fast can a plain C program read these files?
 *
 * Method: T threads share one counter over one list of files; each takes the next file and does
 * open, fstat, read, close. The bytes go either into an arena (a memfd of fixed size, of which each
 * thread uses its share in turn, as a loader must that keeps batches alive) or into one small
 * buffer per thread, overwritten again and again (the cache's best case, which delivers nothing to
 * anybody). The order is
 * shuffled anew for each epoch. Arena and buffers are written once and the threads are started
 * before the clock; the clock runs from the barrier that releases the threads to the last close.
 *
 * Command: cc -O3 -pthread peer.c -o peer; ./peer LIST ARENA_BYTES
 * where LIST holds one path per line. Each line on standard input orders epochs, and each epoch
 * answers with one line of JSON (seconds of CLOCK_MONOTONIC):
 *
 *     epochs=3 threads=2 into=arena verify=0
 *     {"files": 2000, "bytes": 645248000, "begin": 12.5, "last": 12.6}
 *
 * verify=1 adds "digest", which depends on every byte (see files.py); it costs time of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MOST_THREADS = 1024 };

static struct {
    char **paths;
    size_t count, largest;
} list;

static struct {
    unsigned char *base;
    size_t size;
} arena;

static struct {
    unsigned epochs, threads, verify;
    int into_arena;
} order;

static atomic_size_t next_file, total_bytes;
static _Atomic uint64_t digest;
static pthread_barrier_t gate;

static void die(const char *what, const char *path)
{
    fprintf(stderr, "peer: %s: %s: %s\n", path, what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t scramble(uint64_t x) /* the finaliser of splitmix64 */
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t file_digest(const unsigned char *bytes, size_t size)
{
    uint64_t sum = 0, word;
    size_t at = 0;
    for (; at + 8 <= size; at += 8) {
        memcpy(&word, bytes + at, 8);
        sum += word;
    }
    word = 0;
    memcpy(&word, bytes + at, size - at);
    return scramble(sum + word + scramble(size + 1));
}

/* One thread's memory: its share of the arena, used in turn, or a buffer for one file. */
struct room {
    unsigned char *base;
    size_t size, next;
};

static unsigned char *claim(struct room *room, size_t size)
{
    size_t pages = (size + PAGE - 1) / PAGE * PAGE;
    if (room->next + pages > room->size)
        room->next = 0;
    room->next += pages;
    return room->base + room->next - pages;
}

static size_t read_file(const char *path, struct room *memory)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) < 0)
        die("open", path);
    size_t size = (size_t)info.st_size, done = 0;
    unsigned char *room = claim(memory, size);
    while (done < size) {
        ssize_t got = read(fd, room + done, size - done);
        if (got <= 0)
            die("read", path);
        done += (size_t)got;
    }
    close(fd);
    if (order.verify)
        atomic_fetch_add(&digest, file_digest(room, size));
    return size;
}

static void *reader(void *memory)
{
    for (unsigned epoch = 0; epoch < order.epochs; epoch++) {
        size_t bytes = 0, i;
        pthread_barrier_wait(&gate);
        while ((i = atomic_fetch_add(&next_file, 1)) < list.count)
            bytes += read_file(list.paths[i], memory);
        atomic_fetch_add(&total_bytes, bytes);
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

static void shuffle(void)
{
    static uint64_t state;
    for (size_t i = list.count; i > 1; i--) {
        size_t j = scramble(state += 0x9e3779b97f4a7c15u) % i;
        char *other = list.paths[j];
        list.paths[j] = list.paths[i - 1];
        list.paths[i - 1] = other;
    }
}

/* Memory for each thread, written once: an equal share of the arena, or a buffer. */
static void divide(struct room *rooms)
{
    size_t share = arena.size / order.threads / PAGE * PAGE;
    size_t buffer = (list.largest + PAGE - 1) / PAGE * PAGE;
    if (order.into_arena && share < buffer)
        die("arena too small for so many threads", "arena");
    for (unsigned t = 0; t < order.threads; t++) {
        rooms[t].next = 0;
        rooms[t].size = order.into_arena ? share : buffer;
        rooms[t].base = arena.base + t * share;
        if (!order.into_arena) {
            if (!(rooms[t].base = malloc(buffer)))
                die("malloc", "buffer");
            memset(rooms[t].base, 1, buffer);
        }
    }
}

static void run_epochs(void)
{
    static pthread_t threads[MOST_THREADS];
    static struct room rooms[MOST_THREADS];
    divide(rooms);
    pthread_barrier_init(&gate, NULL, order.threads + 1);
    for (unsigned t = 0; t < order.threads; t++)
        if ((errno = pthread_create(&threads[t], NULL, reader, &rooms[t])))
            die("pthread_create", "thread");
    for (unsigned epoch = 0; epoch < order.epochs; epoch++) {
        shuffle();
        next_file = total_bytes = 0;
        digest = 0;
        double begin = now();
        pthread_barrier_wait(&gate);
        pthread_barrier_wait(&gate);
        double last = now();
        printf("{\"files\": %zu, \"bytes\": %zu, \"begin\": %.9f, \"last\": %.9f", list.count,
               (size_t)total_bytes, begin, last);
        if (order.verify)
            printf(", \"digest\": %llu", (unsigned long long)digest);
        printf("}\n");
    }
    for (unsigned t = 0; t < order.threads; t++) {
        pthread_join(threads[t], NULL);
        if (!order.into_arena)
            free(rooms[t].base);
    }
    pthread_barrier_destroy(&gate);
    fflush(stdout);
}

static void load_list(const char *name)
{
    FILE *file = fopen(name, "r");
    char *line = NULL;
    size_t room = 0, most = 0;
    ssize_t length;
    if (!file)
        die("open", name);
    while ((length = getline(&line, &room, file)) > 0) {
        struct stat info;
        line[length - 1] = '\0';
        if (list.count == most)
            list.paths = realloc(list.paths, (most = most * 2 + 1024) * sizeof *list.paths);
        if (!list.paths || !(list.paths[list.count++] = strdup(line)) || stat(line, &info) < 0)
            die("stat", line);
        if ((size_t)info.st_size > list.largest)
            list.largest = (size_t)info.st_size;
    }
    free(line);
    fclose(file);
}

static void open_arena(size_t size)
{
    int fd = memfd_create("peer-arena", MFD_CLOEXEC);
    arena.size = size;
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        die("memfd", "arena");
    arena.base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (arena.base == MAP_FAILED)
        die("mmap", "arena");
    memset(arena.base, 1, size);
}

int main(int count, char **words)
{
    char line[256], into[16];
    if (count != 3)
        return fprintf(stderr, "usage: peer LIST ARENA_BYTES\n"), 2;
    load_list(words[1]);
    open_arena(strtoull(words[2], NULL, 10));
    printf("{\"ready\": true}\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "epochs=%u threads=%u into=%15s verify=%u", &order.epochs, &order.threads,
                   into, &order.verify) != 4 || !order.threads || order.threads > MOST_THREADS)
            return fprintf(stderr, "peer: bad order: %s", line), 2;
        order.into_arena = strcmp(into, "arena") == 0;
        run_epochs();
    }
    return 0;
}
