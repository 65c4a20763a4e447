/* Writes the recorder ring: one slot per call when it starts, finished in place, and one per peer behind it. The layout is
 * that of keepstep.records.ring; readers take a slot when its first word is its index + 1. */
#include "plane.h"
#include <string.h>

enum { GENERATION_AT = 64, STEP_AT = 72, HEAD_AT = 24, DROPPED_AT = 32, HEARTBEAT_AT = 40, PEERS_MOST = 64 };

struct op_slot {
    uint64_t mark;
    uint8_t kind, op, algorithm, element, reduction, status;
    uint16_t peers;
    uint32_t group, generation;
    uint64_t sequence;
    int64_t step;
    uint64_t count, nbytes, queued_ns, started_ns, finished_ns;
    uint32_t rank;
    int32_t root;
    uint8_t spare[40];
};
struct peer_slot {
    uint64_t mark;
    uint8_t kind, op, algorithm, element, reduction, status;
    uint16_t peers;
    uint64_t op_index;
    int32_t peer;
    uint32_t transport;
    uint64_t sent, received, wait_own_ns, wait_credit_ns, wire_ns, wait_peer_ns;
    uint8_t spare[48];
};
struct span_slot {
    uint64_t mark;
    uint8_t kind, what, algorithm, element, reduction, status;
    uint16_t peers;
    int64_t step;
    uint64_t began_ns, ended_ns;
    uint32_t generation;
    uint8_t spare[84];
};
struct group_entry {
    char name[56];
    uint32_t hash, lane, size;
    int32_t rank;
    uint64_t queued, started, finished;
    uint32_t generation;
    uint8_t spare[28];
};
_Static_assert(sizeof(struct op_slot) == RING_SLOT_BYTES && sizeof(struct peer_slot) == RING_SLOT_BYTES, "slot layout");
_Static_assert(sizeof(struct span_slot) == RING_SLOT_BYTES, "span layout");
_Static_assert(sizeof(struct group_entry) == RING_GROUP_BYTES, "group layout");

/* FNV-1a, 32 bits (http://www.isthe.com/chongo/tech/comp/fnv/). */
uint32_t record_hash(const char *name) {
    uint32_t hash = 2166136261u;
    for (; *name; name++) hash = (hash ^ (uint8_t)*name) * 16777619u;
    return hash;
}

static bool on(const struct plane *plane) { return atomic_load_explicit(&plane->domain->recording, memory_order_relaxed); }

static void *slot_at(const struct domain *domain, uint64_t index) {
    return atomic_load(&domain->ring) + RING_SLOTS + index % domain->ring_slots * RING_SLOT_BYTES;
}

/* With domain->list held: finds this group its line in the table; without one it is only in the slots. */
void record_attach(struct plane *plane) {
    char *ring = atomic_load(&plane->domain->ring);
    if (!ring || atomic_load(&plane->table)) return;
    for (int i = 0; i < RING_GROUP_COUNT; i++) {
        struct group_entry *entry = (struct group_entry *)(ring + RING_GROUPS + i * RING_GROUP_BYTES);
        if (__atomic_load_n(&entry->name[0], __ATOMIC_ACQUIRE)) continue;
        memset(entry, 0, sizeof *entry);
        entry->hash = plane->group_hash;
        entry->lane = (uint32_t)plane->lane;
        entry->size = (uint32_t)plane->size;
        entry->rank = plane->rank;
        entry->generation = atomic_load(&plane->domain->generation);
        memcpy(entry->name + 1, plane->group + 1, sizeof entry->name - 1);
        __atomic_store_n(&entry->name[0], plane->group[0], __ATOMIC_RELEASE);
        atomic_store(&plane->table, (char *)entry);
        return;
    }
}

void record_detach(struct plane *plane) {
    struct group_entry *entry = (struct group_entry *)atomic_exchange(&plane->table, NULL);
    if (entry) __atomic_store_n(&entry->name[0], 0, __ATOMIC_RELEASE);
}

static void count(struct plane *plane, size_t field) {
    char *entry = atomic_load_explicit(&plane->table, memory_order_relaxed);
    if (entry && on(plane)) __atomic_fetch_add((uint64_t *)(entry + field), 1, __ATOMIC_RELEASE);
}

void record_queued(struct plane *plane) { count(plane, offsetof(struct group_entry, queued)); }

void record_install(struct plane *plane) {
    struct group_entry *entry = (struct group_entry *)atomic_load(&plane->table);
    if (!entry) return;
    __atomic_store_n(&entry->queued, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->started, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->finished, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->generation, atomic_load(&plane->domain->generation), __ATOMIC_RELEASE);
}

void record_header(struct domain *domain) {
    char *ring = atomic_load(&domain->ring);
    if (!ring) return;
    __atomic_store_n((uint32_t *)(ring + GENERATION_AT), atomic_load(&domain->generation), __ATOMIC_RELAXED);
    __atomic_store_n((int64_t *)(ring + STEP_AT), atomic_load(&domain->step), __ATOMIC_RELAXED);
}

static uint64_t moved_bytes(const struct ticket *ticket) {
    uint64_t in = 0, out = 0;
    if (ticket->total) return ticket->total;
    for (uint32_t i = 0; i < ticket->call.n_inputs; i++) in += ticket->call.inputs[i].bytes;
    for (uint32_t i = 0; i < ticket->call.n_outputs; i++) out += ticket->call.outputs[i].bytes;
    return in > out ? in : out;
}

static uint16_t peer_count(const struct plane *plane) {
    int n = plane->lane == KS_P2P ? 1 : plane->n_scan;
    return (uint16_t)(n < PEERS_MOST ? n : PEERS_MOST);
}

/* Reserves the slots of a call and makes it visible as running. */
void record_start(struct plane *plane, struct ticket *ticket) {
    struct domain *domain = plane->domain;
    count(plane, offsetof(struct group_entry, started));
    if (!plane->timing) return;
    char *ring = atomic_load(&domain->ring);
    ticket->started_ns = clock_now_ns();
    uint16_t peers = peer_count(plane);
    uint64_t index = __atomic_fetch_add((uint64_t *)(ring + HEAD_AT), 1u + peers, __ATOMIC_RELAXED);
    if (plane->lane == KS_COLLECTIVE && plane->n_scan > peers)
        __atomic_fetch_add((uint64_t *)(ring + DROPPED_AT), (uint64_t)(plane->n_scan - peers), __ATOMIC_RELAXED);
    struct op_slot *slot = slot_at(domain, index);
    size_t unit = element_bytes(ticket->call.element);
    uint64_t nbytes = moved_bytes(ticket);
    __atomic_store_n(&slot->mark, 0, __ATOMIC_RELEASE);
    *slot = (struct op_slot){.kind = 1, .op = ticket->call.op, .algorithm = ticket->algorithm, .element = ticket->call.element,
        .reduction = ticket->call.reduction, .status = KS_RUNNING, .peers = peers, .group = plane->group_hash,
        .generation = atomic_load(&domain->generation), .sequence = ticket->sequence, .step = atomic_load(&domain->step),
        .count = unit ? nbytes / unit : nbytes, .nbytes = nbytes, .queued_ns = ticket->queued_ns, .started_ns = ticket->started_ns,
        .rank = (uint32_t)plane->global_ranks[plane->rank], .root = ticket->call.root};
    if (plane->lane == KS_P2P) {                                                 /* the other end, as a global rank */
        int peer = ticket->call.peer;
        slot->root = peer >= 0 && peer < plane->size ? plane->global_ranks[peer] : -1;
    }
    __atomic_store_n(&slot->mark, index + 1, __ATOMIC_RELEASE);
    ticket->record_index = index + 1;
}

static void record_peer(struct plane *plane, const struct ticket *ticket, uint64_t index, int rank, const struct tally *stat, int status) {
    struct peer_slot *slot = slot_at(plane->domain, index);
    const struct link *link = rank >= 0 ? plane->peers[rank].link : NULL;
    __atomic_store_n(&slot->mark, 0, __ATOMIC_RELEASE);
    *slot = (struct peer_slot){.kind = 2, .op = ticket->call.op, .algorithm = ticket->algorithm, .element = ticket->call.element,
        .reduction = ticket->call.reduction, .status = (uint8_t)status, .op_index = ticket->record_index - 1,
        .peer = rank >= 0 ? plane->global_ranks[rank] : -1, .transport = link ? (uint32_t)link->kind : 0, .sent = stat->sent,
        .received = stat->received, .wait_own_ns = stat->own_ns, .wait_credit_ns = stat->credit_ns, .wire_ns = stat->wire_ns,
        .wait_peer_ns = stat->peer_ns};
    __atomic_store_n(&slot->mark, index + 1, __ATOMIC_RELEASE);
}

/* Adds the wait of the message that goes to this peer now. */
static void add_sending(struct tally *waits, const struct peer *peer, uint64_t now) {
    if (!peer->tx_first || !peer->tx_mark) return;
    if (peer->tx_wait == WAIT_OWN) waits->own_ns += now - peer->tx_mark;
    if (peer->tx_wait == WAIT_CREDIT) waits->credit_ns += now - peer->tx_mark;
    if (peer->tx_wait == WAIT_WIRE) waits->wire_ns += now - peer->tx_mark;
}

/* The waits of a peer with those that are going on. */
static struct tally waits_until(const struct peer *peer, uint64_t now) {
    struct tally waits = peer->stat;
    add_sending(&waits, peer, now);
    if (peer->rx_first && peer->rx_mark && peer->rx_wait == WAIT_PEER) waits.peer_ns += now - peer->rx_mark;
    return waits;
}

/* A message point to point that is under way. */
static void message_waiting(struct plane *plane, const struct ticket *ticket, uint64_t now) {
    int rank = ticket->call.peer >= 0 ? ticket->call.peer : ticket->source;
    struct tally waits = ticket->stat;
    if (ticket->call.op != KS_SEND) waits.peer_ns = now - ticket->started_ns;
    else if (plane->peers[rank].tx_first && plane->peers[rank].tx_first->ticket == ticket) add_sending(&waits, &plane->peers[rank], now);
    record_peer(plane, ticket, ticket->record_index, rank, &waits, KS_RUNNING);
}

/* Shows a call that is under way as it stands, and that its engine lives. */
void record_waiting(struct plane *plane, const struct ticket *ticket, uint64_t now) {
    char *ring = atomic_load(&plane->domain->ring);
    if (!ring || !ticket->record_index) return;
    __atomic_store_n((uint64_t *)(ring + HEARTBEAT_AT), now, __ATOMIC_RELAXED);
    struct op_slot *slot = slot_at(plane->domain, ticket->record_index - 1);
    if (__atomic_load_n(&slot->mark, __ATOMIC_ACQUIRE) != ticket->record_index) return;
    if (plane->lane == KS_P2P) message_waiting(plane, ticket, now);
    for (int i = 0; i < slot->peers && i < plane->n_scan && plane->lane == KS_COLLECTIVE; i++) {
        struct tally waits = waits_until(&plane->peers[plane->scan[i]], now);
        record_peer(plane, ticket, ticket->record_index + (uint64_t)i, plane->scan[i], &waits, KS_RUNNING);
    }
}

void record_finish(struct plane *plane, struct ticket *ticket, int status) {
    count(plane, offsetof(struct group_entry, finished));
    if (!ticket->record_index) return;
    struct op_slot *slot = slot_at(plane->domain, ticket->record_index - 1);
    if (__atomic_load_n(&slot->mark, __ATOMIC_ACQUIRE) != ticket->record_index) return;  /* overtaken by a whole turn of the ring */
    uint64_t now = clock_now_ns();
    int peers = slot->peers;
    if (plane->lane == KS_P2P) {
        if (ticket->posted) ticket->stat.peer_ns = now - ticket->started_ns;
        record_peer(plane, ticket, ticket->record_index, ticket->source, &ticket->stat, status);
    }
    for (int i = 0; i < peers && plane->lane == KS_COLLECTIVE; i++) {
        struct peer *peer = &plane->peers[plane->scan[i]];
        struct tally waits = status == KS_DONE ? peer->stat : waits_until(peer, now);
        record_peer(plane, ticket, ticket->record_index + (uint64_t)i, plane->scan[i], &waits, status);
    }
    __atomic_store_n(&slot->finished_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->status, (uint8_t)status, __ATOMIC_RELEASE);
}

/* What the training loop is doing outside collectives: opened here, closed in place. The mark of its slot; 0: nothing is recorded. */
KS_PUBLIC uint64_t ks_span_begin(struct domain *domain, int what) {
    char *ring = atomic_load(&domain->ring);
    if (!ring || !atomic_load_explicit(&domain->recording, memory_order_relaxed)) return 0;
    uint64_t index = __atomic_fetch_add((uint64_t *)(ring + HEAD_AT), 1u, __ATOMIC_RELAXED);
    struct span_slot *slot = slot_at(domain, index);
    __atomic_store_n(&slot->mark, 0, __ATOMIC_RELEASE);
    *slot = (struct span_slot){.kind = 3, .what = (uint8_t)what, .status = KS_RUNNING, .step = atomic_load(&domain->step),
        .began_ns = clock_now_ns(), .generation = atomic_load(&domain->generation)};
    __atomic_store_n(&slot->mark, index + 1, __ATOMIC_RELEASE);
    return index + 1;
}

KS_PUBLIC void ks_span_end(struct domain *domain, uint64_t mark) {
    if (!mark || !atomic_load(&domain->ring)) return;
    struct span_slot *slot = slot_at(domain, mark - 1);
    if (__atomic_load_n(&slot->mark, __ATOMIC_ACQUIRE) != mark) return;  /* overtaken by a whole turn of the ring */
    __atomic_store_n(&slot->ended_ns, clock_now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&slot->status, (uint8_t)KS_DONE, __ATOMIC_RELEASE);
}
