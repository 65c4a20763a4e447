/* Domains and planes: making and closing them, links, poison and install. */
#include "plane.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <poll.h>
#include <unistd.h>

KS_PUBLIC struct domain *ks_domain_new(int protected) {
    struct domain *domain = calloc(1, sizeof *domain);
    if (!domain) return NULL;
    domain->protected = protected;
    domain->failure_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&domain->admin, NULL);
    pthread_mutex_init(&domain->list, NULL);
    return domain;
}

KS_PUBLIC int ks_domain_failure_fd(struct domain *domain) { return domain->failure_fd; }
KS_PUBLIC int ks_domain_poisoned(struct domain *domain) { return atomic_load(&domain->poisoned); }
KS_PUBLIC uint32_t ks_domain_generation(struct domain *domain) { return atomic_load(&domain->generation); }
KS_PUBLIC int ks_domain_recording(struct domain *domain) { return atomic_load(&domain->recording); }
KS_PUBLIC uint64_t ks_shared_bytes(void) { return shm_bytes(); }

KS_PUBLIC void ks_domain_set_step(struct domain *domain, int64_t step) {
    atomic_store(&domain->step, step);
    record_header(domain);
}

KS_PUBLIC void ks_domain_set_recording(struct domain *domain, int recording) {
    atomic_store(&domain->recording, recording && atomic_load(&domain->ring));
}

/* Records into this memory from now on; the header must be there. 0, or -1 when it is too small. */
KS_PUBLIC int ks_domain_record(struct domain *domain, char *base, uint64_t size) {
    if (size < RING_SLOTS + 256 * RING_SLOT_BYTES) return -1;
    pthread_mutex_lock(&domain->list);
    uint64_t capacity, most = (size - RING_SLOTS) / RING_SLOT_BYTES;
    memcpy(&capacity, base + 16, sizeof capacity);
    domain->ring_slots = capacity && capacity < most ? capacity : most;
    atomic_store(&domain->ring, base);
    for (struct plane *plane = domain->planes; plane; plane = plane->next) record_attach(plane);
    pthread_mutex_unlock(&domain->list);
    record_header(domain);
    atomic_store(&domain->recording, true);
    return 0;
}

/* Called by an engine: from here on nothing completes as done. The others notice on their own. */
void domain_poison_flag(struct domain *domain) {
    atomic_store(&domain->poisoned, true);
    pthread_mutex_lock(&domain->list);
    for (struct plane *plane = domain->planes; plane; plane = plane->next) plane_kick(plane);
    pthread_mutex_unlock(&domain->list);
}

/* Remembers that a peer's link failed and makes failure_fd readable. */
void domain_lose(struct plane *plane, int peer) {
    struct domain *domain = plane->domain;
    uint64_t one = 1;
    pthread_mutex_lock(&domain->list);
    struct loss *loss = domain->lost;
    while (loss && (loss->plane != plane || loss->peer != peer)) loss = loss->next;
    if (!loss && (loss = malloc(sizeof *loss))) {
        *loss = (struct loss){plane, peer, domain->lost};
        domain->lost = loss;
    }
    pthread_mutex_unlock(&domain->list);
    if (domain->protected) atomic_store(&domain->poisoned, true);
    (void)!write(domain->failure_fd, &one, sizeof one);
}

/* Forgets the losses of one plane, or all (NULL). With domain->list held. */
static void losses_drop(struct domain *domain, const struct plane *plane) {
    for (struct loss **at = &domain->lost; *at;) {
        struct loss *loss = *at;
        if (plane && loss->plane != plane) {
            at = &loss->next;
            continue;
        }
        *at = loss->next;
        free(loss);
    }
    uint64_t count;
    if (!domain->lost) (void)!read(domain->failure_fd, &count, sizeof count);
}

/* Copies up to `most` (plane, peer) pairs; returns how many there are. */
KS_PUBLIC int ks_domain_lost(struct domain *domain, struct plane **planes, int *peers, int most) {
    int n = 0;
    pthread_mutex_lock(&domain->list);
    for (struct loss *loss = domain->lost; loss; loss = loss->next, n++)
        if (n < most) planes[n] = loss->plane, peers[n] = loss->peer;
    pthread_mutex_unlock(&domain->list);
    return n;
}

static void poison_all(struct domain *domain) {
    domain_poison_flag(domain);
    for (struct plane *plane = domain->planes; plane; plane = plane->next) {
        plane_enter(plane);
        engine_abort(plane);
        plane_leave(plane);
    }
}

/* When this returns, every call has ended and nothing touches the buffers of any. */
KS_PUBLIC void ks_domain_poison(struct domain *domain) {
    atomic_store(&domain->poisoned, true);
    pthread_mutex_lock(&domain->admin);
    poison_all(domain);
    pthread_mutex_unlock(&domain->admin);
}

/* A new generation: every plane counts from 0 again; what older generations left in the links will be dropped. */
KS_PUBLIC void ks_domain_install(struct domain *domain, uint32_t generation) {
    pthread_mutex_lock(&domain->admin);
    poison_all(domain);
    atomic_store(&domain->generation, generation);
    for (struct plane *plane = domain->planes; plane; plane = plane->next) {
        plane_enter(plane);
        plane->sequence = 0;
        plane->broken = false;
        record_install(plane);
        plane_leave(plane);
    }
    pthread_mutex_lock(&domain->list);
    losses_drop(domain, NULL);
    pthread_mutex_unlock(&domain->list);
    record_header(domain);
    atomic_store(&domain->poisoned, false);
    pthread_mutex_unlock(&domain->admin);
}

static void conditions_init(struct plane *plane) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&plane->work, &attributes);
    pthread_cond_init(&plane->finished, &attributes);
    pthread_cond_init(&plane->future, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&plane->run, NULL);
    pthread_mutex_init(&plane->gate, NULL);
    pthread_mutex_init(&plane->mutex, NULL);
}

/* Frees what a plane holds. The plane itself stays, empty: a thread may be about to ask it something. */
static void plane_empty(struct plane *plane) {
    for (void **block = plane->blocks, **next; block; block = next) {
        next = *block;
        free(block);
    }
    for (uint32_t i = 0; i < plane->tickets_size; i++)
        if (plane->tickets[i]) ticket_free(plane->tickets[i]);
    if (plane->wake_fd >= 0) close(plane->wake_fd);
    plane->wake_fd = -1;
    free(plane->peers);
    free(plane->scan);
    free(plane->polls);
    free(plane->global_ranks);
    free(plane->scratch);
    free(plane->tickets);
    free(plane->free_slots);
    plane->peers = NULL;
    plane->tickets = NULL;
    plane->done_first = NULL;
    plane->tickets_size = plane->tickets_free = 0;
    plane->size = 0;
}

KS_PUBLIC struct plane *ks_plane_new(struct domain *domain, int rank, int size, int lane, const char *group, const int *global_ranks) {
    struct plane *plane = calloc(1, sizeof *plane);
    if (!plane) return NULL;
    plane->domain = domain;
    plane->rank = rank;
    plane->size = size;
    plane->lane = lane;
    plane->group_hash = record_hash(group);
    strncpy(plane->group, group, sizeof plane->group - 1);
    plane->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    plane->peers = calloc((size_t)size, sizeof *plane->peers);
    plane->scan = calloc((size_t)size, sizeof *plane->scan);
    plane->polls = calloc((size_t)size + 1, sizeof *plane->polls);
    plane->global_ranks = calloc((size_t)size, sizeof(int));
    if (plane->wake_fd < 0 || !plane->peers || !plane->scan || !plane->polls || !plane->global_ranks) {
        plane_empty(plane);
        free(plane);
        return NULL;
    }
    memcpy(plane->global_ranks, global_ranks, (size_t)size * sizeof(int));
    conditions_init(plane);
    pthread_mutex_lock(&domain->admin);
    pthread_mutex_lock(&domain->list);
    plane->next = domain->planes;
    domain->planes = plane;
    record_attach(plane);
    pthread_mutex_unlock(&domain->list);
    pthread_mutex_unlock(&domain->admin);
    return plane;
}

/* With plane->run held: a P2P plane looks at all linked peers all the time. */
static void rescan(struct plane *plane) {
    if (plane->lane != KS_P2P) return;
    plane->n_scan = 0;
    for (int rank = 0; rank < plane->size; rank++)
        if (plane->peers[rank].link) plane->scan[plane->n_scan++] = rank;
}

static int attach(struct plane *plane, int peer, struct link *link) {
    if (!link) return errno ? errno : ENOMEM;
    plane_enter(plane);
    bool taken = plane->peers[peer].link != NULL;
    if (!taken) {
        plane->peers[peer].link = link;
        plane->peers[peer].tx_wait = plane->peers[peer].rx_wait = WAIT_NONE;
        plane->peers[peer].peek = false;
        rescan(plane);
    }
    plane_leave(plane);
    if (taken) link_close(link);
    return taken ? EEXIST : 0;
}

/* Both take over fd whatever happens; 0 or errno. */
KS_PUBLIC int ks_link_tcp(struct plane *plane, int peer, int fd) { return attach(plane, peer, tcp_open(fd)); }

KS_PUBLIC int ks_link_shared(struct plane *plane, int peer, int fd, int memory_fd, int creator) {
    struct link *link = shm_open_link(fd, memory_fd, creator);
    int error = errno;
    if (!link) close(fd);
    return link ? attach(plane, peer, link) : error;
}

/* Closes a link. A call that needs it waits for another one. */
KS_PUBLIC void ks_unlink(struct plane *plane, int rank) {
    plane_enter(plane);
    struct peer *peer = &plane->peers[rank];
    struct link *link = peer->link;
    if (link && plane->active && (link->rx.item || link->rx.partial || link->tx.header_sent < sizeof link->tx.header || link->tx.payload_left))
        link_failed(plane, rank, ECONNRESET, "was unlinked in the middle of a message");
    if (link) match_hangup(plane, rank);
    peer->link = NULL;
    rescan(plane);
    plane_leave(plane);
    if (link) link_close(link);
}

/* Takes an idle link out of use and leaves the connection as it is; the caller closes the descriptor. -1: no link. */
KS_PUBLIC int ks_retire(struct plane *plane, int rank) {
    plane_enter(plane);
    struct link *link = plane->peers[rank].link;
    if (link) match_hangup(plane, rank);
    plane->peers[rank].link = NULL;
    rescan(plane);
    plane_leave(plane);
    return link ? link_release(link) : -1;
}

KS_PUBLIC int ks_link_fd(struct plane *plane, int rank) {
    plane_enter(plane);
    int fd = plane->peers[rank].link ? plane->peers[rank].link->fd : -1;
    plane_leave(plane);
    return fd;
}

KS_PUBLIC int ks_peers_needed(struct plane *plane, int op, uint64_t nbytes, int root, int *peers) {
    return plan_peers(plane, op, nbytes, root, peers);
}

static void say_goodbye(struct plane *plane) {
    for (int rank = 0; rank < plane->size; rank++) {
        struct link *link = plane->peers[rank].link;
        if (!link) continue;
        struct header news = {.flags = FLAG_BYE};
        transmit_control(plane, link, &news, NULL);
        link_close(link);
        plane->peers[rank].link = NULL;
    }
}

static void leave_domain(struct plane *plane) {
    struct domain *domain = plane->domain;
    pthread_mutex_lock(&domain->list);
    struct plane **at = &domain->planes;
    while (*at && *at != plane) at = &(*at)->next;
    if (*at) *at = plane->next;
    losses_drop(domain, plane);
    record_detach(plane);
    pthread_mutex_unlock(&domain->list);
}

/* Ends all calls as aborted, tells the peers, closes the links and gives everything back. */
KS_PUBLIC void ks_plane_close(struct plane *plane) {
    pthread_mutex_lock(&plane->domain->admin);
    atomic_store(&plane->closing, true);
    plane_enter(plane);
    engine_abort(plane);
    say_goodbye(plane);
    rescan(plane);
    plane_leave(plane);
    pthread_mutex_lock(&plane->mutex);
    pthread_cond_broadcast(&plane->work);
    pthread_cond_broadcast(&plane->finished);
    pthread_cond_broadcast(&plane->future);
    bool started = plane->worker_started;
    pthread_mutex_unlock(&plane->mutex);
    if (started) pthread_join(plane->worker, NULL);
    leave_domain(plane);
    pthread_mutex_unlock(&plane->domain->admin);
    for (;;) {
        pthread_mutex_lock(&plane->mutex);
        bool used = plane->users > 0;
        pthread_mutex_unlock(&plane->mutex);
        if (!used) break;
        usleep(100);
    }
    plane_empty(plane);
}

/* Closes all planes; the domain itself stays, for threads that still look at it. */
KS_PUBLIC void ks_domain_close(struct domain *domain) {
    while (domain->planes) ks_plane_close(domain->planes);
    atomic_store(&domain->recording, false);
    atomic_store(&domain->poisoned, true);
    close(domain->failure_fd);
    domain->failure_fd = -1;
}
