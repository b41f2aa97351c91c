/* Threads that help with products. One crew a library and process; crew.h is included once. */
#ifndef MOEMESH_CREW_H
#define MOEMESH_CREW_H
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*crew_piece)(void *work, int64_t piece);

/* Looks at the word before a helper that finds nothing lets others have its core, and how many such
 * turns before it sleeps: some 10 us, and a millisecond. */
enum { CREW_LOOKS = 256, CREW_TURNS = 100 };

enum { CREW_MOST = 256 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called;
    int64_t helpers, calls; /* under the lock */
    pid_t thread[CREW_MOST]; /* of each helper, 0 before it lives; under the lock */
    atomic_int kept_off;     /* the CPU that the helpers do not run on; -1: look again */
    _Atomic int64_t asleep; /* changed under the lock */
    atomic_int on;          /* whether work is shared */
    atomic_flag taken;      /* the work below is some caller's */
    crew_piece piece;
    void *work;
    /* Pieces that nobody has taken, below the number of the work. A piece is taken by a change of
     * the whole word, so that nobody takes one of a work that is over. */
    _Atomic uint64_t left;
    _Atomic int64_t done;
} crew = {.lock = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER,
          .kept_off = -1, .taken = ATOMIC_FLAG_INIT};

static inline void crew_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Do one piece that nobody has taken. Returns 0 when there is none. */
static int crew_help(void) {
    uint64_t left = atomic_load_explicit(&crew.left, memory_order_acquire);
    do {
        if (!(uint32_t)left) return 0;
    } while (!atomic_compare_exchange_weak_explicit(&crew.left, &left, left - 1,
                                                    memory_order_acquire, memory_order_acquire));
    crew.piece(crew.work, (int64_t)(uint32_t)left - 1);
    atomic_fetch_add_explicit(&crew.done, 1, memory_order_release);
    return 1;
}

/* Do all pieces; with the crew if work is shared and it has no other. */
static void crew_do(crew_piece piece, void *work, int64_t pieces) {
    if (pieces < 2 || !atomic_load_explicit(&crew.on, memory_order_relaxed) ||
        atomic_flag_test_and_set_explicit(&crew.taken, memory_order_acquire)) {
        for (int64_t i = 0; i < pieces; i++) piece(work, i);
        return;
    }
    uint64_t number = (atomic_load_explicit(&crew.left, memory_order_relaxed) >> 32) + 1;
    crew.piece = piece;
    crew.work = work;
    atomic_store_explicit(&crew.done, 0, memory_order_relaxed);
    atomic_store_explicit(&crew.left, number << 32 | (uint64_t)pieces, memory_order_release);
    if (atomic_load_explicit(&crew.asleep, memory_order_relaxed)) {
        pthread_mutex_lock(&crew.lock);
        crew.calls++;
        pthread_mutex_unlock(&crew.lock);
        pthread_cond_broadcast(&crew.called); /* who wakes finds the lock free */
    }
    while (crew_help())
        ;
    /* What is left is in a helper's hands. It may have lost its core: then it gets this one. */
    for (int looks = 0; atomic_load_explicit(&crew.done, memory_order_acquire) < pieces; looks++)
        looks % CREW_LOOKS == CREW_LOOKS - 1 ? (void)sched_yield() : crew_pause();
    atomic_flag_clear_explicit(&crew.taken, memory_order_release);
}

#if defined(__linux__)
/* Keep the helpers off the CPU that the caller runs on. Left to itself the scheduler wakes a helper
 * there when it finds the machine busy, beside an idle CPU, and the two take turns. */
static void crew_place(void) {
    int cpu = sched_getcpu();
    cpu_set_t allowed;
    if (cpu < 0 || cpu == crew.kept_off || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    CPU_CLR(cpu, &allowed);
    if (!CPU_COUNT(&allowed)) return;
    crew.kept_off = cpu;
    pthread_mutex_lock(&crew.lock);
    /* It fails for a helper that does not live yet, which then runs anywhere. */
    for (int64_t i = 0; i < crew.helpers; i++)
        if (crew.thread[i]) sched_setaffinity(crew.thread[i], sizeof allowed, &allowed);
    pthread_mutex_unlock(&crew.lock);
}

static pid_t crew_thread(void) { return (pid_t)syscall(SYS_gettid); }
#else
static void crew_place(void) {}

static pid_t crew_thread(void) { return 0; }
#endif

static void *crew_live(void *number) {
    int64_t heard = 0;
    pthread_mutex_lock(&crew.lock);
    crew.thread[(intptr_t)number] = crew_thread();
    crew.kept_off = -1;
    pthread_mutex_unlock(&crew.lock);
    for (;;) {
        pthread_mutex_lock(&crew.lock);
        crew.asleep++;
        while (crew.calls == heard) pthread_cond_wait(&crew.called, &crew.lock);
        crew.asleep--;
        heard = crew.calls;
        pthread_mutex_unlock(&crew.lock);
        for (int looks = 0; looks < CREW_LOOKS * CREW_TURNS; looks++) {
            if (crew_help()) {
                looks = 0;
                continue;
            }
            if (!atomic_load_explicit(&crew.on, memory_order_relaxed)) break;
            looks % CREW_LOOKS == CREW_LOOKS - 1 ? (void)sched_yield() : crew_pause();
        }
    }
    return number;
}

/* Have at least so many helpers, for as long as the process lives. Returns how many there are. */
int64_t moemesh_crew_hire(int64_t helpers) {
    pthread_mutex_lock(&crew.lock);
    while (crew.helpers < helpers && crew.helpers < CREW_MOST) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, crew_live, (void *)(intptr_t)crew.helpers)) break;
        pthread_detach(thread);
        crew.helpers++;
    }
    int64_t there = crew.helpers;
    pthread_mutex_unlock(&crew.lock);
    return there;
}

/* Share work from now on, or no longer. */
void moemesh_crew_share(int32_t on) {
    if (on) crew_place();
    atomic_store_explicit(&crew.on, on, memory_order_relaxed);
}

#endif
