/* Sending: cuts messages into frames and lets each move as far as its gate allows. */
#include "plane.h"
#include <errno.h>
#include <string.h>

static const char zeros[64 << 10];

static uint32_t padding(uint32_t length) { return -length & (ALIGNMENT - 1); }

static bool at_boundary(const struct transmit *tx) {
    return tx->header_sent == sizeof tx->header && !tx->payload_left && !tx->pad_left;
}

bool transmit_idle(const struct link *link) { return at_boundary(&link->tx); }

static void frame_open(struct plane *plane, struct transmit *tx, const struct item *item) {
    const struct ks_call *call = &item->ticket->call;
    uint64_t left = item->length - item->done;
    struct header *header = &tx->header;
    *header = (struct header){.magic = FRAME_MAGIC, .generation = atomic_load(&plane->domain->generation), .op = call->op,
        .element = call->element, .reduction = call->reduction, .flags = item->done ? 0 : FLAG_FIRST,
        .sequence = item->ticket->sequence, .tag = plane->lane == KS_P2P ? call->tag : call->root, .message = item->length,
        .total = item->ticket->total, .length = (uint32_t)(left < FRAME_MAX ? left : FRAME_MAX)};
    tx->header_sent = 0;
    tx->payload_left = header->length;
    tx->pad_left = padding(header->length);
}

/* Books `sent` bytes of [header][payload][pad]; returns how many of them were payload. */
static uint64_t frame_advance(struct transmit *tx, size_t sent, size_t payload) {
    size_t part = sizeof tx->header - tx->header_sent;
    if (part > sent) part = sent;
    tx->header_sent += (uint32_t)part;
    sent -= part;
    part = payload < sent ? payload : sent;
    tx->payload_left -= (uint32_t)part;
    tx->pad_left -= (uint32_t)(sent - part);
    return part;
}

/* Payload bytes of the open frame that may go now: whole units of ALIGNMENT except at its end. */
static size_t frame_ready(const struct transmit *tx, const struct item *item) {
    uint64_t ready = item_limit(item) - item->done;
    if (ready >= tx->payload_left) return tx->payload_left;
    uint64_t position = tx->header.length - tx->payload_left;
    uint64_t end = (position + ready) & ~(uint64_t)(ALIGNMENT - 1);
    return end > position ? end - position : 0;
}

/* Of `ready` payload bytes behind a header of `header` bytes, those that a slow wire of `passed` bytes leaves; whole units. */
static size_t frame_cut(size_t header, size_t ready, size_t passed) {
    size_t body = passed > header ? (passed - header) & ~(size_t)(ALIGNMENT - 1) : 0;
    if (!body && !header) body = ALIGNMENT;
    return body < ready ? body : ready;
}

/* Puts once; WAIT_NONE: go on, else the reason to stop. Sets *failed on a dead link. */
static enum wait_reason put_piece(struct link *link, struct item *item, struct limit *limit, bool *failed) {
    struct transmit *tx = &link->tx;
    size_t header = sizeof tx->header - tx->header_sent, ready = frame_ready(tx, item);
    size_t pad = ready == tx->payload_left ? tx->pad_left : 0;
    if (!header && !ready && !pad) return WAIT_OWN;
    if (limit) {
        size_t want = header + ready + pad, passed = limit_pass(limit, link, want, clock_now_ns());
        if (!passed) return WAIT_WIRE;
        if (passed < want) ready = frame_cut(header, ready, passed);
        if (ready < tx->payload_left) pad = 0;
    }
    struct iovec parts[3];
    int n = 0;
    if (header) parts[n++] = (struct iovec){(char *)&tx->header + tx->header_sent, header};
    if (ready) parts[n++] = (struct iovec){(char *)item->base + item->done, ready};
    if (pad) parts[n++] = (struct iovec){(char *)zeros, pad};
    ssize_t sent = link_put(link, parts, n);
    *failed = sent < 0;
    if (sent <= 0) return WAIT_CREDIT;
    uint64_t payload = frame_advance(tx, (size_t)sent, ready);
    item->done += payload;
    item->stat->sent += payload;
    if (limit) limit_sent(limit, link, (size_t)sent);
    return (size_t)sent < header + ready + pad ? WAIT_CREDIT : WAIT_NONE;
}

bool transmit_flush(struct plane *plane, struct link *link) {
    (void)plane;
    struct transmit *tx = &link->tx;
    while (!at_boundary(tx)) {
        size_t header = sizeof tx->header - tx->header_sent;
        size_t ready = tx->payload_left < sizeof zeros ? tx->payload_left : sizeof zeros;
        struct iovec parts[3] = {{(char *)&tx->header + tx->header_sent, header}, {(char *)zeros, ready},
                                 {(char *)zeros, ready == tx->payload_left ? tx->pad_left : 0}};
        ssize_t sent = link_put(link, parts, 3);
        if (sent <= 0) return false;
        frame_advance(tx, (size_t)sent, ready);
    }
    tx->stale = false;
    return true;
}

/* A frame of news (note, bye, ask) if it can go at once as a whole; news that cannot go is dropped. */
void transmit_control(struct plane *plane, struct link *link, struct header *header, const char *text) {
    if (!transmit_flush(plane, link)) return;
    size_t length = text ? strlen(text) : 0;
    header->magic = FRAME_MAGIC;
    header->generation = atomic_load(&plane->domain->generation);
    header->length = (uint32_t)length;
    link->tx = (struct transmit){.header = *header, .payload_left = (uint32_t)length, .pad_left = padding((uint32_t)length), .stale = true};
    struct iovec parts[3] = {{&link->tx.header, sizeof *header}, {(char *)(text ? text : zeros), length}, {(char *)zeros, link->tx.pad_left}};
    ssize_t sent = link_put(link, parts, 3);
    if (sent > 0) frame_advance(&link->tx, (size_t)sent, length);
    if (at_boundary(&link->tx)) link->tx.stale = false;
}

/* When `forward` is exactly as far as the receive that gates it and leaves through shared memory, its payload need not
 * pass through the buffer: opens its frame and returns the link. */
struct link *transmit_through(struct plane *plane, struct item *forward, uint64_t done) {
    struct peer *peer = &plane->peers[forward->peer];
    struct link *link = peer->link;
    bool failed = false;
    if (peer->tx_first != forward || !link || link->kind != KS_SHM || forward->done != done || link->tx.stale || link->hup) return NULL;
    if (limit_of(plane, peer)) return NULL;
    if (at_boundary(&link->tx)) frame_open(plane, &link->tx, forward);
    if (link->tx.header_sent < sizeof(struct header)) put_piece(link, forward, NULL, &failed);
    return link->tx.header_sent == sizeof(struct header) && link->tx.payload_left ? link : NULL;
}

void transmit_written(struct link *link, struct item *forward, size_t bytes) {
    size_t pad = bytes == link->tx.payload_left ? link->tx.pad_left : 0;         /* there is room: it comes in units of ALIGNMENT */
    shm_commit(link, bytes + pad);
    link->tx.payload_left -= (uint32_t)bytes;
    link->tx.pad_left -= (uint32_t)pad;
    forward->done += bytes;
    forward->stat->sent += bytes;
}

static enum wait_reason transmit_step(struct plane *plane, struct peer *peer, bool *moved, bool *failed) {
    struct link *link = peer->link;
    struct item *item = peer->tx_first;
    if (!item) return WAIT_NONE;
    if (!link) return WAIT_CREDIT;
    if (link->tx.stale) {
        if (!transmit_flush(plane, link)) {
            *failed = link->error != 0;
            return WAIT_CREDIT;
        }
        *moved = true;
    }
    if (at_boundary(&link->tx)) {
        if (item->length && item->done == item->length) {                        /* its end was written in place */
            item_done(plane, item);
            return WAIT_NONE;
        }
        if (!item_open(item)) return WAIT_OWN;
        frame_open(plane, &link->tx, item);
    }
    enum wait_reason reason = put_piece(link, item, limit_of(plane, peer), failed);
    *moved |= reason == WAIT_NONE;
    if (at_boundary(&link->tx) && item->done == item->length) item_done(plane, item);
    return reason;
}

bool transmit_progress(struct plane *plane, struct peer *peer) {
    if (!peer->tx_first) {
        peer->tx_wait = WAIT_NONE;
        return false;
    }
    uint64_t start = 0;
    if (plane->timing) {
        start = clock_now_ns();
        struct tally *stat = peer->tx_first->stat;
        uint64_t *waited = peer->tx_wait == WAIT_OWN ? &stat->own_ns : peer->tx_wait == WAIT_WIRE ? &stat->wire_ns : &stat->credit_ns;
        if (peer->tx_wait && peer->tx_mark) *waited += start - peer->tx_mark;
    }
    struct tally *stat = peer->tx_first->stat;
    bool any = false, failed = false;
    for (int budget = 0; budget < 4; budget++) {
        bool moved = false;
        uint64_t before = peer->tx_first ? peer->tx_first->done : 0;
        struct item *item = peer->tx_first;
        peer->tx_wait = (uint8_t)transmit_step(plane, peer, &moved, &failed);
        any |= moved || peer->tx_first != item || (item && item->done != before);
        if (peer->tx_wait != WAIT_NONE || !peer->tx_first || failed) break;
    }
    if (plane->timing) {
        peer->tx_mark = clock_now_ns();
        if (any) stat->wire_ns += peer->tx_mark - start;
    }
    if (failed) peer->peek = peer->link->tx_dead = true;                          /* receive_progress reads a last word, then gives up */
    return any || failed;
}
