/* Drills on links: what goes to one member passes a slow wire, or a cut one. The time on it is time on the wire. */
#include "plane.h"

/* Returns NULL where no drill was ever given: that costs one load. */
struct limit *limit_of(struct plane *plane, const struct peer *peer) {
    struct domain *domain = plane->domain;
    int n = atomic_load_explicit(&domain->n_limits, memory_order_acquire);
    if (!n) return NULL;
    int rank = plane->global_ranks[peer - plane->peers];
    for (int i = 0; i < n; i++)
        if (atomic_load_explicit(&domain->limits[i].rank, memory_order_relaxed) == rank) return &domain->limits[i];
    return NULL;
}

/* Books `bytes` on the wire behind all that is on it; returns when they are through. */
static uint64_t book(struct limit *limit, size_t bytes, double bytes_per_s, uint64_t now) {
    uint64_t busy = atomic_load(&limit->busy_ns), until;
    do until = (busy > now ? busy : now) + (uint64_t)((double)bytes * 1e9 / bytes_per_s);
    while (!atomic_compare_exchange_weak(&limit->busy_ns, &busy, until));
    return until;
}

size_t limit_pass(struct limit *limit, struct link *link, size_t want, uint64_t now) {
    double bytes_per_s = atomic_load(&limit->bytes_per_s);
    if (bytes_per_s < 0) return want;
    if (bytes_per_s == 0) {
        link->release_ns = 0;
        return 0;
    }
    if (!link->paced || !link->release_ns) {
        link->paced = want < PACE_BYTES ? want : PACE_BYTES;
        link->release_ns = book(limit, link->paced, bytes_per_s, now);
    }
    if (now < link->release_ns) return 0;
    return want < link->paced ? want : link->paced;
}

void limit_sent(struct limit *limit, struct link *link, size_t bytes) {
    atomic_fetch_add_explicit(&limit->sent, bytes, memory_order_relaxed);
    link->paced -= bytes < link->paced ? bytes : link->paced;
}

uint64_t limit_wake(const struct plane *plane) {
    uint64_t first = 0;
    if (!atomic_load_explicit(&plane->domain->n_limits, memory_order_relaxed)) return 0;
    for (int i = 0; i < plane->n_scan; i++) {
        const struct peer *peer = &plane->peers[plane->scan[i]];
        if (peer->tx_wait != WAIT_WIRE || !peer->link || !peer->link->release_ns) continue;
        if (!first || peer->link->release_ns < first) first = peer->link->release_ns;
    }
    return first;
}

static struct limit *entry_of(struct domain *domain, int rank) {
    int n = atomic_load(&domain->n_limits);
    for (int i = 0; i < n; i++)
        if (atomic_load(&domain->limits[i].rank) == rank) return &domain->limits[i];
    return NULL;
}

/* Puts a drill on all bytes to the member of global `rank`; a wire of NaN takes it away. 0, or -1 when there are too many. */
KS_PUBLIC int ks_domain_limit(struct domain *domain, int rank, double bytes_per_s) {
    bool off = bytes_per_s != bytes_per_s;
    pthread_mutex_lock(&domain->admin);
    struct limit *limit = entry_of(domain, rank);
    if (!limit && !off) limit = entry_of(domain, -1);
    if (!limit && !off && atomic_load(&domain->n_limits) < LIMITS) {
        limit = &domain->limits[atomic_load(&domain->n_limits)];
        atomic_store(&limit->rank, -1);
        atomic_fetch_add(&domain->n_limits, 1);
    }
    if (limit && off) atomic_store(&limit->rank, -1);
    if (limit && !off) {
        if (atomic_load(&limit->rank) != rank) {
            atomic_store(&limit->sent, 0);
            atomic_store(&limit->busy_ns, 0);
        }
        atomic_store(&limit->bytes_per_s, bytes_per_s);
        atomic_store(&limit->rank, rank);
    }
    for (struct plane *plane = domain->planes; plane; plane = plane->next) {      /* engines that wait look again */
        plane_enter(plane);
        plane_leave(plane);
    }
    pthread_mutex_unlock(&domain->admin);
    return limit || off ? 0 : -1;
}

/* Bytes that went to a drilled member since its drill began; 0 where there is none. */
KS_PUBLIC uint64_t ks_domain_sent(struct domain *domain, int rank) {
    struct limit *limit = entry_of(domain, rank);
    return limit ? atomic_load(&limit->sent) : 0;
}
