/* See _engine.h for the contract. How it works:
 *
 *   owner --group--> queue (FIFO) --run--> worker --finished--> done list --eventfd--> owner
 *
 * A group in the queue has a cursor; a worker takes the next *run* from it under the one lock: some
 * files of one group while operations return at once, a single file or a single range of a large
 * file while they do not. So neither submitting nor finishing costs anything per file.
 *
 * How many workers are awake. While reads come from the page cache, more threads than CPUs only
 * hurt; while they block, every one of `concurrency` is wanted. `active` is the present limit. It
 * starts at the number of CPUs. A *sentry* thread, which never reads itself, looks every 0.3 to
 * 4.8 ms, while work is queued, at whether the workers run or are blocked: by their CPU clocks and,
 * where these stand still, by their state in /proc. A long read of cached bytes is not blocked, nor
 * is a worker that waits for a CPU; more threads would help neither. When fewer than `cpus` of them
 * run, it doubles `active`. Workers above `cpus` count their own blocking (voluntary context
 * switches); a streak of reads without any halves it.
 * The sentry also opens the rest of a blocked worker's run to the others, so one slow file delays
 * no other.
 *
 * When the owner is told. At once, if it waits for the first group since it had asked for nothing;
 * afterwards when half of the groups that it asked for are done: the other half keeps the workers
 * busy meanwhile, and its own work is cheaper done for several groups in a row. A sentry that sees a
 * finished group grow old tells it.
 *
 * Everything in `engine` and `group` is guarded by engine.lock, except where marked atomic or
 * owned by the run at hand.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64

#include "_engine.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    PAGE = 4096,
    HASH = 1024,            /* buckets of the table of groups */
    LONGEST_RUN = 32,       /* files taken at once */
    RUN_NS = 60000,         /* a run lasts about this long */
    TICK_NS = 300000,       /* the sentry's first look */
    LONGEST_TICK_NS = 4800000,
    QUIET_TICKS = 16,       /* looks without work before the sentry sleeps */
    SAMPLES = 4,            /* workers asked for their state per look */
    STUCK_NS = 250000,      /* a blocked read this old gives up the rest of its run */
    UNKNOWN_NS = 1000000,   /* without /proc: an operation this old counts as blocked */
    CALM_READS = 32,        /* least streak of unblocked reads that halves `active` */
    STALE_RETRIES = 2,
    STACK_BYTES = 256 << 10,
};
#define FD_PATIENCE_NS 5000000000LL /* config.DESCRIPTOR_SECONDS */

enum stage { MEASURING, MEASURED, FETCHING, FETCHED };
enum kind { RUN_MEASURE, RUN_READ, RUN_SKIP, RUN_CLOSE };

typedef struct {
    const char *name; /* NUL-terminated */
    int64_t length;   /* of the name, as given */
    int64_t size, place;
    _Atomic int64_t found; /* the size that was not expected */
    dev_t device;
    ino_t inode;
    int fd; /* open, or -1 */
    _Atomic int32_t code;
    _Atomic int32_t parts_left; /* ranges of a large file that are not finished */
    _Atomic bool direct;        /* read with O_DIRECT */
    _Atomic bool at_rest;       /* measured; no run is about it */
} file;

struct group {
    group *hash_next, *older, *newer; /* all groups by number; by age */
    group *prev, *next;               /* in the one list of engine.queue ... it is in, if any */
    int64_t number;
    enum stage stage;
    bool queued, done;
    bool expected; /* sizes were given, nobody has measured */
    _Atomic bool discarded;
    int64_t users;      /* runs in execution */
    int64_t unfinished; /* files of this stage */
    int64_t cursor;     /* next file to take ... */
    int64_t part;       /* ... and the next byte of it, if it is large */
    int64_t drop_part;  /* length of ranges of files to be dropped, fixed by the fetch */
    _Atomic int root_fd;
    const char *root; /* NUL-terminated; empty: none */
    int64_t n;
    file files[];
};

typedef struct {
    group *first, *last;
} group_list;

typedef struct {
    _Atomic int64_t metadata_ops, reads, bytes, retries, read_ns;
    _Atomic int64_t direct_bytes, fallback_files, dropped_files;
    _Atomic int64_t latency[LATENCY_BUCKETS];
} tally; /* written by one worker only */

typedef struct {
    group *group;
    enum kind kind;
    bool large;            /* one range of a large file: */
    int64_t offset, bytes; /* ... this one */
    bool keep;             /* measured files may stay open */
    bool watch;            /* count blocking */
    bool blocked;
    bool several; /* of more than one file: counted in engine.several */
    int64_t ended, opened, closed;
    int64_t began_ns;
} run;

typedef struct worker {
    engine *e;
    struct worker *next, *next_idle;
    pthread_t thread;
    pthread_cond_t wake;
    bool called, exited;
    bool loose; /* others may take from its run */
    run run;
    bool notify; /* it has something done to tell the owner, once the lock is free */
    _Atomic pid_t tid;
    int stat_fd;              /* this and the next two are the sentry's */
    int64_t seen_ns, seen_cpu_ns; /* at its last look */
    _Atomic uint64_t claim;   /* files of the run: next << 32 | end */
    _Atomic int64_t op_start; /* [ns]; 0: in no operation */
    _Atomic int64_t op_file;
    char *scratch;
    int64_t scratch_bytes;
    tally tally;
} worker;

struct engine {
    pthread_mutex_t lock;
    engine_options options;
    int pid, event_fd;
    _Atomic bool stop;
    bool signalled;
    int refs; /* owner and threads */

    group *table[HASH];
    group *oldest_group, *newest_group;
    group_list queue, done, graveyard;
    group_list unsettled; /* discarded, with a read running */
    int64_t open_files;

    int pending, ready;   /* groups asked for and not done; done and not collected */
    bool eager;           /* the next group that is done is told at once */
    int64_t ready_ns;     /* when the oldest of the ready ones was done */

    char *memory;
    int64_t memory_bytes;

    worker *workers, *idle;
    int made, awake, active;
    int thread_limit; /* as many threads as the system gave */
    int reading, peak;
    int loose;   /* workers marked so */
    int several; /* runs of more than one file */
    int calm;    /* unblocked reads in a row */
    int64_t op_ns[2]; /* smoothed duration of a measure, of a read */

    pthread_cond_t gone; /* a thread has exited */
    pthread_t sentry;
    pthread_cond_t sentry_wake;
    bool sentry_made, sentry_exited, armed;
    unsigned rotation; /* where the next sample begins */
};

/* ---- small things ------------------------------------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int least(int a, int b) { return a < b ? a : b; }

static void add(_Atomic int64_t *total, int64_t amount)
{
    int64_t before = atomic_load_explicit(total, memory_order_relaxed);
    atomic_store_explicit(total, before + amount, memory_order_relaxed);
}

/* floor(4 * log2(microseconds)), within the table. */
static int latency_bucket(int64_t ns)
{
    static const double steps[3] = {1.189207115002721, 1.4142135623730951, 1.681792830507429};
    if (ns < 1000)
        return 0;
    double scaled = (double)ns / 1000.0;
    int octave = 63 - __builtin_clzll((unsigned long long)scaled);
    scaled /= (double)(1ULL << octave);
    int bucket = 4 * octave + (scaled >= steps[0]) + (scaled >= steps[1]) + (scaled >= steps[2]);
    return least(bucket, LATENCY_BUCKETS - 1);
}

static int64_t voluntary_switches(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

static void append(group_list *list, group *g)
{
    g->prev = list->last;
    g->next = NULL;
    if (list->last)
        list->last->next = g;
    else
        list->first = g;
    list->last = g;
}

static void detach(group_list *list, group *g)
{
    if (g->prev)
        g->prev->next = g->next;
    else
        list->first = g->next;
    if (g->next)
        g->next->prev = g->prev;
    else
        list->last = g->prev;
    g->prev = g->next = NULL;
}

static void init_cond(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns)
{
    struct timespec t = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    pthread_cond_timedwait(cond, lock, &t);
}

/* ---- the table of groups ----------------------------------------------------------------- */

static group **slot(engine *e, int64_t number)
{
    group **at = &e->table[(uint64_t)number % HASH];
    while (*at && (*at)->number != number)
        at = &(*at)->hash_next;
    return at;
}

static void enlist(engine *e, group *g)
{
    *slot(e, g->number) = g;
    g->older = e->newest_group;
    if (e->newest_group)
        e->newest_group->newer = g;
    else
        e->oldest_group = g;
    e->newest_group = g;
}

static void delist(engine *e, group *g)
{
    *slot(e, g->number) = g->hash_next;
    g->hash_next = NULL;
    *(g->older ? &g->older->newer : &e->oldest_group) = g->newer;
    *(g->newer ? &g->newer->older : &e->newest_group) = g->older;
    g->older = g->newer = NULL;
}

static bool holds_files(const group *g)
{
    for (int64_t i = 0; i < g->n; i++)
        if (g->files[i].fd >= 0)
            return true;
    return g->root_fd >= 0;
}

static int64_t close_files(group *g)
{
    int64_t closed = 0;
    for (int64_t i = 0; i < g->n; i++) {
        if (g->files[i].fd < 0)
            continue;
        close(g->files[i].fd);
        g->files[i].fd = -1;
        closed++;
    }
    return closed;
}

/* The directory is open as a path only: closing it asks no file system. */
static void close_root(group *g)
{
    int fd = atomic_exchange(&g->root_fd, -1);
    if (fd >= 0)
        close(fd);
}

/* ---- waking ------------------------------------------------------------------------------ */

static void *worker_main(void *argument);
static void *sentry_main(void *argument);

static int start_thread(pthread_t *thread, void *(*body)(void *), void *argument)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int error = pthread_create(thread, &attributes, body, argument);
    if (error == EINVAL) /* large thread-local storage in this process: the default stack */
        error = pthread_create(thread, NULL, body, argument);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static bool make_worker(engine *e)
{
    worker *w = calloc(1, sizeof *w);
    if (!w)
        return false;
    w->e = e;
    w->stat_fd = -1;
    init_cond(&w->wake);
    if (start_thread(&w->thread, worker_main, w)) {
        pthread_cond_destroy(&w->wake);
        free(w);
        return false;
    }
    w->next = e->workers;
    e->workers = w;
    e->made++;
    e->awake++;
    e->refs++;
    return true;
}

static bool has_work(const engine *e)
{
    return e->queue.first || e->loose || e->graveyard.first;
}

static int awake_limit(const engine *e)
{
    return least(e->active, e->options.concurrency);
}

/* Wakes or makes one worker more, if there is work for it and room under the limit. */
static bool call_one(engine *e)
{
    if (e->stop || !has_work(e) || e->awake >= awake_limit(e))
        return false;
    worker *w = e->idle;
    if (!w) {
        if (e->made >= e->thread_limit)
            return false;
        if (make_worker(e))
            return true;
        e->thread_limit = e->made; /* the system gives no more */
        return false;
    }
    e->idle = w->next_idle;
    e->awake++;
    w->called = true;
    pthread_cond_signal(&w->wake);
    return true;
}

static bool wants_sentry(const engine *e)
{
    return (e->queue.first && awake_limit(e) < e->options.concurrency) || e->several || e->loose;
}

static void arm_sentry(engine *e)
{
    if (e->armed || e->stop || e->options.concurrency < 2 || !wants_sentry(e))
        return;
    if (!e->sentry_made) {
        if (start_thread(&e->sentry, sentry_main, e))
            return; /* tried again with the next run */
        e->sentry_made = true;
        e->refs++;
    }
    e->armed = true;
    pthread_cond_signal(&e->sentry_wake);
}

/* True when the owner must be told; the caller then does so without the lock. */
static bool must_tell(engine *e)
{
    bool must = !e->signalled && !e->stop;
    e->signalled |= must;
    return must;
}

static void tell(engine *e)
{
    uint64_t one = 1;
    if (write(e->event_fd, &one, sizeof one) < 0)
        return; /* only a full counter refuses, and that is readable */
}

/* ---- opening ----------------------------------------------------------------------------- */

static bool given_up(const worker *w, const group *g)
{
    return atomic_load_explicit(&g->discarded, memory_order_relaxed) || w->e->stop;
}

/* No run is about the file: whoever holds the lock may close it, and it is reopened when read. */
static bool rests(const group *g, int64_t i)
{
    if (g->stage == FETCHING && (i < g->cursor || (i == g->cursor && g->part > 0)))
        return false;
    return atomic_load(&g->files[i].at_rest) && g->files[i].fd >= 0;
}

/* Closes the resting files of the group that will be fetched last. True if there was one. */
static bool shed_files(engine *e)
{
    int fds[64], n = 0;
    pthread_mutex_lock(&e->lock);
    for (group *g = e->newest_group; g && n == 0; g = g->older)
        for (int64_t i = g->n - 1; i >= 0 && n < 64; i--)
            if (rests(g, i)) {
                fds[n++] = g->files[i].fd;
                g->files[i].fd = -1;
            }
    e->open_files -= n;
    if (e->options.fd_budget > e->open_files)
        e->options.fd_budget = e->open_files; /* it was set too high */
    pthread_mutex_unlock(&e->lock);
    for (int i = 0; i < n; i++)
        close(fds[i]);
    return n > 0;
}

/* Waits a little for a free descriptor. False when patience is at its end. */
static bool await_descriptor(worker *w, const group *g, int64_t *waited_ns)
{
    add(&w->tally.retries, 1);
    if (shed_files(w->e))
        return true;
    if (*waited_ns >= FD_PATIENCE_NS || given_up(w, g))
        return false;
    int64_t pause_ns = *waited_ns < 20000000 ? 1000000 : 20000000;
    struct timespec pause = {.tv_nsec = pause_ns};
    nanosleep(&pause, NULL);
    *waited_ns += pause_ns;
    return true;
}

/* Opens a regular file under somebody's lease: O_NONBLOCK refuses, waiting is right. */
static int open_leased(int root, const char *name, int flags)
{
    char again[64];
    struct stat status;
    int fd = -1, path = openat(root, name, O_PATH | O_CLOEXEC);
    if (path < 0)
        return -1;
    if (fstat(path, &status) == 0) {
        /* Through /proc it is surely the file that was looked at, never a FIFO put in its place. */
        snprintf(again, sizeof again, "/proc/self/fd/%d", path);
        errno = EWOULDBLOCK;
        if (S_ISREG(status.st_mode))
            fd = open(again, flags & ~O_NONBLOCK);
    }
    int error = errno;
    close(path);
    errno = error;
    return fd;
}

static int open_at(worker *w, const group *g, int root, const char *name, int flags)
{
    int64_t waited_ns = 0;
    int stale = 0;
    for (;;) {
        add(&w->tally.metadata_ops, 1);
        int fd = openat(root, name, flags);
        if (fd < 0 && errno == EWOULDBLOCK)
            fd = open_leased(root, name, flags);
        if (fd >= 0)
            return fd;
        int error = errno;
        if (error == EMFILE || error == ENFILE) {
            if (await_descriptor(w, g, &waited_ns))
                continue;
        } else if (error == ESTALE && stale++ < STALE_RETRIES) {
            add(&w->tally.retries, 1);
            continue;
        } else if (error == EINTR && !given_up(w, g)) {
            continue;
        }
        return -error;
    }
}

/* The group's directory, opened anew for each group, so that a root which is a symbolic link
 * leads where it leads now. AT_FDCWD without a root; a negative error number. */
static int root_of(worker *w, group *g)
{
    if (!g->root[0])
        return AT_FDCWD;
    int fd = atomic_load(&g->root_fd), none = -1;
    if (fd >= 0)
        return fd;
    fd = open_at(w, g, AT_FDCWD, g->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && !atomic_compare_exchange_strong(&g->root_fd, &none, fd)) {
        close(fd);
        fd = none;
    }
    return fd;
}

static void fall_back(worker *w, file *f)
{
    if (atomic_exchange(&f->direct, false))
        add(&w->tally.fallback_files, 1);
}

/* Opens f and learns what it is. The descriptor, or -1 and *code. */
static int open_file(worker *w, group *g, file *f, struct stat *status, int32_t *code)
{
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    bool direct = atomic_load(&f->direct), refused = false;
    if ((int64_t)strlen(f->name) != f->length) {
        *code = FILE_BAD_NAME;
        return -1;
    }
    int root = f->name[0] == '/' ? AT_FDCWD : root_of(w, g), fd = root;
    if (root >= 0 || root == AT_FDCWD)
        fd = open_at(w, g, root, f->name, flags | (direct ? O_DIRECT : 0));
    if (fd == -EINVAL && direct) { /* or it is no file at all: look, before O_DIRECT is blamed */
        refused = true;
        fd = open_at(w, g, root, f->name, flags);
    }
    if (fd < 0) {
        *code = -fd;
        return -1;
    }
    add(&w->tally.metadata_ops, 1);
    *code = 0;
    if (fstat(fd, status))
        *code = errno;
    else if (!S_ISREG(status->st_mode))
        *code = FILE_NOT_REGULAR;
    else if (refused && w->e->options.direct == DIRECT_DEMANDED)
        *code = FILE_NO_DIRECT;
    else if (refused)
        fall_back(w, f);
    if (*code) {
        close(fd);
        return -1;
    }
    return fd;
}

static void drop_cached(worker *w, int fd)
{
    if (w->e->options.drop_cache && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0)
        add(&w->tally.dropped_files, 1);
}

static int32_t measure_file(worker *w, group *g, file *f, bool keep)
{
    struct stat status;
    int32_t code;
    int fd = open_file(w, g, f, &status, &code);
    if (fd < 0)
        return code;
    f->size = status.st_size;
    f->device = status.st_dev;
    f->inode = status.st_ino;
    drop_cached(w, fd);
    if (keep)
        f->fd = fd;
    else
        close(fd);
    return 0;
}

/* Whether it is the file that was measured. */
static int32_t recognise(const file *f, const struct stat *status)
{
    if (status->st_dev != f->device || status->st_ino != f->inode)
        return FILE_REPLACED;
    return status->st_size < f->size ? FILE_TRUNCATED : 0;
}

/* Whether an unmeasured file has the size that was expected; all its ranges are of one file. */
static int32_t expect(worker *w, file *f, int fd, const struct stat *status)
{
    if (status->st_size != f->size) {
        atomic_store(&f->found, status->st_size);
        return FILE_RESIZED;
    }
    pthread_mutex_t *lock = f->parts_left > 0 ? &w->e->lock : NULL;
    if (lock)
        pthread_mutex_lock(lock);
    bool first = f->inode == 0;
    if (first) {
        f->device = status->st_dev;
        f->inode = status->st_ino;
    }
    if (lock)
        pthread_mutex_unlock(lock);
    if (first)
        drop_cached(w, fd);
    return recognise(f, status);
}

/* Opens a file to read it, and makes sure that it is the one that is meant. */
static int reopen_file(worker *w, group *g, file *f, int32_t *code)
{
    struct stat status;
    int fd = open_file(w, g, f, &status, code);
    if (fd < 0)
        return -1;
    *code = g->expected ? expect(w, f, fd, &status) : recognise(f, &status);
    if (*code) {
        close(fd);
        return -1;
    }
    return fd;
}

/* ---- reading ----------------------------------------------------------------------------- */

typedef struct {
    worker *w;
    group *g;
    file *f;
    int fd, own_fd; /* own_fd: opened for this range, closed with it; else -1 */
    char *into;
    int64_t offset, bytes, got;
    int stale, refused;
    bool patient; /* O_NONBLOCK has been taken off */
} range;

static int64_t round_up(int64_t bytes) { return (bytes + PAGE - 1) & ~(int64_t)(PAGE - 1); }

static int32_t range_open(range *r)
{
    int32_t code = 0;
    if (r->own_fd >= 0)
        close(r->own_fd);
    r->own_fd = r->fd = reopen_file(r->w, r->g, r->f, &code);
    return code;
}

/* A read failed with `error`: 0 when it may be tried again, else the code of the file. */
static int32_t range_failed(range *r, int error)
{
    if (error == EINTR)
        return 0;
    if (error == EAGAIN && !r->patient) { /* some file system takes O_NONBLOCK seriously */
        r->patient = true;
        fcntl(r->fd, F_SETFL, fcntl(r->fd, F_GETFL) & ~O_NONBLOCK);
        return 0;
    }
    if (error == ESTALE && r->stale++ < STALE_RETRIES) {
        add(&r->w->tally.retries, 1);
        r->got = 0; /* all of the range from the same open file */
        return range_open(r);
    }
    int direct = r->w->e->options.direct;
    if (error == EINVAL && direct == DIRECT_DEMANDED)
        return FILE_NO_DIRECT;
    /* Twice: another range of the file may be taking O_DIRECT off at this moment. */
    if (error == EINVAL && direct == DIRECT_PREFERRED && r->refused++ < 2) {
        fall_back(r->w, r->f);
        fcntl(r->fd, F_SETFL, fcntl(r->fd, F_GETFL) & ~O_DIRECT);
        return 0;
    }
    return error;
}

/* Reads the range into place. 0 or the code of the file. */
static int32_t range_read(range *r)
{
    int64_t stuck_at = -1;
    int32_t code = r->fd < 0 ? range_open(r) : 0;
    while (!code && r->got < r->bytes) {
        bool direct = atomic_load_explicit(&r->f->direct, memory_order_relaxed);
        int64_t from = direct ? r->got & ~(int64_t)(PAGE - 1) : r->got;
        int64_t want = direct ? round_up(r->bytes - from) : r->bytes - from;
        ssize_t n = pread(r->fd, r->into + from, (size_t)want, r->offset + from);
        if (n < 0) {
            code = range_failed(r, errno);
            continue;
        }
        add(&r->w->tally.bytes, n);
        if (direct)
            add(&r->w->tally.direct_bytes, n);
        r->got = from + n;
        /* O_DIRECT starts again at the last page; the same end twice is the end. */
        if (n == 0 || (r->got < r->bytes && r->got == stuck_at))
            code = FILE_TRUNCATED;
        stuck_at = r->got;
    }
    if (r->own_fd >= 0)
        close(r->own_fd);
    return code;
}

static void drop_scratch(worker *w)
{
    if (w->scratch)
        munmap(w->scratch, (size_t)w->scratch_bytes);
    w->scratch = NULL;
}

/* The worker's buffer for bytes to be dropped; it is as long as one range, so all of them keep
 * within their bound. */
static char *scratch_of(worker *w, int64_t bytes)
{
    if (w->scratch && w->scratch_bytes == bytes)
        return w->scratch;
    drop_scratch(w);
    void *fresh = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
    w->scratch = fresh == MAP_FAILED ? NULL : fresh;
    w->scratch_bytes = w->scratch ? bytes : 0;
    return w->scratch;
}

static int32_t read_range(worker *w, group *g, file *f, int64_t offset, int64_t bytes)
{
    range r = {.w = w, .g = g, .f = f, .fd = f->fd, .own_fd = -1, .offset = offset, .bytes = bytes};
    int64_t began = atomic_load_explicit(&w->op_start, memory_order_relaxed);
    r.into = f->place >= 0 ? w->e->memory + f->place + offset : scratch_of(w, g->drop_part);
    if (!r.into)
        return ENOMEM;
    int32_t code = range_read(&r);
    int64_t ns = now_ns() - began;
    add(&w->tally.reads, 1);
    add(&w->tally.read_ns, ns);
    add(&w->tally.latency[latency_bucket(ns)], 1);
    return code;
}

/* ---- runs -------------------------------------------------------------------------------- */

static int64_t part_of(const engine *e, const group *g, const file *f)
{
    return f->place == PLACE_DROP ? g->drop_part : e->options.part_bytes;
}

static int64_t run_length(const engine *e, const group *g, enum kind kind)
{
    if (e->active > e->options.cpus && e->options.concurrency > e->options.cpus)
        return 1; /* operations block: one each */
    int64_t ns = e->op_ns[kind == RUN_MEASURE ? 0 : 1];
    int64_t quick = kind == RUN_SKIP ? LONGEST_RUN : RUN_NS / (ns > 0 ? ns : 1);
    int64_t fair = (g->n - g->cursor) / (2 * awake_limit(e)); /* the end is reached together */
    int64_t length = quick < fair ? quick : fair;
    return length < 1 ? 1 : length > LONGEST_RUN ? LONGEST_RUN : length;
}

static uint64_t claim_of(int64_t next, int64_t end)
{
    return (uint64_t)next << 32 | (uint64_t)end;
}

/* The next file of w's run, by its worker or, under the lock, by another. -1: none is left. */
static int64_t claim_next(worker *w)
{
    uint64_t seen = atomic_load_explicit(&w->claim, memory_order_relaxed);
    for (;;) {
        if (seen >> 32 >= (seen & UINT32_MAX))
            return -1;
        if (atomic_compare_exchange_weak(&w->claim, &seen, seen + (1ULL << 32)))
            return (int64_t)(seen >> 32);
    }
}

static void take_part(engine *e, group *g, run *r)
{
    file *f = &g->files[g->cursor];
    int64_t part = part_of(e, g, f);
    if (g->part == 0)
        atomic_store(&f->parts_left, (int32_t)((f->size + part - 1) / part));
    r->large = true;
    r->offset = g->part;
    r->bytes = f->size - g->part < part ? f->size - g->part : part;
    g->part += r->bytes;
    if (g->part == f->size) {
        g->part = 0;
        g->cursor++;
    }
}

static enum kind kind_of(const group *g, const file *f)
{
    if (g->stage == MEASURING)
        return RUN_MEASURE;
    return f->place != PLACE_SKIP && (f->size > 0 || g->expected) ? RUN_READ : RUN_SKIP;
}

static bool is_large(const engine *e, const group *g, const file *f)
{
    return kind_of(g, f) == RUN_READ && f->size > part_of(e, g, f);
}

/* Consecutive files of one kind, none of them large. */
static void take_files(engine *e, group *g, run *r)
{
    int64_t end = g->cursor + run_length(e, g, r->kind), i = g->cursor + 1;
    while (i < end && kind_of(g, &g->files[i]) == r->kind && !is_large(e, g, &g->files[i]))
        i++;
    g->cursor = i;
}

static void take_from_queue(engine *e, worker *w)
{
    group *g = e->queue.first;
    run *r = &w->run;
    int64_t begin = g->cursor;
    r->group = g;
    r->kind = kind_of(g, &g->files[begin]);
    if (is_large(e, g, &g->files[begin]))
        take_part(e, g, r);
    else
        take_files(e, g, r);
    int64_t end = r->large ? begin + 1 : g->cursor;
    atomic_store(&w->claim, claim_of(begin, end));
    r->several = end - begin > 1;
    e->several += r->several;
    if (r->kind == RUN_MEASURE) {
        r->keep = e->open_files + (end - begin) <= e->options.fd_budget;
        e->open_files += r->keep ? end - begin : 0; /* set right when the run ends */
        r->opened = r->keep ? end - begin : 0;
    }
    if (g->cursor == g->n) {
        detach(&e->queue, g);
        g->queued = false;
    }
}

/* One file from the run of a blocked worker. */
static bool take_loose(engine *e, worker *w)
{
    for (worker *other = e->workers; other && e->loose; other = other->next) {
        if (!other->loose)
            continue;
        group *g = other->run.group;
        int64_t i = given_up(w, g) ? -1 : claim_next(other);
        if (i < 0) {
            other->loose = false;
            e->loose--;
            continue;
        }
        w->run.group = g;
        w->run.kind = other->run.kind;
        w->run.keep = false;
        atomic_store(&w->claim, claim_of(i, i + 1));
        return true;
    }
    return false;
}

static bool take(engine *e, worker *w)
{
    if (e->awake > awake_limit(e) || e->stop)
        return false;
    w->run = (run){.watch = e->active > e->options.cpus};
    if (e->graveyard.first) {
        w->run.kind = RUN_CLOSE;
        w->run.group = e->graveyard.first;
        detach(&e->graveyard, w->run.group);
        return true;
    }
    if (!(e->loose && take_loose(e, w))) {
        if (!e->queue.first)
            return false;
        take_from_queue(e, w);
    }
    w->run.group->users++;
    if (w->run.kind == RUN_READ && ++e->reading > e->peak)
        e->peak = e->reading;
    return true;
}

static void fail(file *f, int32_t code)
{
    int32_t none = 0;
    atomic_compare_exchange_strong(&f->code, &none, code);
}

static void drop_fd(run *r, file *f)
{
    if (f->fd < 0)
        return;
    close(f->fd);
    f->fd = -1;
    r->closed++;
}

static void execute_part(worker *w, run *r, file *f)
{
    int32_t code = atomic_load(&f->code) ? 0 : read_range(w, r->group, f, r->offset, r->bytes);
    if (code)
        fail(f, code);
    if (atomic_fetch_sub(&f->parts_left, 1) == 1) {
        drop_fd(r, f);
        r->ended++;
    }
}

static void execute_file(worker *w, run *r, file *f)
{
    int32_t code = 0;
    if (r->kind == RUN_MEASURE) {
        code = measure_file(w, r->group, f, r->keep);
        r->closed += r->keep && f->fd < 0;
        atomic_store(&f->at_rest, true);
    } else {
        if (r->kind == RUN_READ)
            code = read_range(w, r->group, f, 0, f->size);
        drop_fd(r, f);
    }
    if (code)
        fail(f, code);
    r->ended++;
}

static void execute(worker *w)
{
    run *r = &w->run;
    group *g = r->group;
    r->began_ns = now_ns();
    int64_t i, switches = r->watch ? voluntary_switches() : 0;
    while (!given_up(w, g) && (i = claim_next(w)) >= 0) {
        atomic_store_explicit(&w->op_file, i, memory_order_relaxed);
        atomic_store_explicit(&w->op_start, now_ns(), memory_order_release);
        if (r->large)
            execute_part(w, r, &g->files[i]);
        else
            execute_file(w, r, &g->files[i]);
        atomic_store_explicit(&w->op_start, 0, memory_order_relaxed);
    }
    r->blocked = r->watch && voluntary_switches() != switches;
}

static void bury(worker *w)
{
    group *g = w->run.group;
    atomic_store_explicit(&w->op_start, now_ns(), memory_order_release);
    int64_t closed = close_files(g);
    close_root(g);
    free(g);
    atomic_store_explicit(&w->op_start, 0, memory_order_relaxed);
    pthread_mutex_lock(&w->e->lock);
    w->e->open_files -= closed;
}

/* ---- the end of a run -------------------------------------------------------------------- */

/* Learns from the run how long operations take and whether they block. */
static void learn(engine *e, const run *r)
{
    if (r->kind == RUN_SKIP || r->ended == 0)
        return;
    int64_t each = (now_ns() - r->began_ns) / r->ended;
    int64_t *smoothed = &e->op_ns[r->kind == RUN_MEASURE ? 0 : 1];
    *smoothed += (each - *smoothed) / 8;
    if (r->blocked)
        e->calm = 0;
    else if (r->watch && r->kind == RUN_READ)
        e->calm++;
    int streak = 2 * e->active > CALM_READS ? 2 * e->active : CALM_READS;
    if (e->calm >= streak && e->active > e->options.cpus) {
        e->active = e->active / 2 > e->options.cpus ? e->active / 2 : e->options.cpus;
        e->calm = 0;
    }
}

/* The group is nobody's any more: its files are closed by a worker, or it is freed at once. */
static void retire(engine *e, group *g)
{
    if (holds_files(g))
        append(&e->graveyard, g);
    else
        free(g);
}

static bool complete(engine *e, group *g)
{
    close_root(g);
    g->stage = g->stage == MEASURING ? MEASURED : FETCHED;
    g->done = true;
    append(&e->done, g);
    e->pending--;
    if (e->ready++ == 0)
        e->ready_ns = now_ns();
    bool due = e->eager || !e->armed || !e->queue.first || e->ready >= e->pending;
    e->eager = false;
    return due && must_tell(e);
}

static void finish(engine *e, worker *w)
{
    run *r = &w->run;
    group *g = r->group;
    g->unfinished -= r->ended;
    learn(e, r);
    e->several -= r->several;
    if (w->loose) {
        w->loose = false;
        e->loose--;
    }
    if (r->kind == RUN_MEASURE && r->opened > r->ended) /* others took, or it was given up */
        r->closed += r->opened - r->ended;
    e->open_files -= r->closed;
    e->reading -= r->kind == RUN_READ;
    g->users--;
    if (g->discarded) {
        if (g->users == 0) {
            if (g->stage == FETCHING) {
                detach(&e->unsettled, g);
                w->notify = must_tell(e);
            }
            retire(e, g);
        }
    } else if (g->unfinished == 0 && g->users == 0) {
        w->notify = complete(e, g);
    }
    r->group = NULL;
}

/* Lets the lock go while the owner is told. */
static void tell_if_due(engine *e, worker *w)
{
    if (!w->notify)
        return;
    w->notify = false;
    pthread_mutex_unlock(&e->lock);
    tell(e);
    pthread_mutex_lock(&e->lock);
}

static void park(engine *e, worker *w)
{
    e->awake--;
    w->next_idle = e->idle;
    e->idle = w;
    w->called = false;
    tell_if_due(e, w);
    while (!w->called && !e->stop)
        pthread_cond_wait(&w->wake, &e->lock);
}

static void destroy(engine *e);

/* A thread's last step; the lock is held and let go. */
static void leave(engine *e)
{
    bool last = --e->refs == 0;
    pthread_cond_broadcast(&e->gone);
    pthread_mutex_unlock(&e->lock);
    if (last)
        destroy(e);
}

static void *worker_main(void *argument)
{
    worker *w = argument;
    engine *e = w->e;
    pthread_setname_np(pthread_self(), "rayloader-read");
    atomic_store(&w->tid, (pid_t)syscall(SYS_gettid));
    pthread_mutex_lock(&e->lock);
    while (!e->stop || e->graveyard.first) {
        if (e->stop) { /* the last work: closing files, which may itself block */
            w->run = (run){.kind = RUN_CLOSE, .group = e->graveyard.first};
            detach(&e->graveyard, w->run.group);
        } else if (!take(e, w)) {
            park(e, w);
            continue;
        }
        call_one(e);
        arm_sentry(e);
        pthread_mutex_unlock(&e->lock);
        if (w->notify)
            tell(e);
        w->notify = false;
        if (w->run.kind == RUN_CLOSE) {
            bury(w);
        } else {
            execute(w);
            pthread_mutex_lock(&e->lock);
            finish(e, w);
        }
    }
    drop_scratch(w);
    w->exited = true;
    leave(e);
    return NULL;
}

/* ---- the sentry -------------------------------------------------------------------------- */

typedef struct {
    worker *w;
    int64_t op_start;
    bool blocked;
} sample;

/* A few workers that are in an operation, beginning elsewhere each time. */
static int choose(engine *e, sample *samples, int *busy)
{
    int n = 0, seen = 0;
    *busy = 0;
    for (worker *w = e->workers; w; w = w->next)
        *busy += atomic_load_explicit(&w->op_start, memory_order_relaxed) != 0;
    unsigned first = e->rotation++;
    for (worker *w = e->workers; w && n < SAMPLES; w = w->next) {
        int64_t start = atomic_load_explicit(&w->op_start, memory_order_relaxed);
        if (start != 0 && ((unsigned)seen++ + first) % (unsigned)(*busy | 1) < SAMPLES)
            samples[n++] = (sample){.w = w, .op_start = start};
    }
    return n;
}

/* Whether the thread has mostly had a CPU since the last look. Much cheaper than its state. */
static bool is_busy(worker *w, int64_t now)
{
    struct timespec cpu;
    clockid_t clock = (clockid_t)(~(unsigned)atomic_load(&w->tid) << 3 | 6); /* as glibc makes it */
    if (clock_gettime(clock, &cpu))
        return false;
    int64_t ns = (int64_t)cpu.tv_sec * 1000000000 + cpu.tv_nsec;
    bool busy = 2 * (ns - w->seen_cpu_ns) >= now - w->seen_ns;
    w->seen_cpu_ns = ns;
    w->seen_ns = now;
    return busy;
}

/* Whether a thread waits for something other than a CPU. */
static bool is_blocked(sample *s)
{
    char text[128];
    worker *w = s->w;
    if (is_busy(w, now_ns()))
        return false;
    if (w->stat_fd < 0) {
        snprintf(text, sizeof text, "/proc/self/task/%d/stat", (int)atomic_load(&w->tid));
        w->stat_fd = open(text, O_RDONLY | O_CLOEXEC);
    }
    ssize_t n = w->stat_fd < 0 ? -1 : pread(w->stat_fd, text, sizeof text - 1, 0);
    if (n <= 0)
        return now_ns() - s->op_start > UNKNOWN_NS;
    text[n] = 0;
    const char *state = strrchr(text, ')');
    return state && state[1] == ' ' && (state[2] == 'D' || state[2] == 'S');
}

static void loosen(engine *e, sample *s)
{
    worker *w = s->w;
    if (!s->blocked || w->loose || !w->run.group || !w->run.several)
        return;
    if (atomic_load_explicit(&w->op_start, memory_order_relaxed) != s->op_start)
        return;
    if (now_ns() - s->op_start > STUCK_NS) {
        w->loose = true;
        e->loose++;
    }
}

/* One look. True when workers were blocked and something was done about it. */
static bool look(engine *e)
{
    sample samples[SAMPLES];
    int busy, running = 0, n = choose(e, samples, &busy);
    pthread_mutex_unlock(&e->lock);
    for (int i = 0; i < n; i++) {
        samples[i].blocked = is_blocked(&samples[i]);
        running += !samples[i].blocked;
    }
    pthread_mutex_lock(&e->lock);
    if (e->stop)
        return false;
    for (int i = 0; i < n; i++)
        loosen(e, &samples[i]);
    bool widen = n > 0 && running < n && busy * running < e->options.cpus * n && has_work(e);
    if (widen && e->active < e->options.concurrency) {
        e->active = least(2 * e->active, e->options.concurrency);
        e->calm = 0;
    }
    bool called = false;
    e->thread_limit = INT_MAX; /* if the system refused a thread, it is asked again now and then */
    while (call_one(e))
        called = true;
    return called || widen;
}

static void *sentry_main(void *argument)
{
    engine *e = argument;
    int quiet = 0;
    int64_t tick_ns = TICK_NS;
    pthread_setname_np(pthread_self(), "rayloader-watch");
    pthread_mutex_lock(&e->lock);
    while (!e->stop) {
        if (!e->armed) {
            pthread_cond_wait(&e->sentry_wake, &e->lock);
            quiet = 0;
            tick_ns = TICK_NS;
            continue;
        }
        wait_until(&e->sentry_wake, &e->lock, now_ns() + tick_ns);
        if (e->stop)
            break;
        if (e->ready && now_ns() - e->ready_ns >= LONGEST_TICK_NS && must_tell(e))
            tell(e);
        quiet = wants_sentry(e) ? 0 : quiet + 1;
        if (quiet > QUIET_TICKS)
            e->armed = false;
        else if (!quiet)
            tick_ns = look(e) ? TICK_NS : least((int)(2 * tick_ns), LONGEST_TICK_NS);
    }
    for (worker *w = e->workers; w; w = w->next)
        if (w->stat_fd >= 0)
            close(w->stat_fd);
    e->sentry_exited = true;
    leave(e);
    return NULL;
}

/* ---- the owner's calls ------------------------------------------------------------------- */

engine *engine_open(const engine_options *options, int *error)
{
    engine *e = calloc(1, sizeof *e);
    *error = ENOMEM;
    if (!e)
        return NULL;
    e->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (e->event_fd < 0) {
        *error = errno;
        free(e);
        return NULL;
    }
    e->options = *options;
    e->pid = (int)getpid();
    e->refs = 1;
    e->active = options->cpus;
    e->thread_limit = INT_MAX;
    e->op_ns[0] = e->op_ns[1] = RUN_NS;
    pthread_mutex_init(&e->lock, NULL);
    init_cond(&e->gone);
    init_cond(&e->sentry_wake);
    return e;
}

int engine_fileno(const engine *e) { return e->event_fd; }

int engine_pid(const engine *e) { return e->pid; }

int engine_attach(engine *e, void *memory, int64_t bytes)
{
    if (e->options.direct && (uintptr_t)memory % PAGE)
        return EINVAL;
    pthread_mutex_lock(&e->lock);
    e->memory = memory;
    e->memory_bytes = bytes;
    pthread_mutex_unlock(&e->lock);
    return 0;
}

/* One allocation: the group, its files, their names, the root. */
static group *new_group(int64_t number, const char *root, int64_t root_bytes, const char *blob,
                        const int64_t *offsets, int64_t n, bool direct)
{
    size_t names = (size_t)(n ? offsets[n] - offsets[0] : 0) + (size_t)n;
    size_t head = sizeof(group) + (size_t)n * sizeof(file);
    group *g = malloc(head + names + (size_t)root_bytes + 1);
    if (!g)
        return NULL;
    memset(g, 0, sizeof *g);
    g->number = number;
    g->n = g->unfinished = n;
    g->root_fd = -1;
    char *text = (char *)g + head;
    for (int64_t i = 0; i < n; i++) {
        int64_t length = offsets[i + 1] - offsets[i];
        file *f = &g->files[i];
        *f = (file){.name = text, .length = length, .size = -1, .place = PLACE_SKIP, .fd = -1};
        atomic_init(&f->found, -1);
        atomic_init(&f->direct, direct);
        memcpy(text, blob + offsets[i], (size_t)length);
        text[length] = 0;
        text += length + 1;
    }
    memcpy(text, root, (size_t)root_bytes);
    text[root_bytes] = 0;
    g->root = text;
    return g;
}

/* Puts the group in the queue. EAGAIN: there is no thread, and none is to be had. */
static int submit(engine *e, group *g)
{
    g->cursor = g->part = 0;
    g->unfinished = g->n;
    e->eager |= e->pending++ == 0 && e->ready == 0;
    if (g->n == 0) {
        if (complete(e, g))
            tell(e);
        return 0;
    }
    append(&e->queue, g);
    g->queued = true;
    call_one(e);
    if (e->made > 0)
        return 0;
    detach(&e->queue, g);
    g->queued = false;
    e->pending--;
    e->thread_limit = INT_MAX; /* the next call tries again */
    return EAGAIN;
}

static int check_names(int64_t blob_bytes, const int64_t *offsets, int64_t n)
{
    if (n < 0 || n > INT32_MAX || offsets[0] < 0 || offsets[n] > blob_bytes)
        return ERANGE;
    for (int64_t i = 0; i < n; i++)
        if (offsets[i + 1] < offsets[i])
            return ERANGE;
    return 0;
}

/* Takes a new group in; it is the engine's, or freed. */
static int admit(engine *e, group *g)
{
    pthread_mutex_lock(&e->lock);
    int error = e->stop ? ESHUTDOWN : *slot(e, g->number) ? EEXIST : 0;
    if (!error) {
        enlist(e, g);
        error = submit(e, g);
        if (error)
            delist(e, g);
    }
    pthread_mutex_unlock(&e->lock);
    if (error)
        free(g);
    return error;
}

int engine_measure(engine *e, int64_t number, const char *root, int64_t root_bytes,
                   const char *blob, int64_t blob_bytes, const int64_t *offsets, int64_t n)
{
    if (check_names(blob_bytes, offsets, n))
        return ERANGE;
    group *g = new_group(number, root, root_bytes, blob, offsets, n, e->options.direct);
    return g ? admit(e, g) : ENOMEM;
}

static bool fits(const engine *e, const file *f, int64_t place)
{
    if (place == PLACE_SKIP)
        return true;
    if (f->size < 0 || atomic_load(&f->code) || place < PLACE_DROP)
        return false;
    if (place == PLACE_DROP)
        return true;
    bool direct = atomic_load(&f->direct);
    int64_t room = direct ? round_up(f->size) : f->size;
    if (direct && place % PAGE)
        return false;
    return place <= e->memory_bytes && room <= e->memory_bytes - place;
}

int engine_fetch(engine *e, int64_t number, const int64_t *places, int64_t n, int64_t *bad)
{
    pthread_mutex_lock(&e->lock);
    group *g = *slot(e, number);
    int error = 0;
    if (e->stop)
        error = ESHUTDOWN;
    else if (!g || g->stage != MEASURED || g->done)
        error = ENOENT;
    else if (g->n != n)
        error = EINVAL;
    for (int64_t i = 0; i < n && !error; i++) {
        if (!fits(e, &g->files[i], places[i])) {
            *bad = i;
            error = ERANGE;
        }
    }
    if (!error) {
        for (int64_t i = 0; i < n; i++)
            g->files[i].place = places[i];
        g->drop_part = e->options.scratch_part_bytes;
        g->stage = FETCHING;
        error = submit(e, g);
        if (error)
            g->stage = MEASURED;
    }
    pthread_mutex_unlock(&e->lock);
    return error;
}

int engine_read(engine *e, int64_t number, const char *root, int64_t root_bytes, const char *blob,
                int64_t blob_bytes, const int64_t *offsets, const int64_t *sizes,
                const int64_t *places, int64_t n, int64_t *bad)
{
    if (check_names(blob_bytes, offsets, n))
        return ERANGE;
    group *g = new_group(number, root, root_bytes, blob, offsets, n, e->options.direct);
    if (!g)
        return ENOMEM;
    for (int64_t i = 0; i < n; i++) {
        g->files[i].size = sizes[i];
        g->files[i].place = places[i];
        if (!fits(e, &g->files[i], places[i])) {
            *bad = i;
            free(g);
            return EDOM;
        }
    }
    g->expected = true;
    g->drop_part = e->options.scratch_part_bytes;
    g->stage = FETCHING;
    return admit(e, g);
}

void engine_discard(engine *e, int64_t number)
{
    pthread_mutex_lock(&e->lock);
    group *g = *slot(e, number);
    if (g && !e->stop) {
        delist(e, g);
        atomic_store(&g->discarded, true);
        if (g->queued)
            detach(&e->queue, g);
        if (g->done) {
            detach(&e->done, g);
            e->ready--;
        } else if (g->stage == MEASURING || g->stage == FETCHING) {
            e->pending--;
        }
        g->queued = g->done = false;
        if (g->users == 0) {
            retire(e, g);
            call_one(e);
        } else if (g->stage == FETCHING) {
            append(&e->unsettled, g);
        }
    }
    pthread_mutex_unlock(&e->lock);
}

bool engine_settled(engine *e, const int64_t *number)
{
    pthread_mutex_lock(&e->lock);
    const group *g = e->unsettled.first;
    while (g && number && g->number != *number)
        g = g->next;
    pthread_mutex_unlock(&e->lock);
    return g == NULL;
}

group *engine_collect(engine *e)
{
    uint64_t count;
    pthread_mutex_lock(&e->lock);
    group *list = e->done.first;
    e->done = (group_list){0};
    e->ready = 0;
    for (group *g = list; g; g = g->next) {
        g->done = false;
        if (g->stage == FETCHED)
            delist(e, g);
    }
    if (e->signalled && read(e->event_fd, &count, sizeof count) > 0)
        e->signalled = false;
    pthread_mutex_unlock(&e->lock);
    return list;
}

group *group_next(const group *g) { return g->next; }

int64_t group_number(const group *g) { return g->number; }

int64_t group_count(const group *g) { return g->n; }

int64_t group_results(const group *g, int64_t *sizes, int32_t *codes)
{
    int64_t failed = 0;
    for (int64_t i = 0; i < g->n; i++) {
        const file *f = &g->files[i];
        int32_t code = atomic_load_explicit(&f->code, memory_order_relaxed);
        bool skipped = g->stage == FETCHED && f->place == PLACE_SKIP;
        bool resized = code == FILE_RESIZED;
        codes[i] = skipped || resized ? 0 : code;
        sizes[i] = resized ? atomic_load(&f->found) : skipped || code ? -1 : f->size;
        failed += codes[i] != 0;
    }
    return failed;
}

void engine_release(group *g)
{
    if (g->stage == FETCHED)
        free(g);
    else
        g->prev = g->next = NULL;
}

void engine_set_concurrency(engine *e, int concurrency, int64_t scratch_part_bytes)
{
    pthread_mutex_lock(&e->lock);
    if (e->options.scratch_part_bytes != scratch_part_bytes)
        for (worker *w = e->idle; w; w = w->next_idle)
            drop_scratch(w);
    e->options.concurrency = concurrency;
    e->options.scratch_part_bytes = scratch_part_bytes;
    e->thread_limit = INT_MAX;
    while (call_one(e))
        ;
    arm_sentry(e);
    pthread_mutex_unlock(&e->lock);
}

bool engine_is_calm(engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool calm = e->active <= e->options.cpus;
    pthread_mutex_unlock(&e->lock);
    return calm;
}

void engine_totals_now(engine *e, engine_totals *totals)
{
    memset(totals, 0, sizeof *totals);
    pthread_mutex_lock(&e->lock);
    totals->peak = e->peak;
    totals->in_flight = e->reading;
    for (worker *w = e->workers; w; w = w->next) {
        tally *t = &w->tally;
        totals->metadata_ops += t->metadata_ops;
        totals->reads += t->reads;
        totals->bytes += t->bytes;
        totals->retries += t->retries;
        totals->read_ns += t->read_ns;
        totals->direct_bytes += t->direct_bytes;
        totals->fallback_files += t->fallback_files;
        totals->dropped_files += t->dropped_files;
        for (int i = 0; i < LATENCY_BUCKETS; i++)
            totals->latency[i] += t->latency[i];
    }
    pthread_mutex_unlock(&e->lock);
}

void engine_reset_peak(engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->peak = e->reading;
    pthread_mutex_unlock(&e->lock);
}

int64_t engine_oldest_ns(engine *e, char *name, int64_t *length)
{
    int64_t earliest = INT64_MAX;
    const file *oldest = NULL;
    pthread_mutex_lock(&e->lock);
    for (worker *w = e->workers; w; w = w->next) {
        int64_t start = atomic_load_explicit(&w->op_start, memory_order_acquire);
        if (start == 0 || start >= earliest || !w->run.group || w->run.kind == RUN_CLOSE)
            continue;
        if (w->run.group->discarded) /* nobody waits for it */
            continue;
        earliest = start;
        oldest = &w->run.group->files[atomic_load_explicit(&w->op_file, memory_order_relaxed)];
    }
    *length = oldest ? (oldest->length < *length ? oldest->length : *length) : 0;
    if (oldest)
        memcpy(name, oldest->name, (size_t)*length);
    pthread_mutex_unlock(&e->lock);
    return oldest ? now_ns() - earliest : 0;
}

/* ---- the end ----------------------------------------------------------------------------- */

static void destroy(engine *e)
{
    for (worker *w = e->workers, *next; w; w = next) {
        next = w->next;
        pthread_cond_destroy(&w->wake);
        free(w);
    }
    for (group *g = e->graveyard.first, *next; g; g = next) {
        next = g->next;
        close_files(g);
        close_root(g);
        free(g);
    }
    close(e->event_fd);
    pthread_cond_destroy(&e->gone);
    pthread_cond_destroy(&e->sentry_wake);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static void retire_all(engine *e)
{
    e->queue = e->done = (group_list){0};
    e->pending = e->ready = 0;
    for (group *g = e->oldest_group, *next; g; g = next) {
        next = g->newer;
        delist(e, g);
        atomic_store(&g->discarded, true);
        g->queued = g->done = false;
        if (g->users == 0)
            retire(e, g);
        else if (g->stage == FETCHING)
            append(&e->unsettled, g);
    }
}

int engine_close(engine *e, int64_t grace_ns)
{
    int left = 0;
    int64_t deadline = now_ns() + grace_ns;
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    retire_all(e);
    for (worker *w = e->workers; w; w = w->next)
        pthread_cond_signal(&w->wake);
    pthread_cond_signal(&e->sentry_wake);
    while (e->refs > 1 && now_ns() < deadline)
        wait_until(&e->gone, &e->lock, deadline);
    for (worker *w = e->workers; w; w = w->next) {
        left += !w->exited;
        if (w->exited)
            pthread_join(w->thread, NULL); /* has only to return */
        else
            pthread_detach(w->thread);
    }
    if (e->sentry_made && e->sentry_exited)
        pthread_join(e->sentry, NULL);
    else if (e->sentry_made)
        pthread_detach(e->sentry);
    leave(e);
    return left;
}

void engine_abandon(engine *e)
{
    close(e->event_fd);
}
