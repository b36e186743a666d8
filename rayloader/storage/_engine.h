/* The POSIX engine: bulk reads with a pool of threads of its own. Plain C, knows no Python.
 *
 * One thread (the owner) calls every function; workers never call back. A group of files goes
 * through engine_measure -> engine_collect -> engine_fetch -> engine_collect, or, where its sizes
 * are known, through engine_read -> engine_collect, or is forgotten with
 * engine_discard at any moment. Functions return 0 or an error number unless stated otherwise, and
 * none of them waits for a file system, engine_close within its grace apart.
 */
#ifndef RAYLOADER_ENGINE_H
#define RAYLOADER_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct engine engine;
typedef struct group group;

/* Why one file failed: 0, an error number of the system (> 0), or one of these. */
enum {
    FILE_NOT_REGULAR = -1, /* a directory, FIFO, socket or device */
    FILE_TRUNCATED = -2,   /* ended before its measured size */
    FILE_NO_DIRECT = -3,   /* O_DIRECT refused, and demanded */
    FILE_REPLACED = -4,    /* another file bears the name now */
    FILE_BAD_NAME = -5,    /* a NUL byte in the name */
    FILE_RESIZED = -6,     /* has another size than expected; internal, group_results tells it */
};

enum { PLACE_DROP = -1, PLACE_SKIP = -2 };
enum { DIRECT_NO = 0, DIRECT_DEMANDED = 1, DIRECT_PREFERRED = 2 };
enum { LATENCY_BUCKETS = 128 };

typedef struct {
    int concurrency;            /* ceiling on operations in flight */
    int cpus;                   /* threads that are enough while nothing blocks */
    int64_t part_bytes;         /* larger files are read as ranges of this length */
    int64_t scratch_part_bytes; /* the same for files whose bytes are dropped */
    int direct;                 /* DIRECT_* */
    bool drop_cache;
    int64_t fd_budget; /* files that may stay open between measure and fetch */
} engine_options;

typedef struct {
    int64_t metadata_ops, reads, bytes, retries, read_ns, peak, in_flight;
    int64_t direct_bytes, fallback_files, dropped_files;
    int64_t latency[LATENCY_BUCKETS]; /* i: [2^(i/4), 2^((i+1)/4)) microseconds */
} engine_totals;

/* NULL and *error when the system gives no event descriptor or no memory. */
engine *engine_open(const engine_options *options, int *error);

/* Readable while engine_collect has something to give, or when a discarded group has settled. */
int engine_fileno(const engine *e);

/* The process that opened it; no other may use it. */
int engine_pid(const engine *e);

/* EINVAL: O_DIRECT needs memory that begins at a multiple of 4096. */
int engine_attach(engine *e, void *memory, int64_t bytes);

/* Names are blob[offsets[i] : offsets[i + 1]]; everything is copied.
 * EEXIST: the number is in use. ERANGE: offsets outside the blob. EAGAIN: no thread to be had. */
int engine_measure(engine *e, int64_t number, const char *root, int64_t root_bytes,
                   const char *blob, int64_t blob_bytes, const int64_t *offsets, int64_t n);

/* ENOENT: no such group, or not measured and collected. EINVAL: n differs.
 * ERANGE: place *bad leaves no room, is not aligned, or belongs to a file that was not measured. */
int engine_fetch(engine *e, int64_t number, const int64_t *places, int64_t n, int64_t *bad);

/* Both steps in one, of files whose sizes are known. A file that has another size is not read.
 * Errors as of engine_measure and engine_fetch; EDOM: ERANGE of a place. */
int engine_read(engine *e, int64_t number, const char *root, int64_t root_bytes, const char *blob,
                int64_t blob_bytes, const int64_t *offsets, const int64_t *sizes,
                const int64_t *places, int64_t n, int64_t *bad);

/* Unknown numbers are ignored. */
void engine_discard(engine *e, int64_t number);

/* No read of a discarded group (of *number; NULL: of any) is still running. */
bool engine_settled(engine *e, const int64_t *number);

/* What has finished, as a list; walk it with group_next, then engine_release each. */
group *engine_collect(engine *e);
group *group_next(const group *g);
int64_t group_number(const group *g);
int64_t group_count(const group *g);
/* sizes[i]: bytes, -1 when failed or not read; codes[i]: why. After engine_read also the size of a
 * file that was not read because another one was expected. Returns how many failed. */
int64_t group_results(const group *g, int64_t *sizes, int32_t *codes);
void engine_release(group *g);

void engine_set_concurrency(engine *e, int concurrency, int64_t scratch_part_bytes);
/* Operations return at once, so that more of them in flight would not help. */
bool engine_is_calm(engine *e);
void engine_totals_now(engine *e, engine_totals *totals);
void engine_reset_peak(engine *e);

/* Age of the operation in flight for longest, discarded groups apart; 0 when none is. Its name in
 * name[0 .. *length). */
int64_t engine_oldest_ns(engine *e, char *name, int64_t *length);

/* Ends the threads; returns how many stayed behind in a system call after grace_ns. They touch
 * the attached memory until they return, and what they use is freed by the last of them. */
int engine_close(engine *e, int64_t grace_ns);

/* In a forked child: gives back what the child inherited; touches no lock. */
void engine_abandon(engine *e);

#endif
