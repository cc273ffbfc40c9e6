/* Store buffering, the shape that both halves of the pin protocol share: each thread stores its own word,
 * passes a fence, and loads the other's. Without a fence both may read 0, which is a worker and the daemon
 * missing each other. test_litmus.py compiles this and hands in the fence that the product calls.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef void (*fence_fn)(int);

/* Words that two processes would share, each on a cache line of its own. Plain relaxed accesses: what the
 * compiler may do with them is what it may do with numpy's. */
static struct {
    _Alignas(128) atomic_int value;
} x, y, turn[2];

struct side {
    int me;
    long rounds;
    fence_fn fence;
    unsigned char *seen; /* [rounds] what this side loaded */
};

/* Both sides start a round together, or as nearly as a spin allows. */
static void meet(int me, int round) {
    atomic_store(&turn[me].value, round);
    for (int spins = 0; atomic_load(&turn[1 - me].value) < round; spins++)
        if (spins > 200)
            sched_yield(); /* the other one has no processor */
}

static void *run(void *argument) {
    struct side *side = argument;
    atomic_int *mine = side->me ? &y.value : &x.value;
    atomic_int *other = side->me ? &x.value : &y.value;
    for (long i = 0; i < side->rounds; i++) {
        meet(side->me, (int)(3 * i + 1));
        atomic_store_explicit(mine, 1, memory_order_relaxed);
        if (side->fence)
            side->fence(memory_order_seq_cst);
        side->seen[i] = (unsigned char)atomic_load_explicit(other, memory_order_relaxed);
        meet(side->me, (int)(3 * i + 2));
        atomic_store_explicit(mine, 0, memory_order_relaxed);
        meet(side->me, (int)(3 * i + 3));
    }
    return 0;
}

/* Returns in how many of `rounds` both sides read 0; -1: no thread could be started. */
long both_missed(long rounds, fence_fn fence, unsigned char *seen0, unsigned char *seen1) {
    struct side sides[2] = {{0, rounds, fence, seen0}, {1, rounds, fence, seen1}};
    pthread_t thread;
    long missed = 0;
    x.value = y.value = turn[0].value = turn[1].value = 0;
    if (pthread_create(&thread, 0, run, &sides[1]))
        return -1;
    run(&sides[0]);
    pthread_join(thread, 0);
    for (long i = 0; i < rounds; i++)
        missed += !seen0[i] && !seen1[i];
    return missed;
}
