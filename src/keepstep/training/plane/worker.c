/* Threads around the engine: submit, wait, the worker, and how others get in between. */
#include "plane.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Wakes an engine that sleeps in poll. */
void plane_kick(struct plane *plane) {
    uint64_t one = 1;
    if (atomic_load(&plane->sleeping)) (void)!write(plane->wake_fd, &one, sizeof one);
}

/* Takes plane->run away from the engine within one of its turns. */
void plane_enter(struct plane *plane) {
    atomic_fetch_add(&plane->pause, 1);
    plane_kick(plane);
    pthread_mutex_lock(&plane->gate);
    pthread_mutex_lock(&plane->run);
    pthread_mutex_unlock(&plane->gate);
    atomic_fetch_sub(&plane->pause, 1);
}

void plane_leave(struct plane *plane) { pthread_mutex_unlock(&plane->run); }

/* The engine's side of plane_enter: whoever waits at the gate goes first. */
void plane_give_way(struct plane *plane) {
    pthread_mutex_unlock(&plane->run);
    pthread_mutex_lock(&plane->gate);
    pthread_mutex_lock(&plane->run);
    pthread_mutex_unlock(&plane->gate);
}

struct ticket *plane_pop(struct plane *plane) {
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = plane->queue_first;
    if (ticket) {
        plane->queue_first = ticket->next;
        ticket->next = NULL;
        atomic_fetch_sub(&plane->queued, 1);
    }
    pthread_mutex_unlock(&plane->mutex);
    return ticket;
}

void ticket_free(struct ticket *ticket) {
    free((void *)ticket->call.inputs);
    free(ticket);
}

static void slot_free(struct plane *plane, struct ticket *ticket) {
    uint32_t slot = (uint32_t)(ticket->id & 0xffffff);
    plane->tickets[slot] = NULL;
    plane->free_slots[plane->tickets_free++] = slot;
    ticket_free(ticket);
}

/* With plane->mutex held: the ticket is over and its buffers belong to the caller again. */
static void complete_locked(struct plane *plane, struct ticket *ticket, int status) {
    atomic_store(&ticket->status, status);
    if (ticket->released) {
        slot_free(plane, ticket);
        return;
    }
    if (ticket->want_future) {
        ticket->next_done = NULL;
        if (plane->done_first) plane->done_last->next_done = ticket;
        else plane->done_first = ticket;
        plane->done_last = ticket;
        ticket->listed = true;
        pthread_cond_signal(&plane->future);
    }
    if (plane->waiters) pthread_cond_broadcast(&plane->finished);
}

void ticket_complete(struct plane *plane, struct ticket *ticket, int status) {
    pthread_mutex_lock(&plane->mutex);
    complete_locked(plane, ticket, status);
    pthread_mutex_unlock(&plane->mutex);
}

void queue_end(struct plane *plane, int status) {
    pthread_mutex_lock(&plane->mutex);
    while (plane->queue_first) {
        struct ticket *ticket = plane->queue_first;
        plane->queue_first = ticket->next;
        atomic_fetch_sub(&plane->queued, 1);
        complete_locked(plane, ticket, status);
    }
    pthread_mutex_unlock(&plane->mutex);
}

/* Is the engine for a while. With plane->mutex held on entry and on return. */
static bool engine_own(struct plane *plane, struct ticket *until, uint64_t deadline_ns) {
    plane->owned = true;
    pthread_mutex_unlock(&plane->mutex);
    pthread_mutex_lock(&plane->run);
    engine_run(plane, until, deadline_ns);
    bool left = plane->active != NULL;
    pthread_mutex_unlock(&plane->run);
    pthread_mutex_lock(&plane->mutex);
    plane->owned = false;
    return left;
}

static void *worker_main(void *argument) {
    struct plane *plane = argument;
    pthread_mutex_lock(&plane->mutex);
    while (!atomic_load(&plane->closing)) {
        if (plane->owned || (!plane->queue_first && !plane->orphan)) {
            pthread_cond_wait(&plane->work, &plane->mutex);
            continue;
        }
        plane->orphan = false;
        engine_own(plane, NULL, 0);
    }
    pthread_mutex_unlock(&plane->mutex);
    return NULL;
}

/* With plane->mutex held: makes sure that a worker looks at the plane. */
static int worker_wake(struct plane *plane) {
    if (plane->worker_started) {
        pthread_cond_signal(&plane->work);
        return 0;
    }
    sigset_t all, old;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&plane->worker, &attributes, worker_main, plane);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    plane->worker_started = !error;
    return error;
}

static bool slots_grow(struct plane *plane) {
    uint32_t size = plane->tickets_size ? plane->tickets_size * 2 : 64;
    struct ticket **tickets = realloc(plane->tickets, size * sizeof *tickets);
    if (tickets) plane->tickets = tickets;
    uint32_t *slots = tickets ? realloc(plane->free_slots, size * sizeof *slots) : NULL;
    if (!slots || size > 1 << 24) return false;
    plane->free_slots = slots;
    for (uint32_t i = size; i-- > plane->tickets_size;) {
        tickets[i] = NULL;
        slots[plane->tickets_free++] = i;
    }
    plane->tickets_size = size;
    return true;
}

static struct ticket *ticket_new(const struct ks_call *call) {
    struct ticket *ticket = calloc(1, sizeof *ticket);
    uint32_t n = call->n_inputs + call->n_outputs;
    struct ks_buffer *buffers = malloc((n + 1) * sizeof *buffers);
    if (!ticket || !buffers) {
        free(ticket);
        free(buffers);
        return NULL;
    }
    ticket->call = *call;
    if (call->n_inputs) memcpy(buffers, call->inputs, call->n_inputs * sizeof *buffers);
    if (call->n_outputs) memcpy(buffers + call->n_inputs, call->outputs, call->n_outputs * sizeof *buffers);
    ticket->call.inputs = buffers;
    ticket->call.outputs = buffers + call->n_inputs;
    ticket->want_future = call->want_future;
    ticket->source = ticket->failure.peer = -1;
    ticket->total = plan_total(call);
    ticket->queued_ns = clock_now_ns();
    if (call->timeout_s > 0 && call->timeout_s < 1e9) ticket->deadline_ns = ticket->queued_ns + (uint64_t)(call->timeout_s * 1e9);
    return ticket;
}

/* With plane->mutex held. */
static uint64_t enqueue(struct plane *plane, struct ticket *ticket) {
    ticket->id = ++plane->serial << 24 | plane->free_slots[--plane->tickets_free];
    plane->tickets[ticket->id & 0xffffff] = ticket;
    uint64_t id = ticket->id;
    if (atomic_load(&plane->domain->poisoned)) {
        complete_locked(plane, ticket, KS_ABORTED);
        return id;
    }
    if (!ticket->call.run_inline && worker_wake(plane)) {
        ticket->failure = (struct ks_failure){-1, EAGAIN, "no thread could be started for the data plane"};
        complete_locked(plane, ticket, KS_FAILED);
        return id;
    }
    record_queued(plane);
    if (plane->queue_first) plane->queue_last->next = ticket;
    else plane->queue_first = ticket;
    plane->queue_last = ticket;
    atomic_fetch_add(&plane->queued, 1);
    return id;
}

/* Returns a ticket, or 0 with *why set. */
KS_PUBLIC uint64_t ks_submit(struct plane *plane, const struct ks_call *call, const char **why) {
    *why = atomic_load(&plane->closing) ? "the plane is closed" : plan_check(plane, call);
    if (*why) return 0;
    struct ticket *ticket = ticket_new(call);
    if (!ticket) return *why = "out of memory", 0;
    pthread_mutex_lock(&plane->mutex);
    bool closed = atomic_load(&plane->closing);
    if (closed || (!plane->tickets_free && !slots_grow(plane))) {
        pthread_mutex_unlock(&plane->mutex);
        ticket_free(ticket);
        return *why = closed ? "the plane is closed" : "too many tickets that were never released", 0;
    }
    uint64_t id = enqueue(plane, ticket);
    pthread_mutex_unlock(&plane->mutex);
    if (plane->lane == KS_P2P) plane_kick(plane);
    return id;
}

/* With plane->mutex held. */
static struct ticket *find(struct plane *plane, uint64_t id) {
    uint32_t slot = (uint32_t)(id & 0xffffff);
    struct ticket *ticket = slot < plane->tickets_size ? plane->tickets[slot] : NULL;
    return ticket && ticket->id == id && !ticket->released ? ticket : NULL;
}

static void wait_on(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    if (!deadline_ns) {
        pthread_cond_wait(condition, mutex);
        return;
    }
    struct timespec until = {(time_t)(deadline_ns / 1000000000ull), (long)(deadline_ns % 1000000000ull)};
    pthread_cond_timedwait(condition, mutex, &until);
}

/* Runs the engine in this thread if nobody else does. With plane->mutex held on entry and on return. */
static void help(struct plane *plane, struct ticket *ticket, uint64_t deadline_ns) {
    ticket->call.run_inline = false;
    if (plane->owned) return;                                                    /* the owner, or the worker after it, takes it on */
    plane->orphan |= engine_own(plane, ticket, deadline_ns);
    if (plane->orphan || plane->queue_first) worker_wake(plane);
}

/* timeout_s < 0: for ever. Returns the status (KS_PENDING: the wait ran out), -1 for a ticket that does not exist. */
KS_PUBLIC int ks_wait(struct plane *plane, uint64_t id, double timeout_s) {
    uint64_t deadline = timeout_s < 0 ? 0 : clock_now_ns() + (uint64_t)(timeout_s * 1e9);
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = find(plane, id);
    if (!ticket) {
        pthread_mutex_unlock(&plane->mutex);
        return -1;
    }
    plane->users++;
    if (ticket->call.run_inline && atomic_load(&ticket->status) == KS_PENDING) help(plane, ticket, deadline);
    plane->waiters++;
    int status;
    while ((status = atomic_load(&ticket->status)) <= KS_RUNNING) {
        if (deadline && clock_now_ns() >= deadline) break;
        wait_on(&plane->finished, &plane->mutex, deadline);
    }
    plane->waiters--;
    plane->users--;
    pthread_mutex_unlock(&plane->mutex);
    return status == KS_RUNNING ? KS_PENDING : status;
}

KS_PUBLIC int ks_status(struct plane *plane, uint64_t id) {
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = find(plane, id);
    int status = ticket ? atomic_load(&ticket->status) : -1;
    pthread_mutex_unlock(&plane->mutex);
    return status == KS_RUNNING ? KS_PENDING : status;
}

KS_PUBLIC int ks_failure(struct plane *plane, uint64_t id, struct ks_failure *failure) {
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = find(plane, id);
    int status = ticket ? atomic_load(&ticket->status) : -1;
    if (ticket) *failure = ticket->failure;
    pthread_mutex_unlock(&plane->mutex);
    return status;
}

KS_PUBLIC int ks_source(struct plane *plane, uint64_t id) {
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = find(plane, id);
    int source = ticket && atomic_load(&ticket->status) == KS_DONE ? ticket->source : -1;
    pthread_mutex_unlock(&plane->mutex);
    return source;
}

/* The next finished ticket with want_future; 0 after timeout_s (< 0: none) or when the plane closes. */
KS_PUBLIC uint64_t ks_next_done(struct plane *plane, double timeout_s) {
    uint64_t deadline = timeout_s < 0 ? 0 : clock_now_ns() + (uint64_t)(timeout_s * 1e9), id = 0;
    pthread_mutex_lock(&plane->mutex);
    plane->users++;
    while (!plane->done_first && !atomic_load(&plane->closing)) {
        if (deadline && clock_now_ns() >= deadline) break;
        wait_on(&plane->future, &plane->mutex, deadline);
    }
    struct ticket *ticket = plane->done_first;
    if (ticket) {
        plane->done_first = ticket->next_done;
        ticket->listed = false;
        id = ticket->id;
    }
    plane->users--;
    pthread_mutex_unlock(&plane->mutex);
    return id;
}

static void unlist(struct plane *plane, struct ticket *ticket) {
    struct ticket *previous = NULL, *at = plane->done_first;
    while (at && at != ticket) previous = at, at = at->next_done;
    if (!at) return;
    if (previous) previous->next_done = ticket->next_done;
    else plane->done_first = ticket->next_done;
    if (plane->done_last == ticket) plane->done_last = previous;
}

/* The caller is done with a ticket; a running call still ends, unseen. */
KS_PUBLIC void ks_release(struct plane *plane, uint64_t id) {
    pthread_mutex_lock(&plane->mutex);
    struct ticket *ticket = find(plane, id);
    if (ticket) {
        if (ticket->listed) unlist(plane, ticket);
        ticket->released = true;
        if (atomic_load(&ticket->status) > KS_RUNNING) slot_free(plane, ticket);
        else worker_wake(plane);
    }
    pthread_mutex_unlock(&plane->mutex);
}

/* Whether a call runs or waits. */
KS_PUBLIC int ks_busy(struct plane *plane) {
    pthread_mutex_lock(&plane->mutex);
    int busy = plane->owned || plane->orphan || plane->queue_first;
    pthread_mutex_unlock(&plane->mutex);
    return busy;
}
