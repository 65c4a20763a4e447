/* What the engine does when nothing moves: yields a little, then sleeps until a peer, a thread or a deadline wakes it. */
#define _GNU_SOURCE
#include "plane.h"
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#define ASK_AFTER_NS 1000000000ull
#define TELL_EVERY_NS 500000000ull

static bool receiving(const struct plane *plane, const struct peer *peer) {
    return plane->lane == KS_COLLECTIVE ? peer->rx_first != NULL : match_wanted(plane, peer);
}

static bool held(const struct peer *peer) {
    const struct receive *rx = &peer->link->rx;
    return rx->have && !rx->drop && !rx->item;
}

/* How many bytes are worth waking up for: a good piece of what surely comes without our doing. That is the rest of the
 * message in a collective, but only of the frame point to point, where a sender may give up in the middle. */
static uint32_t worth(const struct plane *plane, const struct peer *peer) {
    const struct receive *rx = &peer->link->rx;
    if (plane->asked || rx->drop) return 1;
    uint64_t left = rx->item ? rx->payload_left : 1;
    if (plane->lane == KS_COLLECTIVE && peer->rx_first) left = peer->rx_first->length - peer->rx_first->done;
    uint32_t most = peer->link->wake_bytes;
    return left > most ? most : left ? (uint32_t)left : 1;
}

/* Fills one poll entry; true when there is already something to do. */
static bool arm(const struct plane *plane, struct peer *peer, struct pollfd *entry) {
    struct link *link = peer->link;
    *entry = (struct pollfd){.fd = -1};
    if (!link) return false;
    bool wanted = receiving(plane, peer), data = wanted && peer->rx_wait == WAIT_PEER;
    bool look = !wanted && plane->lane == KS_COLLECTIVE && !held(peer);          /* news on a link that owes us nothing */
    bool credit = peer->tx_first && peer->tx_wait == WAIT_CREDIT;
    if (!wanted && !peer->tx_first && !look) return false;
    if (link->kind == KS_SHM) {
        if (!link->hup) *entry = (struct pollfd){.fd = link->fd, .events = POLLIN};
        bool ready = shm_arm(link, data ? worth(plane, peer) : look, credit);
        if (ready && look) peer->peek = true;
        return ready;
    }
    if (link->gone && peer->tx_first) peer->peek = true;
    if (link->hup || link->gone) return peer->peek;
    *entry = (struct pollfd){.fd = link->fd, .events = POLLRDHUP};
    if (data || look) {
        entry->events |= POLLIN;
        tcp_low_water(link, data ? (int)worth(plane, peer) : 1);
    }
    if (credit) entry->events |= POLLOUT;
    return false;
}

static void awake(struct plane *plane, struct peer *peer, const struct pollfd *entry) {
    struct link *link = peer->link;
    if (!link) return;
    if (link->kind == KS_SHM) shm_disarm(link);
    if (!entry->revents) return;
    if (link->kind == KS_SHM)
        shm_drain_bells(link);
    else if (entry->revents & (POLLRDHUP | POLLHUP | POLLERR))
        link->gone = true;
    if (!receiving(plane, peer) && (plane->lane == KS_COLLECTIVE || link->gone || link->hup)) peer->peek = true;
}

/* Whom a call waits for, as far as this member can see; -1 nobody. */
int owing_peer(const struct plane *plane, const struct ticket *ticket) {
    if (plane->lane == KS_P2P) return ticket->call.peer >= 0 ? ticket->call.peer : ticket->source;
    for (int i = 0; i < plane->n_scan; i++)
        if (plane->peers[plane->scan[i]].rx_first && plane->peers[plane->scan[i]].rx_wait != WAIT_OWN) return plane->scan[i];
    for (int i = 0; i < plane->n_scan; i++)
        if (plane->peers[plane->scan[i]].tx_first) return plane->scan[i];
    return -1;
}

static void time_out(struct plane *plane, struct ticket *ticket) {
    char what[WHAT_BYTES], call[100], name[24] = "no rank";
    int peer = owing_peer(plane, ticket);
    const struct ks_call *asked = &ticket->call;
    bool taking = peer >= 0 && (plane->lane == KS_P2P ? asked->op == KS_SEND : !plane->peers[peer].rx_first);
    if (peer >= 0) snprintf(name, sizeof name, "rank %d", peer);
    plan_describe(call, sizeof call, asked->op, asked->element, asked->reduction, ticket->total, asked->root);
    const char *done = peer < 0 ? "delivered" : !plane->peers[peer].link ? "connected" : taking ? "taken" : "delivered";
    snprintf(what, sizeof what, "%s has not %s within %.3g s: %s", name, done, asked->timeout_s, call);
    if (plane->lane == KS_COLLECTIVE)
        plane_break(plane, peer, ETIMEDOUT, what);
    else
        ticket_fail(plane, ticket, peer, ETIMEDOUT, what);
}

/* Ends calls whose time is over; returns the next deadline, 0 for none. */
static uint64_t expire(struct plane *plane, uint64_t now) {
    uint64_t nearest = 0;
    for (struct ticket *ticket = plane->active, *after; ticket; ticket = after) {
        after = ticket->after;
        uint64_t deadline = ticket->deadline_ns;
        if (!deadline) continue;
        if (deadline > now) {
            if (!nearest || deadline < nearest) nearest = deadline;
            continue;
        }
        time_out(plane, ticket);
        if (plane->lane == KS_COLLECTIVE) return 0;
    }
    return nearest;
}

/* After a second of waiting: asks those waited for whether they are in the same call. */
static void ask(struct plane *plane, uint64_t now) {
    struct ticket *ticket = plane->active;
    if (plane->lane != KS_COLLECTIVE || plane->asked || now - ticket->started_ns < ASK_AFTER_NS) return;
    plane->asked = true;
    for (int i = 0; i < plane->n_scan; i++) {
        struct peer *peer = &plane->peers[plane->scan[i]];
        if (!peer->link || peer->rx_wait != WAIT_PEER || !transmit_idle(peer->link)) continue;
        struct header news = {.flags = FLAG_ASK, .sequence = ticket->sequence, .op = ticket->call.op, .element = ticket->call.element,
            .reduction = ticket->call.reduction, .tag = ticket->call.root, .total = ticket->total};
        transmit_control(plane, peer->link, &news, NULL);
    }
}

/* A call that takes long is shown in the recorder as it stands, so that a reader sees who waits for what. */
static void tell(struct plane *plane, uint64_t now) {
    if (!plane->timing || now - plane->told_ns < TELL_EVERY_NS) return;
    for (struct ticket *ticket = plane->active; ticket; ticket = ticket->after)
        if (now - ticket->started_ns >= TELL_EVERY_NS) {
            plane->told_ns = now;
            record_waiting(plane, ticket, now);
        }
}

static int patience_ms(const struct plane *plane, uint64_t now, uint64_t until) {
    uint64_t wake = until;
    if (plane->lane == KS_COLLECTIVE && !plane->asked && (!wake || plane->active->started_ns + ASK_AFTER_NS < wake))
        wake = plane->active->started_ns + ASK_AFTER_NS;
    if (plane->timing && (!wake || now + TELL_EVERY_NS < wake)) wake = now + TELL_EVERY_NS;
    if (!wake) return -1;
    if (wake <= now) return 0;
    uint64_t ms = (wake - now) / 1000000 + 1;
    return ms > 1000000 ? 1000000 : (int)ms;
}

static bool interrupted(struct plane *plane) {
    return atomic_load(&plane->pause) || atomic_load(&plane->domain->poisoned) || atomic_load(&plane->closing) ||
           (plane->lane == KS_P2P && atomic_load(&plane->queued));
}

static void sleep_until(struct plane *plane, int ms) {
    atomic_store(&plane->sleeping, true);
    bool ready = interrupted(plane);
    for (int i = 0; i < plane->n_scan; i++) ready |= arm(plane, &plane->peers[plane->scan[i]], &plane->polls[i + 1]);
    plane->polls[0] = (struct pollfd){.fd = plane->wake_fd, .events = POLLIN};
    int woken = ready ? 0 : poll(plane->polls, (nfds_t)plane->n_scan + 1, ms);
    atomic_store(&plane->sleeping, false);
    if (woken <= 0)
        for (int i = 0; i <= plane->n_scan; i++) plane->polls[i].revents = 0;
    if (plane->polls[0].revents) {
        uint64_t count;
        (void)!read(plane->wake_fd, &count, sizeof count);
    }
    for (int i = 0; i < plane->n_scan; i++) awake(plane, &plane->peers[plane->scan[i]], &plane->polls[i + 1]);
}

void engine_block(struct plane *plane, uint64_t deadline_ns) {
    if (!plane->desperate) {
        plane->desperate = true;
        return;
    }
    if (plane->idle++ < SPINS) {
        sched_yield();
        return;
    }
    plane->idle = 0;
    uint64_t now = clock_now_ns(), nearest = expire(plane, now);
    if (!plane->active) return;
    ask(plane, now);
    tell(plane, now);
    uint64_t through = limit_wake(plane);
    if (deadline_ns && (!nearest || deadline_ns < nearest)) nearest = deadline_ns;
    if (through && (!nearest || through < nearest)) nearest = through;
    sleep_until(plane, patience_ms(plane, now, nearest));
}
