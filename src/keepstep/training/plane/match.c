/* Point to point: which message goes to which receive. Messages of one peer arrive in order; a receive takes the first
 * message with its tag (and peer, unless any will do). Messages ahead of their receive wait in a bounded stash. */
#include "plane.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STASH_BYTES (1ull << 30)

static bool fits(const struct ticket *ticket, int peer, int64_t tag) {
    return ticket->call.tag == tag && (ticket->call.peer < 0 || ticket->call.peer == peer);
}

static void post(struct plane *plane, struct ticket *ticket) {
    ticket->posted = true;
    ticket->next = NULL;
    if (plane->posted_first) plane->posted_last->next = ticket;
    else plane->posted_first = ticket;
    plane->posted_last = ticket;
    if (ticket->call.peer < 0) plane->posted_any++;
    else plane->peers[ticket->call.peer].posted++;
}

static void unpost(struct plane *plane, struct ticket *ticket) {
    struct ticket *previous = NULL, *at = plane->posted_first;
    while (at && at != ticket) previous = at, at = at->next;
    if (!at) return;
    if (previous) previous->next = ticket->next;
    else plane->posted_first = ticket->next;
    if (plane->posted_last == ticket) plane->posted_last = previous;
    ticket->posted = false;
    if (ticket->call.peer < 0) plane->posted_any--;
    else plane->peers[ticket->call.peer].posted--;
}

static void message_free(struct plane *plane, struct message *message) {
    struct message *previous = NULL, *at = plane->stash_first;
    while (at && at != message) previous = at, at = at->next;
    if (previous) previous->next = message->next;
    else plane->stash_first = message->next;
    if (plane->stash_last == message) plane->stash_last = previous;
    plane->stash_bytes -= message->length;
    free(message->bytes);
    free(message);
}

static void wrong_size(struct plane *plane, struct ticket *ticket, int peer, uint64_t length) {
    char what[WHAT_BYTES];
    snprintf(what, sizeof what, "rank %d sent %llu bytes with tag %lld, a receive of %llu bytes was posted", peer, (unsigned long long)length,
             (long long)ticket->call.tag, (unsigned long long)ticket->call.outputs[0].bytes);
    ticket_fail(plane, ticket, peer, EMSGSIZE, what);
}

/* Copies a whole stashed message to its receive, in pieces, as a local item. */
static void deliver(struct plane *plane, struct message *message, struct ticket *ticket) {
    ticket->source = message->peer;
    if (message->length != ticket->call.outputs[0].bytes) {
        int peer = message->peer;
        uint64_t length = message->length;
        message_free(plane, message);
        wrong_size(plane, ticket, peer, length);
        return;
    }
    struct item *item = plan_item(plane, ticket, message->peer, message->length);
    if (!item) {
        ticket_fail(plane, ticket, message->peer, ENOMEM, "out of memory");
        return;
    }
    item->target = message->length ? (char *)ticket->call.outputs[0].address : (char *)item;
    item->base = message->bytes;
    ticket->stat.received += message->length;
    ticket->locals = item;
    ticket->scratch = message->bytes;
    ticket->left = 1;
    message->bytes = NULL;
    message_free(plane, message);
}

static void receive_start(struct plane *plane, struct ticket *ticket) {
    ticket->left = 1;
    for (struct message *message = plane->stash_first; message; message = message->next) {
        if (message->taker || !fits(ticket, message->peer, message->tag)) continue;
        if (message->complete) {
            deliver(plane, message, ticket);
        } else {
            message->taker = ticket;
            ticket->source = message->peer;
        }
        return;
    }
    post(plane, ticket);
}

void match_start(struct plane *plane, struct ticket *ticket) {
    ticket->source = ticket->call.peer;
    ticket->stat = (struct tally){0};
    if (ticket->call.op == KS_RECV) {
        receive_start(plane, ticket);
        return;
    }
    struct peer *peer = &plane->peers[ticket->call.peer];
    struct item *item = plan_item(plane, ticket, ticket->call.peer, ticket->call.inputs[0].bytes);
    if (!item) {
        ticket->left = 1;
        ticket_fail(plane, ticket, -1, ENOMEM, "out of memory");
        return;
    }
    item->base = (const char *)ticket->call.inputs[0].address;
    if (peer->tx_first) peer->tx_last->next = item;
    else {
        peer->tx_first = item;
        peer->tx_wait = WAIT_NONE;
    }
    peer->tx_last = item;
}

bool match_wanted(const struct plane *plane, const struct peer *peer) {
    const struct link *link = peer->link;
    if (peer->posted || (plane->posted_any && !(link && link->bye && link->hup))) return true;
    if (!link) return false;
    const struct item *item = link->rx.item ? link->rx.item : link->rx.partial;
    return item && (!item->message || item->message->taker);
}

static void overflow(struct plane *plane, int rank) {
    char what[WHAT_BYTES];
    snprintf(what, sizeof what, "more than %llu bytes of messages wait here for no receive, the next is from rank %d", STASH_BYTES, rank);
    for (struct ticket *ticket = plane->posted_first, *next; ticket; ticket = next) {
        next = ticket->next;
        if (ticket->call.peer == rank || ticket->call.peer < 0) ticket_fail(plane, ticket, rank, ENOBUFS, what);
    }
}

static struct item *stash(struct plane *plane, const struct header *header, int rank) {
    if (header->message > STASH_BYTES - plane->stash_bytes) return NULL;
    struct message *message = calloc(1, sizeof *message);
    char *bytes = message ? malloc(header->message + 1) : NULL;
    struct item *item = bytes ? plan_item(plane, NULL, rank, header->message) : NULL;
    if (!item) {
        free(bytes);
        free(message);
        return NULL;
    }
    *message = (struct message){.peer = rank, .tag = header->tag, .length = header->message, .bytes = bytes};
    if (plane->stash_first) plane->stash_last->next = message;
    else plane->stash_first = message;
    plane->stash_last = message;
    plane->stash_bytes += message->length;
    item->target = bytes;
    item->message = message;
    item->stat = &message->stat;
    return item;
}

static struct item *take_posted(struct plane *plane, const struct header *header, int rank, bool *dropped) {
    struct ticket *ticket = plane->posted_first;
    while (ticket && !fits(ticket, rank, header->tag)) ticket = ticket->next;
    if (!ticket) return NULL;
    unpost(plane, ticket);
    ticket->source = rank;
    if (plane->timing) ticket->stat.peer_ns = clock_now_ns() - ticket->started_ns;
    if (ticket->call.outputs[0].bytes != header->message) {
        wrong_size(plane, ticket, rank, header->message);
        *dropped = true;
        return NULL;
    }
    ticket->left = 0;
    struct item *item = plan_item(plane, ticket, rank, header->message);
    if (!item) {
        ticket->left = 1;
        ticket_fail(plane, ticket, rank, ENOMEM, "out of memory");
        *dropped = true;
        return NULL;
    }
    item->target = header->message ? (char *)ticket->call.outputs[0].address : (char *)item;
    return item;
}

static void cut_off(struct plane *plane, struct item *item, int rank, const char *why) {
    char what[WHAT_BYTES];
    snprintf(what, sizeof what, "rank %d %s", rank, why);
    struct ticket *ticket = item->message ? item->message->taker : item->ticket;
    struct message *message = item->message;
    if (message) {
        item->next = plane->spare;
        plane->spare = item;
        message_free(plane, message);
    }
    if (ticket) ticket_fail(plane, ticket, rank, ECONNABORTED, what);
}

/* Finds a home for the frame just begun; false: leave it unread until a receive wants it. */
bool match_bind(struct plane *plane, struct peer *peer, int rank) {
    struct receive *rx = &peer->link->rx;
    struct item *partial = rx->partial;
    bool first = rx->header.flags & FLAG_FIRST;
    if (!first) {
        bool right = partial && rx->header.message == partial->length && rx->header.length <= partial->length - partial->done;
        if (right) rx->item = partial;
        else rx->drop = true;
        return true;
    }
    rx->partial = NULL;
    if (partial) cut_off(plane, partial, rank, "gave up a message in the middle");
    if (!match_wanted(plane, peer)) return false;
    struct item *item = take_posted(plane, &rx->header, rank, &rx->drop);
    if (!item && !rx->drop && !(item = stash(plane, &rx->header, rank))) {
        overflow(plane, rank);
        return false;
    }
    rx->item = rx->partial = item;
    return true;
}

void match_stashed(struct plane *plane, struct message *message) {
    struct ticket *taker = message->taker;
    message->complete = true;
    message->taker = NULL;
    if (taker) deliver(plane, message, taker);
}

void match_forget(struct plane *plane, struct ticket *ticket) {
    if (ticket->posted) unpost(plane, ticket);
    for (struct message *message = plane->stash_first; message; message = message->next)
        if (message->taker == ticket) message->taker = NULL;
    free(ticket->scratch);
    ticket->scratch = NULL;
}

static void partial_drop(struct plane *plane, struct link *link) {
    struct receive *rx = &link->rx;
    struct item *item = rx->item ? rx->item : rx->partial;
    if (rx->item) rx->drop = true;
    rx->item = rx->partial = NULL;
    if (!item || !item->message) return;
    item->next = plane->spare;
    plane->spare = item;
}

/* A dead peer: what it had sent in full can still be received. */
void match_hangup(struct plane *plane, int rank) {
    struct link *link = plane->peers[rank].link;
    struct item *item = link ? link->rx.item ? link->rx.item : link->rx.partial : NULL;
    if (!item || !item->message) return;
    struct message *message = item->message;
    partial_drop(plane, link);
    message_free(plane, message);
}

void match_clear(struct plane *plane) {
    if (plane->lane != KS_P2P) return;
    for (int rank = 0; rank < plane->size; rank++)
        if (plane->peers[rank].link) partial_drop(plane, plane->peers[rank].link);
    while (plane->stash_first) message_free(plane, plane->stash_first);
}
