/* Turns a call into messages between members. Which algorithm runs depends on the op, the bytes and the size of the group
 * only, and the order of additions on the ranks only, so every member and every transport gives the same bits. */
#include "plane.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_ITEMS = 64 };
#ifndef SEGMENT_BYTES
#define SEGMENT_BYTES (256u << 10)                                               /* of one member's chunk; a multiple of every element */
#endif

struct span { char *out; const char *in; uint64_t count; size_t unit; };        /* count elements of unit bytes */

static struct item *item_new(struct plane *plane) {
    if (!plane->spare) {
        void **block = calloc(1, sizeof(void *) * 2 + BLOCK_ITEMS * sizeof(struct item));
        if (!block) return NULL;
        *block = plane->blocks;
        plane->blocks = block;
        struct item *items = (struct item *)(block + 2);
        for (int i = 0; i < BLOCK_ITEMS; i++) {
            items[i].next = plane->spare;
            plane->spare = &items[i];
        }
    }
    struct item *item = plane->spare;
    plane->spare = item->next;
    memset(item, 0, sizeof *item);
    return item;
}

struct item *plan_item(struct plane *plane, struct ticket *ticket, int peer, uint64_t length) {
    struct item *item = item_new(plane);
    if (!item) return NULL;
    item->peer = peer;
    item->length = length;
    if (!ticket) return item;
    item->ticket = ticket;
    item->stat = plane->lane == KS_COLLECTIVE ? &plane->peers[peer].stat : &ticket->stat;
    item->sibling = ticket->items;
    ticket->items = item;
    ticket->left++;
    return item;
}

/* What a builder needs; `short_of_memory` is looked at once, at the end. */
struct build {
    struct plane *plane;
    struct ticket *ticket;
    int rank, size;
    bool short_of_memory;
};

static struct peer *use(struct build *b, int rank) {
    struct peer *peer = &b->plane->peers[rank];
    if (!peer->used) {
        peer->used = true;
        peer->stat = (struct tally){0};
        peer->tx_wait = peer->rx_wait = WAIT_NONE;
        peer->tx_mark = peer->rx_mark = 0;
        peer->peek = false;
        b->plane->scan[b->plane->n_scan++] = rank;
    }
    return peer;
}

static struct item *send_to(struct build *b, int rank, const void *from, uint64_t length, struct item *gate) {
    struct peer *peer = use(b, rank);
    struct item *item = plan_item(b->plane, b->ticket, rank, length);
    if (!item) return b->short_of_memory = true, NULL;
    item->base = from;
    item->gate = gate;
    if (gate && !gate->forward) gate->forward = item;
    if (peer->tx_first) peer->tx_last->next = item;
    else peer->tx_first = item;
    peer->tx_last = item;
    return item;
}

/* base NULL: copy; else target = base op incoming. */
static struct item *receive_from(struct build *b, int rank, void *target, const void *base, uint64_t length, struct item *gate) {
    struct peer *peer = use(b, rank);
    struct item *item = plan_item(b->plane, b->ticket, rank, length);
    if (!item) return b->short_of_memory = true, NULL;
    item->target = target ? target : (char *)item;                               /* marks the direction of empty messages */
    item->base = base;
    item->gate = gate;
    if (peer->rx_first) peer->rx_last->next = item;
    else peer->rx_first = item;
    peer->rx_last = item;
    return item;
}

static void copy_here(struct build *b, struct ks_buffer to, struct ks_buffer from) {
    if (to.address == from.address || !to.bytes) return;
    struct item *item = plan_item(b->plane, b->ticket, b->rank, to.bytes);
    if (!item) {
        b->short_of_memory = true;
        return;
    }
    item->target = (char *)to.address;
    item->base = (const char *)from.address;
    item->next = b->ticket->locals;
    b->ticket->locals = item;
}

static char *at(struct ks_buffer buffer, uint64_t offset) { return (char *)buffer.address + offset; }

/* Partial sums of a group member that may not change its own input. Kept between calls unless large. */
static char *scratch(struct build *b, uint64_t bytes) {
    struct plane *plane = b->plane;
    if (plane->scratch_bytes < bytes) {
        free(plane->scratch);
        plane->scratch = malloc(bytes);
        plane->scratch_bytes = plane->scratch ? bytes : 0;
        if (!plane->scratch) b->short_of_memory = true;
    }
    return plane->scratch;
}

static int lowest_bit(int value) { return value & -value; }
static int seat(const struct build *b, int root) { return (b->rank - root + b->size) % b->size; }
static int rank_at(const struct build *b, int root, int seat) { return (seat + root) % b->size; }

/* Binomial tree over seats counted from root: seat v hears v+1, v+2, v+4 ... and reports to v without its lowest bit. */
static struct item *tree_up(struct build *b, int root, struct ks_buffer out, const void *in, bool scale) {
    int v = seat(b, root), stop = v ? lowest_bit(v) : b->size;
    struct item *last = NULL;
    const void *base = in;
    for (int bit = 1; bit < stop && v + bit < b->size; bit <<= 1) {
        last = receive_from(b, rank_at(b, root, v + bit), at(out, 0), base, out.bytes, last);
        base = at(out, 0);
    }
    if (v) send_to(b, rank_at(b, root, v - lowest_bit(v)), base, out.bytes, last);
    else if (last) last->scale = scale;
    return last;
}

static void tree_down(struct build *b, int root, struct ks_buffer buffer, struct item *gate) {
    int v = seat(b, root), stop = v ? lowest_bit(v) : b->size, bit = 1;
    if (v) gate = receive_from(b, rank_at(b, root, v - lowest_bit(v)), at(buffer, 0), NULL, buffer.bytes, NULL);
    while (bit < stop && v + bit < b->size) bit <<= 1;
    for (bit >>= 1; bit; bit >>= 1) send_to(b, rank_at(b, root, v + bit), at(buffer, 0), buffer.bytes, gate);
}

static uint64_t cut(uint64_t elements, int size, int chunk) {
    return elements / (uint64_t)size * (uint64_t)chunk + (uint64_t)chunk * (elements % (uint64_t)size) / (uint64_t)size;
}

/* One step of a ring over `part` of the buffers: chunk c starts at rank c, gathers the others' share going round, is
 * complete at rank c-1 and goes round once more. `got` is what arrived in the step before; returns what arrives now. */
static struct item *ring_step(struct build *b, struct span part, int step, struct item *got) {
    int size = b->size, next = (b->rank + 1) % size, before = (b->rank + size - 1) % size;
    bool reducing = step < size - 1;
    int mine = ((b->rank - step) % size + size) % size, theirs = (mine + size - 1) % size;
    uint64_t from = cut(part.count, size, mine) * part.unit, length = cut(part.count, size, mine + 1) * part.unit - from;
    send_to(b, next, (step ? part.out : part.in) + from, length, got);
    from = cut(part.count, size, theirs) * part.unit;
    length = cut(part.count, size, theirs + 1) * part.unit - from;
    got = receive_from(b, before, part.out + from, reducing ? part.in + from : NULL, length, NULL);
    if (!got) return NULL;
    got->scale = step == size - 2 && b->ticket->call.reduction == KS_AVG;
    got->transient = step < size - 2;
    return got;
}

/* Segment after segment, so that what goes round stays in the cache. */
static void ring_all_reduce(struct build *b, struct ks_buffer out, const char *in, size_t unit) {
    uint64_t count = out.bytes / unit, each = (uint64_t)b->size * SEGMENT_BYTES / unit, done = 0;
    do {
        uint64_t take = count - done < each + each / 2 ? count - done : each;
        struct span part = {at(out, done * unit), in + done * unit, take, unit};
        struct item *got = NULL;
        for (int step = 0; step < 2 * (b->size - 1); step++) got = ring_step(b, part, step, got);
        done += take;
    } while (done < count);
}

static void all_reduce(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    bool tree = plan_small(b->ticket->total);
    b->ticket->algorithm = tree ? KS_TREE : KS_RING;
    for (uint32_t i = 0; i < call->n_outputs; i++) {
        struct ks_buffer out = call->outputs[i];
        const char *in = (const char *)call->inputs[i].address;
        if (b->size == 1) copy_here(b, out, call->inputs[i]);
        else if (tree) tree_down(b, 0, out, tree_up(b, 0, out, in, call->reduction == KS_AVG));
        else ring_all_reduce(b, out, in, element_bytes(call->element));
    }
}

/* Large reductions run down a chain of seats size-1, ..., 1, 0 = root. */
static void chain_reduce(struct build *b, struct ks_buffer out, const char *in) {
    int root = b->ticket->call.root, v = seat(b, root);
    struct item *got = NULL;
    if (v < b->size - 1) got = receive_from(b, rank_at(b, root, v + 1), at(out, 0), in, out.bytes, NULL);
    if (got) got->transient = v;
    if (v) send_to(b, rank_at(b, root, v - 1), got ? at(out, 0) : in, out.bytes, got);
    else if (got) got->scale = b->ticket->call.reduction == KS_AVG;
}

static void reduce(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    bool tree = plan_small(b->ticket->total), root = b->rank == call->root;
    b->ticket->algorithm = tree ? KS_TREE : KS_CHAIN;
    char *space = root ? NULL : scratch(b, b->ticket->total + 1);
    for (uint32_t i = 0; i < call->n_inputs && !b->short_of_memory; i++) {
        struct ks_buffer in = call->inputs[i], out = root ? call->outputs[i] : (struct ks_buffer){(uint64_t)space, in.bytes};
        if (b->size == 1) copy_here(b, out, in);
        else if (tree) tree_up(b, call->root, out, at(in, 0), call->reduction == KS_AVG);
        else chain_reduce(b, out, at(in, 0));
        space += root ? 0 : in.bytes;
    }
}

static void broadcast(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    bool tree = plan_small(b->ticket->total), root = b->rank == call->root;
    const struct ks_buffer *buffers = root ? call->inputs : call->outputs;
    uint32_t n = root ? call->n_inputs : call->n_outputs;
    b->ticket->algorithm = tree ? KS_TREE : KS_CHAIN;
    for (uint32_t i = 0; i < n; i++) {
        int v = seat(b, call->root);
        struct item *got = NULL;
        if (root && i < call->n_outputs) copy_here(b, call->outputs[i], buffers[i]);
        if (tree) {
            tree_down(b, call->root, buffers[i], NULL);
            continue;
        }
        if (v) got = receive_from(b, rank_at(b, call->root, v - 1), at(buffers[i], 0), NULL, buffers[i].bytes, NULL);
        if (v < b->size - 1) send_to(b, rank_at(b, call->root, v + 1), at(buffers[i], 0), buffers[i].bytes, got);
    }
}

static uint64_t largest(const struct ks_buffer *buffers, int n) {
    uint64_t bytes = 0;
    for (int i = 0; i < n; i++) bytes = buffers[i].bytes > bytes ? buffers[i].bytes : bytes;
    return bytes;
}

/* The part of a buffer that belongs to the segment starting at `offset`; empty behind its end. */
static struct ks_buffer slice(struct ks_buffer buffer, uint64_t offset) {
    uint64_t from = offset < buffer.bytes ? offset : buffer.bytes, left = buffer.bytes - from;
    return (struct ks_buffer){buffer.address + from, left < SEGMENT_BYTES ? left : SEGMENT_BYTES};
}

static void all_gather(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    int size = b->size, next = (b->rank + 1) % size, before = (b->rank + size - 1) % size;
    uint64_t most = largest(call->outputs, size), offset = 0;
    b->ticket->algorithm = KS_RING;
    copy_here(b, call->outputs[b->rank], call->inputs[0]);
    do {
        struct item *got = NULL;
        for (int step = 0; step < size - 1; step++) {
            int mine = (b->rank - step + size) % size, theirs = (mine + size - 1) % size;
            struct ks_buffer sent = slice(step ? call->outputs[mine] : call->inputs[0], offset), kept = slice(call->outputs[theirs], offset);
            send_to(b, next, at(sent, 0), sent.bytes, got);
            got = receive_from(b, before, at(kept, 0), NULL, kept.bytes, NULL);
        }
        offset += SEGMENT_BYTES;
    } while (offset < most);
}

/* Chunk c starts at rank c+1 and is complete at rank c. One scratch segment: a byte may come in once the old one has gone. */
static void reduce_scatter(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    int size = b->size, next = (b->rank + 1) % size, before = (b->rank + size - 1) % size;
    uint64_t most = largest(call->inputs, size), offset = 0;
    b->ticket->algorithm = KS_RING;
    if (size == 1) copy_here(b, call->outputs[0], call->inputs[0]);
    char *space = size > 2 ? scratch(b, SEGMENT_BYTES) : NULL;
    struct item *sent = NULL;
    do {
        struct item *got = NULL;
        for (int step = 0; step < size - 1; step++) {
            int mine = (b->rank - 1 - step + 2 * size) % size, theirs = (mine + size - 1) % size;
            struct ks_buffer own = slice(call->inputs[mine], offset), chunk = slice(call->inputs[theirs], offset);
            bool last = step == size - 2;
            struct item *now = send_to(b, next, step ? space : at(own, 0), own.bytes, got);
            if (step) sent = now;
            got = receive_from(b, before, last ? at(slice(call->outputs[0], offset), 0) : space, at(chunk, 0), chunk.bytes, last ? NULL : sent);
            if (!got) return;
            got->scale = last && call->reduction == KS_AVG;
            got->transient = !last;
        }
        offset += SEGMENT_BYTES;
    } while (offset < most);
}

static void direct(struct build *b) {
    struct ks_call *call = &b->ticket->call;
    int size = b->size, rank = b->rank, op = call->op;
    bool root = rank == call->root;
    b->ticket->algorithm = KS_DIRECT;
    if (op == KS_ALL_TO_ALL || (op == KS_SCATTER && root)) copy_here(b, call->outputs[op == KS_SCATTER ? 0 : rank], call->inputs[rank]);
    if (op == KS_GATHER && root) copy_here(b, call->outputs[rank], call->inputs[0]);
    for (int step = 1; step < size; step++) {
        int to = (rank + step) % size, from = (rank - step + size) % size;
        if (op == KS_ALL_TO_ALL || (op == KS_SCATTER && root)) send_to(b, to, at(call->inputs[to], 0), call->inputs[to].bytes, NULL);
        if (op == KS_ALL_TO_ALL || (op == KS_GATHER && root))
            receive_from(b, from, at(call->outputs[from], 0), NULL, call->outputs[from].bytes, NULL);
    }
    if (root) return;
    if (op == KS_GATHER) send_to(b, call->root, at(call->inputs[0], 0), call->inputs[0].bytes, NULL);
    if (op == KS_SCATTER) receive_from(b, call->root, at(call->outputs[0], 0), NULL, call->outputs[0].bytes, NULL);
}

int plan_build(struct plane *plane, struct ticket *ticket) {
    struct build b = {plane, ticket, plane->rank, plane->size, false};
    plane->n_scan = 0;
    switch (ticket->call.op) {
    case KS_ALL_REDUCE: all_reduce(&b); break;
    case KS_REDUCE: reduce(&b); break;
    case KS_BROADCAST: broadcast(&b); break;
    case KS_ALL_GATHER: all_gather(&b); break;
    case KS_REDUCE_SCATTER: reduce_scatter(&b); break;
    case KS_BARRIER:
        ticket->algorithm = KS_TREE;
        tree_down(&b, 0, (struct ks_buffer){0, 0}, tree_up(&b, 0, (struct ks_buffer){0, 0}, NULL, false));
        break;
    default: direct(&b);
    }
    for (int i = 0; i < plane->n_scan; i++) plane->peers[plane->scan[i]].used = false;
    return b.short_of_memory ? ENOMEM : 0;
}
