/* Receiving: checks every frame against what this member expects, then copies or reduces its payload into place. */
#include "plane.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { PIECE_BYTES = 16 << 10 };
enum verdict { GO, STOP, LOST };

static bool frame_valid(const struct header *header) {
    return header->magic == FRAME_MAGIC && header->length <= FRAME_MAX && header->length <= (header->flags & (FLAG_NOTE | FLAG_BYE) ? WHAT_BYTES : header->message);
}

/* Throws away the rest of the current frame. */
static bool frame_drop(struct link *link) {
    struct receive *rx = &link->rx;
    uint32_t left = rx->payload_left + rx->pad_left;
    while (left) {
        char *at;
        size_t part = link_peek(link, &at, 1);
        if (!part) break;
        if (part > left) part = left;
        link_consume(link, part);
        left -= (uint32_t)part;
    }
    rx->payload_left = left;
    rx->pad_left = 0;
    if (left) return false;
    rx->have = rx->drop = false;
    return true;
}

static bool frame_matches(struct plane *plane, const struct ticket *ticket, const struct header *header, char *what, int rank) {
    const struct ks_call *call = &ticket->call;
    bool reduces = call->op == KS_ALL_REDUCE || call->op == KS_REDUCE || call->op == KS_REDUCE_SCATTER;
    bool same = header->op == call->op && header->total == ticket->total && header->tag == call->root &&
                header->sequence == ticket->sequence;
    if (same && reduces) same = header->element == call->element && header->reduction == call->reduction;
    if (same) return true;
    char theirs[100], ours[100];
    plan_describe(theirs, sizeof theirs, header->op, header->element, header->reduction, header->total, (int)header->tag);
    plan_describe(ours, sizeof ours, call->op, call->element, call->reduction, ticket->total, call->root);
    int used = snprintf(what, WHAT_BYTES, "rank %d sent %s, %s expected", rank, theirs, ours);
    if (header->sequence != ticket->sequence && used < WHAT_BYTES)
        snprintf(what + used, (size_t)(WHAT_BYTES - used), " (call %llu there, %llu here)", (unsigned long long)header->sequence, (unsigned long long)ticket->sequence);
    (void)plane;
    return false;
}

/* Text from a member that gave up; everything else it sent is void. Says as well whom this member was waiting for. */
static void note_arrived(struct plane *plane, struct link *link, int rank) {
    char text[WHAT_BYTES + 1] = "", what[WHAT_BYTES];
    int owing = plane->active ? owing_peer(plane, plane->active) : -1;
    link_take(link, text, link->rx.payload_left);
    int used = snprintf(what, sizeof what, "rank %d gave up: %.*s", rank, WHAT_BYTES - 60, text);
    if (owing >= 0 && owing != rank) snprintf(what + used, sizeof what - (size_t)used, "; rank %d owes data here", owing);
    plane_break(plane, owing >= 0 ? owing : rank, ECONNABORTED, what);
}

/* News instead of data; true if the frame was news and is done with. */
static enum verdict frame_news(struct plane *plane, struct link *link, int rank) {
    struct receive *rx = &link->rx;
    if (rx->header.flags & FLAG_BYE) link->bye = true;
    if (rx->header.flags & FLAG_ASK && plane->lane == KS_COLLECTIVE && plane->active) {
        char what[WHAT_BYTES];
        struct ticket *ticket = plane->active;
        if (rx->header.sequence == ticket->sequence && !frame_matches(plane, ticket, &rx->header, what, rank)) {
            plane_break(plane, rank, EPROTO, what);
            return LOST;
        }
    }
    if (rx->header.flags & FLAG_NOTE && plane->lane == KS_COLLECTIVE) {
        char *at;
        if (link_peek(link, &at, rx->payload_left) < rx->payload_left && !link->hup) return STOP;
        note_arrived(plane, link, rank);
        return LOST;
    }
    rx->drop = true;
    return GO;
}

static enum verdict collective_bind(struct plane *plane, struct peer *peer, int rank) {
    struct receive *rx = &peer->link->rx;
    struct ticket *ticket = plane->active;
    char what[WHAT_BYTES];
    if (!ticket || (!peer->rx_first && rx->header.sequence > ticket->sequence)) return STOP;
    if (!frame_matches(plane, ticket, &rx->header, what, rank)) {
        plane_break(plane, rank, EPROTO, what);
        return LOST;
    }
    struct item *item = peer->rx_first;
    if (!item) return STOP;
    bool first = rx->header.flags & FLAG_FIRST;
    if (rx->header.message != item->length || first != (item->done == 0) || rx->header.length > item->length - item->done) {
        snprintf(what, sizeof what, "rank %d sent a message of %llu bytes in %s, %llu expected", rank,
                 (unsigned long long)rx->header.message, op_name(ticket->call.op), (unsigned long long)item->length);
        plane_break(plane, rank, EPROTO, what);
        return LOST;
    }
    rx->item = item;
    return GO;
}

/* Gets a frame to work on: reads its header, drops it when stale, leaves it when it is for later. */
static enum verdict frame_begin(struct plane *plane, struct peer *peer, int rank) {
    struct link *link = peer->link;
    struct receive *rx = &link->rx;
    if (!rx->have) {
        if (!link_take(link, &rx->header, sizeof rx->header)) return STOP;
        if (!frame_valid(&rx->header)) {
            link->error = EPROTO;
            link_failed(plane, rank, EPROTO, "sent something that is no frame");
            return LOST;
        }
        rx->have = true;
        rx->drop = false;
        rx->payload_left = rx->header.length;
        rx->pad_left = -rx->header.length & (ALIGNMENT - 1);
    }
    if (rx->item) return GO;
    if (!rx->drop) {
        uint32_t generation = atomic_load(&plane->domain->generation);
        if (rx->header.generation < generation)
            rx->drop = true;
        else if (rx->header.generation > generation)
            return STOP;
        else if (rx->header.flags & (FLAG_NOTE | FLAG_BYE | FLAG_ASK)) {
            enum verdict verdict = frame_news(plane, link, rank);
            if (verdict != GO) return verdict;
        } else if (plane->lane == KS_COLLECTIVE) {
            enum verdict verdict = collective_bind(plane, peer, rank);
            if (verdict != GO) return verdict;
        } else if (!match_bind(plane, peer, rank))
            return STOP;
    }
    if (rx->drop && !frame_drop(link)) return STOP;
    return GO;
}

static size_t reduce_piece(const struct plane *plane, struct link *link, struct item *item, size_t room) {
    const struct ks_call *call = &item->ticket->call;
    size_t unit = element_bytes(call->element), piece;
    char *at;
    piece = link_peek(link, &at, unit);
    if (piece > room) piece = room;
    piece -= piece % unit;
    if (!piece) return 0;
    kernel_for(call->element, call->reduction)(item->target + item->done, item->base + item->done, at, piece / unit);
    if (item->scale) scaler_for(call->element)(item->target + item->done, piece / unit, plane->size);
    link_consume(link, piece);
    return piece;
}

/* Writes the result where the next member reads it, and to the target as well if that is wanted. */
static void through_piece(const struct plane *plane, struct item *item, char *out, const char *in, size_t bytes) {
    const struct ks_call *call = &item->ticket->call;
    char *target = item->target + item->done;
    if (!item->base) {
        memcpy(target, in, bytes);
        memcpy(out, in, bytes);
        return;
    }
    size_t count = bytes / element_bytes(call->element);
    char *result = item->transient ? out : target;
    kernel_for(call->element, call->reduction)(result, item->base + item->done, in, count);
    if (item->scale) scaler_for(call->element)(result, count, plane->size);
    if (!item->transient) memcpy(out, target, bytes);
}

/* Receives and passes on in one go; 0 when that is not possible now, with *hold set when it will be soon. */
static size_t forward_piece(struct plane *plane, struct link *link, struct item *item, size_t room, bool *hold) {
    struct item *forward = item->forward;
    struct link *onward = forward && !forward->complete ? transmit_through(plane, forward, item->done) : NULL;
    if (!onward) return 0;
    char *in, *out;
    size_t piece = shm_reserve(onward, &out), filled = link_peek(link, &in, ALIGNMENT);
    *hold = piece == 0 && filled && !plane->desperate && !onward->hup;
    if (piece > filled) piece = filled;
    if (piece > room) piece = room;
    if (piece > onward->tx.payload_left) piece = onward->tx.payload_left;
    if (piece > PIECE_BYTES) piece = PIECE_BYTES;
    if (piece < onward->tx.payload_left) piece &= ~(size_t)(ALIGNMENT - 1);
    if (!piece) return 0;
    through_piece(plane, item, out, in, piece);
    transmit_written(onward, forward, piece);
    link_consume(link, piece);
    return piece;
}

/* Moves one piece of payload; WAIT_NONE while there may be more. */
static enum wait_reason payload_step(struct plane *plane, struct link *link) {
    struct receive *rx = &link->rx;
    struct item *item = rx->item;
    if (!item->length && item->gate && !item->gate->complete) return WAIT_OWN;
    if (rx->payload_left) {
        uint64_t room = item_limit(item) - item->done;
        if (room > rx->payload_left) room = rx->payload_left;
        if (!room) return WAIT_OWN;
        uint64_t start = plane->timing && plane->lane == KS_P2P ? clock_now_ns() : 0;
        bool hold = false;
        size_t moved = forward_piece(plane, link, item, room, &hold);
        if (hold) return WAIT_OWN;
        if (!moved) moved = item->base ? reduce_piece(plane, link, item, room) : link_read(link, item->target + item->done, room);
        if (!moved) return item->base && room < element_bytes(item->ticket->call.element) ? WAIT_OWN : WAIT_PEER;
        rx->payload_left -= (uint32_t)moved;
        item->done += moved;
        item->stat->received += moved;
        if (start) item->stat->wire_ns += clock_now_ns() - start;
    }
    if (!rx->payload_left && rx->pad_left) {
        char *at;
        size_t part = link_peek(link, &at, 1);
        if (part > rx->pad_left) part = rx->pad_left;
        link_consume(link, part);
        rx->pad_left -= (uint32_t)part;
        if (!part) return WAIT_PEER;
    }
    if (rx->payload_left || rx->pad_left) return WAIT_NONE;
    rx->have = false;
    rx->item = NULL;
    if (item->done == item->length) {
        rx->partial = NULL;
        item_done(plane, item);
    }
    return WAIT_NONE;
}

static enum wait_reason receive_step(struct plane *plane, struct peer *peer, int rank) {
    struct receive *rx = &peer->link->rx;
    if (!rx->have || !rx->item) {
        enum verdict verdict = frame_begin(plane, peer, rank);
        if (verdict == LOST) return WAIT_HOLD;
        if (verdict == STOP) return rx->have && !rx->drop ? WAIT_HOLD : WAIT_PEER;
        if (!rx->item) return WAIT_NONE;
    }
    return payload_step(plane, peer->link);
}

static bool receive_wanted(const struct plane *plane, const struct peer *peer) {
    return plane->lane == KS_COLLECTIVE ? peer->rx_first != NULL : match_wanted(plane, peer);
}

static struct tally *receive_stat(const struct plane *plane, const struct peer *peer) {
    if (plane->lane == KS_COLLECTIVE) return peer->rx_first ? peer->rx_first->stat : NULL;
    const struct receive *rx = &peer->link->rx;
    const struct item *item = rx->item ? rx->item : rx->partial;
    return item ? item->stat : NULL;
}

static uint64_t receive_account(struct plane *plane, struct peer *peer) {
    uint64_t now = clock_now_ns();
    struct tally *stat = receive_stat(plane, peer);
    if (stat && peer->rx_mark && peer->rx_wait == WAIT_PEER) stat->peer_ns += now - peer->rx_mark;
    if (stat && peer->rx_mark && peer->rx_wait == WAIT_OWN) stat->own_ns += now - peer->rx_mark;
    return now;
}

static bool receive_loop(struct plane *plane, struct peer *peer, int rank) {
    bool any = false;
    uint64_t moved = 0;
    struct receive *rx = &peer->link->rx;
    for (int budget = 0; budget < 64 && moved < (1 << 20); budget++) {
        bool had = rx->have;
        uint32_t left = rx->payload_left + rx->pad_left;
        if (!receive_wanted(plane, peer) && !peer->peek) break;
        peer->rx_wait = (uint8_t)receive_step(plane, peer, rank);
        if (plane->broken || !peer->link) return true;
        if (rx->have != had || rx->payload_left + rx->pad_left != left) any = true;
        if (had && left > rx->payload_left) moved += left - rx->payload_left;
        if (peer->rx_wait != WAIT_NONE) break;
        any = true;
    }
    return any;
}

bool receive_progress(struct plane *plane, struct peer *peer, int rank) {
    struct link *link = peer->link;
    bool wanted = receive_wanted(plane, peer);
    if (!wanted) peer->rx_wait = WAIT_NONE;
    if (!link) {
        peer->rx_wait = wanted ? WAIT_PEER : WAIT_NONE;
        return false;
    }
    if (!wanted && !peer->peek) return false;
    link->drained = false;
    link->greedy = peer->rx_first && peer->rx_first->base;
    struct tally *stat = plane->lane == KS_COLLECTIVE ? &peer->stat : NULL;
    uint64_t start = plane->timing ? receive_account(plane, peer) : 0;
    bool any = receive_loop(plane, peer, rank);
    if (plane->broken || atomic_load(&plane->domain->poisoned)) return true;
    peer->peek = false;
    if (plane->timing) {
        peer->rx_mark = clock_now_ns();
        if (any && stat) stat->wire_ns += peer->rx_mark - start;
    }
    bool deaf = link->hup && peer->rx_wait == WAIT_PEER && receive_wanted(plane, peer);
    bool mute = peer->tx_first && (link->hup || link->gone || link->tx_dead);
    if (deaf || mute) link_failed(plane, rank, link->error, NULL);
    return any;
}
