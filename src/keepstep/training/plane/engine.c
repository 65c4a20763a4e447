/* The engine: starts queued calls, moves every peer on, ends calls. Runs under plane->run in whichever thread holds it. */
#include "plane.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOCAL_PIECE = 1 << 20 };

void item_done(struct plane *plane, struct item *item) {
    struct peer *peer = &plane->peers[item->peer];
    struct ticket *ticket = item->ticket;
    item->complete = true;
    if (item->message) {
        struct message *message = item->message;
        item->next = plane->spare;
        plane->spare = item;
        match_stashed(plane, message);
        return;
    }
    if (!item->target)
        peer->tx_first = item->next;
    else if (plane->lane == KS_COLLECTIVE)
        peer->rx_first = item->next;
    if (--ticket->left == 0) {
        ticket->next_ready = plane->ready;
        plane->ready = ticket;
    }
}

static bool local_progress(struct plane *plane, struct ticket *ticket) {
    bool any = false;
    struct item *item = ticket->locals;
    if (!item) return false;
    size_t piece = item_limit(item) - item->done;
    if (piece > LOCAL_PIECE) piece = LOCAL_PIECE;
    if (piece) {
        memmove(item->target + item->done, item->base + item->done, piece);
        item->done += piece;
        any = true;
    }
    if (item->done == item->length && item_open(item)) {
        ticket->locals = item->next;
        item->complete = any = true;
        if (--ticket->left == 0) {
            ticket->next_ready = plane->ready;
            plane->ready = ticket;
        }
    }
    return any;
}

static void items_free(struct plane *plane, struct ticket *ticket) {
    for (struct item *item = ticket->items, *next; item; item = next) {
        next = item->sibling;
        item->next = plane->spare;
        plane->spare = item;
    }
    ticket->items = ticket->locals = NULL;
}

static void transmit_forget(struct peer *peer) {
    struct transmit *tx = peer->link ? &peer->link->tx : NULL;
    if (tx && (tx->header_sent < sizeof tx->header || tx->payload_left || tx->pad_left)) tx->stale = true;
}

static void receive_forget(struct peer *peer) {
    if (!peer->link) return;
    if (peer->link->rx.item) {
        peer->link->rx.item = NULL;
        peer->link->rx.drop = true;
    }
    peer->link->rx.partial = NULL;
}

/* Takes a message out of the queue of its peer; one begun is completed with filler. */
static void unqueue(struct peer *peer, struct item *item) {
    struct item *previous = NULL, *at = peer->tx_first;
    while (at && at != item) previous = at, at = at->next;
    if (!at) return;
    if (!previous) transmit_forget(peer);
    if (previous) previous->next = item->next;
    else peer->tx_first = item->next;
    if (peer->tx_last == item) peer->tx_last = previous;
}

/* Takes a point-to-point call out of all queues. */
static void p2p_forget(struct plane *plane, struct ticket *ticket) {
    for (struct item *item = ticket->items; item; item = item->sibling) {
        struct peer *peer = &plane->peers[item->peer];
        if (!item->target && !item->complete)
            unqueue(peer, item);
        else if (item->target && peer->link && (peer->link->rx.item == item || peer->link->rx.partial == item))
            receive_forget(peer);
    }
    match_forget(plane, ticket);
}

static void collective_forget(struct plane *plane) {
    for (int i = 0; i < plane->n_scan; i++) {
        struct peer *peer = &plane->peers[plane->scan[i]];
        if (peer->tx_first) transmit_forget(peer);
        receive_forget(peer);
        peer->tx_first = peer->rx_first = NULL;
    }
}

/* The only way a running call ends; afterwards nothing of the plane points into its buffers. */
void ticket_end(struct plane *plane, struct ticket *ticket, int status) {
    if (plane->lane == KS_COLLECTIVE) {
        if (status != KS_DONE) collective_forget(plane);
    } else
        p2p_forget(plane, ticket);
    record_finish(plane, ticket, status);
    if (plane->lane == KS_COLLECTIVE) plane->n_scan = 0;
    items_free(plane, ticket);
    if (ticket->before) ticket->before->after = ticket->after;
    else plane->active = ticket->after;
    if (ticket->after) ticket->after->before = ticket->before;
    plane->n_active--;
    ticket_complete(plane, ticket, status);
}

void ticket_fail(struct plane *plane, struct ticket *ticket, int peer, int error, const char *what) {
    ticket->failure.peer = peer;
    ticket->failure.error = error;
    snprintf(ticket->failure.what, WHAT_BYTES, "%s", what);
    for (struct ticket **at = &plane->ready; *at; at = &(*at)->next_ready)
        if (*at == ticket) {
            *at = ticket->next_ready;
            break;
        }
    ticket_end(plane, ticket, KS_FAILED);
}

static void give_up_notice(struct plane *plane, const char *what) {
    for (int rank = 0; rank < plane->size; rank++) {
        struct link *link = plane->peers[rank].link;
        if (!link) continue;
        struct header news = {.flags = FLAG_NOTE};
        transmit_control(plane, link, &news, what);
        shutdown_sending(link);
    }
}

/* A collective cannot go on: it fails, later ones fail at once, and unprotected peers are told why. */
void plane_break(struct plane *plane, int peer, int error, const char *what) {
    plane->broken = true;
    plane->cause.peer = peer;
    plane->cause.error = error;
    snprintf(plane->cause.what, WHAT_BYTES, "%s", what);
    plane->ready = NULL;
    while (plane->active) ticket_fail(plane, plane->active, peer, error, plane->cause.what);
    if (!plane->domain->protected) give_up_notice(plane, plane->cause.what);
}

static bool concerns(const struct plane *plane, const struct ticket *ticket, int rank) {
    if (ticket->call.op == KS_SEND) return ticket->call.peer == rank;
    if (ticket->posted) return ticket->call.peer == rank || (ticket->call.peer < 0 && !plane->peers[rank].link->bye);
    return ticket->source == rank && !ticket->scratch;
}

static void p2p_link_failed(struct plane *plane, int rank, int error, const char *what) {
    for (struct ticket *ticket = plane->active, *after; ticket; ticket = after) {
        after = ticket->after;
        if (ticket->left && concerns(plane, ticket, rank)) ticket_fail(plane, ticket, rank, error, what);
    }
    match_hangup(plane, rank);
}

/* A link that somebody waits for is dead. */
void link_failed(struct plane *plane, int rank, int error, const char *what) {
    char text[WHAT_BYTES];
    snprintf(text, sizeof text, "rank %d %s", rank, what ? what : "closed the link");
    if (!what && error && error != ECONNRESET && error != EPIPE)
        snprintf(text, sizeof text, "rank %d: the link failed: %s", rank, strerror(error));
    if (!error) error = ECONNRESET;
    domain_lose(plane, rank);
    if (plane->domain->protected)
        domain_poison_flag(plane->domain);
    else if (plane->lane == KS_COLLECTIVE)
        plane_break(plane, rank, error, text);
    else
        p2p_link_failed(plane, rank, error, text);
}

/* Ends everything, running or queued, as aborted. */
void engine_abort(struct plane *plane) {
    plane->ready = NULL;
    while (plane->active) ticket_end(plane, plane->active, KS_ABORTED);
    match_clear(plane);
    queue_end(plane, KS_ABORTED);
}

static void ticket_start(struct plane *plane, struct ticket *ticket) {
    ticket->before = NULL;
    ticket->after = plane->active;
    if (plane->active) plane->active->before = ticket;
    plane->active = ticket;
    plane->n_active++;
    ticket->sequence = plane->sequence++;
    plane->asked = false;
    plane->timing = atomic_load_explicit(&plane->domain->recording, memory_order_relaxed);
    if (plane->broken) {
        ticket_fail(plane, ticket, plane->cause.peer, plane->cause.error, plane->cause.what);
        return;
    }
    if (plane->lane == KS_P2P) {
        record_start(plane, ticket);
        match_start(plane, ticket);                                              /* may have ended it */
        return;
    }
    if (plan_build(plane, ticket)) {
        plane_break(plane, -1, ENOMEM, "out of memory");
        return;
    }
    record_start(plane, ticket);
    if (!ticket->left) {
        ticket->next_ready = plane->ready;
        plane->ready = ticket;
    }
}

static void start_queued(struct plane *plane) {
    while (plane->lane == KS_P2P || !plane->active) {
        struct ticket *ticket = plane_pop(plane);
        if (!ticket) return;
        ticket_start(plane, ticket);
        if (plane->lane == KS_COLLECTIVE && plane->ready) return;
    }
}

static void end_ready(struct plane *plane) {
    while (plane->ready) {
        struct ticket *ticket = plane->ready;
        plane->ready = ticket->next_ready;
        ticket_end(plane, ticket, KS_DONE);
    }
}

static bool peers_progress(struct plane *plane) {
    bool any = false;
    for (int i = 0; i < plane->n_scan; i++) {
        int rank = plane->scan[i];
        struct peer *peer = &plane->peers[rank];
        any |= transmit_progress(plane, peer);
        any |= receive_progress(plane, peer, rank);
        if (plane->broken || atomic_load_explicit(&plane->domain->poisoned, memory_order_acquire)) return true;
        if (atomic_load_explicit(&plane->pause, memory_order_relaxed)) return true;
    }
    return any;
}

static bool locals_progress(struct plane *plane) {
    bool any = false;
    for (struct ticket *ticket = plane->active, *after; ticket; ticket = after) {
        after = ticket->after;
        any |= local_progress(plane, ticket);
    }
    return any;
}

/* Works until nothing is left, `until` is over, or deadline_ns (0: none) has passed. Called with plane->run held. */
void engine_run(struct plane *plane, struct ticket *until, uint64_t deadline_ns) {
    for (;;) {
        if (atomic_load(&plane->pause)) plane_give_way(plane);
        if (atomic_load(&plane->domain->poisoned) || atomic_load(&plane->closing)) {
            engine_abort(plane);
            return;
        }
        if (atomic_load_explicit(&plane->queued, memory_order_acquire)) start_queued(plane);
        if (!plane->active) return;
        bool any = locals_progress(plane);
        any |= peers_progress(plane);
        if (atomic_load_explicit(&plane->domain->poisoned, memory_order_acquire)) continue;
        if (plane->ready) {
            end_ready(plane);
            any = true;
        }
        if (until && atomic_load(&until->status) > KS_RUNNING) return;
        if (any || !plane->active) {
            plane->idle = 0;
            plane->desperate = false;
            continue;
        }
        if (deadline_ns && clock_now_ns() >= deadline_ns) return;
        engine_block(plane, deadline_ns);
    }
}
