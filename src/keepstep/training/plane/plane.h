/* The data plane: moves and reduces bytes between members over TCP and shared memory, and decides nothing else.
 *
 * Threads: everything that touches links, queues of items or user memory happens under `plane->run`. Whoever holds it
 * (the plane's worker, or a thread in ks_wait of an inline call) is the engine; others get in with plane_enter().
 * `plane->mutex` guards the tickets and the submit queue and is only ever held for a moment.
 * Lock order: domain->admin, plane->run, domain->list, plane->mutex. */
#ifndef KEEPSTEP_PLANE_H
#define KEEPSTEP_PLANE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define KS_PUBLIC __attribute__((visibility("default")))

enum { KS_COLLECTIVE, KS_P2P };
enum { KS_ALL_REDUCE = 1, KS_REDUCE, KS_BROADCAST, KS_ALL_GATHER, KS_REDUCE_SCATTER, KS_ALL_TO_ALL, KS_GATHER, KS_SCATTER,
       KS_BARRIER, KS_SEND, KS_RECV };
enum { KS_SUM, KS_PRODUCT, KS_MIN, KS_MAX, KS_BAND, KS_BOR, KS_BXOR, KS_AVG };
enum { KS_UINT8, KS_INT8, KS_INT16, KS_INT32, KS_INT64, KS_UINT16, KS_UINT32, KS_UINT64, KS_FLOAT16, KS_BFLOAT16, KS_FLOAT32,
       KS_FLOAT64, KS_BOOL, KS_COMPLEX64, KS_COMPLEX128, KS_ELEMENTS };
enum { RING_GROUPS = 128, RING_GROUP_BYTES = 128, RING_GROUP_COUNT = 60, RING_SLOTS = 73728, RING_SLOT_BYTES = 128 };  /* recorder */
enum { KS_PENDING, KS_RUNNING, KS_DONE, KS_ABORTED, KS_FAILED };
enum { KS_LOCAL, KS_TREE, KS_RING, KS_CHAIN, KS_DIRECT };                        /* algorithms, as recorded */
enum { KS_TCP = 1, KS_SHM };                                                     /* transports, as recorded */

enum { LIMITS = 64, PACE_BYTES = 16 << 10 };                                     /* drilled links of a process; a piece on a slow wire */
enum { FRAME_MAX = 256 << 10, ALIGNMENT = 16, STAGE_BYTES = 256 << 10, PEEK_BYTES = 4096, WHAT_BYTES = 240 };
#ifndef RING_BYTES
#define RING_BYTES (1ull << 20)
#endif
#ifndef WAKE_BYTES
#define WAKE_BYTES (256 << 10)                                                   /* a sleeper is not woken for less of a longer message */
#endif
#define REMOTE_WAKE_BYTES (64 << 10)                                             /* between hosts: pass on early */
#ifndef SPINS
#define SPINS 0                                                                  /* yields before the engine sleeps: on a busy machine a yield costs a whole slice, a wake-up does not */
#endif
#define FRAME_MAGIC 0x4653534bu                                                  /* "KSSF" */
enum { FLAG_FIRST = 1, FLAG_NOTE = 2, FLAG_BYE = 4, FLAG_ASK = 8 };

/* Before every piece of at most FRAME_MAX bytes; the payload is padded to ALIGNMENT. */
struct header {
    uint32_t magic, generation;
    uint64_t sequence;
    uint8_t op, element, reduction, flags;
    uint32_t length;                                                             /* payload bytes in this frame */
    int64_t tag;                                                                 /* p2p: tag; collectives: root */
    uint64_t message;                                                            /* bytes of the whole message */
    uint64_t total;                                                              /* bytes of the call where all members must agree, else 0 */
};

struct ks_buffer { uint64_t address, bytes; };
struct ks_call {
    uint8_t op, element, reduction, want_future, run_inline, spare[3];
    int32_t root, peer;
    int64_t tag;
    uint32_t n_inputs, n_outputs;
    const struct ks_buffer *inputs, *outputs;
    double timeout_s;                                                            /* <= 0: none */
};
struct ks_failure { int32_t peer, error; char what[WHAT_BYTES]; };

struct tally { uint64_t sent, received, own_ns, credit_ns, wire_ns, peer_ns; };
enum wait_reason { WAIT_NONE, WAIT_OWN, WAIT_CREDIT, WAIT_PEER, WAIT_HOLD, WAIT_WIRE };

struct ticket;
struct plane;

/* One message to or from one peer (or a local copy). It may move up to the bytes its gate has done. */
struct item {
    struct item *next;                                                           /* in the queue of its peer */
    struct item *sibling;                                                        /* all items of a ticket */
    struct ticket *ticket;
    struct message *message;                                                     /* receive into the stash */
    struct tally *stat;
    struct item *gate, *forward;                                                 /* forward: the send gated by this receive */
    char *target;                                                                /* receive: where to */
    const char *base;                                                            /* send: from; receive: other operand, NULL = copy */
    uint64_t length, done;
    int peer;
    bool complete, scale, transient;                                             /* transient: target is needed for forward only */
};

struct ticket {
    uint64_t id;
    _Atomic int status;
    bool released, want_future, listed;
    uint8_t algorithm;
    struct ks_call call;                                                         /* buffers owned by the ticket */
    uint64_t total, queued_ns, started_ns, deadline_ns, record_index, sequence;
    struct ticket *next, *next_done, *next_ready, *before, *after;
    struct item *items, *locals;
    uint32_t left;
    int source;
    bool posted;                                                                 /* in plane->posted */
    struct tally stat;                                                            /* p2p */
    void *scratch;                                                               /* stash bytes being copied out */
    struct ks_failure failure;
};

struct message {                                                                 /* arrived before its receive was posted */
    struct message *next;
    int peer;
    int64_t tag;
    uint64_t length;
    char *bytes;
    bool complete;
    struct tally stat;
    struct ticket *taker;
};

struct channel {                                                                 /* one direction of a shared link */
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t tail;
    _Alignas(64) _Atomic uint32_t want_data;
    _Alignas(64) _Atomic uint32_t want_credit;
};
struct shared { uint64_t magic, ring_bytes; _Alignas(4096) struct channel channel[2]; };

struct transmit { struct header header; uint32_t header_sent, payload_left, pad_left; bool stale; };
struct receive {
    struct header header;
    uint32_t payload_left, pad_left;
    bool have, drop;                                                             /* a header is here; its payload is thrown away */
    struct item *item, *partial;                                                 /* of this frame; p2p: of the message begun */
};

struct link {
    int kind, fd, error;
    bool hup, gone, tx_dead, bye, greedy;                                        /* no more to read; other side hung up; cannot send */
    struct transmit tx;
    struct receive rx;
    char *stage;                                                                 /* tcp */
    uint32_t stage_start, stage_end;
    int low_water;
    uint32_t wake_bytes;
    bool drained;                                                                /* tcp: last read came up short */
    struct shared *map;                                                          /* shm */
    struct channel *out, *in;
    char *out_ring, *in_ring;
    uint64_t head, tail, seen_tail, seen_head;
    uint64_t paced, release_ns;                                                  /* drilled links: bytes on the slow wire, and when they are through */
};

struct peer {
    struct link *link;
    struct item *tx_first, *tx_last, *rx_first, *rx_last;
    struct tally stat;
    uint64_t tx_mark, rx_mark;
    uint8_t tx_wait, rx_wait;
    bool used, peek, asked;
    uint32_t posted;                                                             /* receives waiting for exactly this peer */
};

/* A drill on all bytes to one member: a wire of bytes_per_s (0: cut, < 0: only counted) that one piece after the other passes. */
struct limit { _Atomic int rank; _Atomic double bytes_per_s; _Atomic uint64_t sent, busy_ns; };

struct domain {
    bool protected;
    _Atomic bool poisoned;
    _Atomic uint32_t generation;
    _Atomic int64_t step;
    pthread_mutex_t admin, list;
    struct plane *planes;
    int failure_fd;
    struct loss { struct plane *plane; int peer; struct loss *next; } *lost;     /* under list */
    char *_Atomic ring;
    uint64_t ring_slots;
    _Atomic bool recording;
    _Atomic int n_limits;                                                        /* entries ever used; a free one has rank -1 */
    struct limit limits[LIMITS];
};

struct plane {
    struct domain *domain;
    struct plane *next;
    int rank, size, lane, *global_ranks;
    char group[56];
    uint32_t group_hash;
    char *_Atomic table;                                                         /* this group's entry in the recorder */
    pthread_mutex_t run, gate, mutex;
    pthread_cond_t work, finished, future;
    _Atomic int pause;
    _Atomic bool sleeping, closing;
    int wake_fd, users;
    bool worker_started, orphan, owned;                                          /* calls left running by an inline waiter; somebody is the engine */
    pthread_t worker;
    /* under mutex */
    struct ticket **tickets, *queue_first, *queue_last, *done_first, *done_last;
    uint32_t tickets_size, tickets_free, waiters;
    uint32_t *free_slots;
    uint64_t serial;
    _Atomic int queued;
    /* under run */
    struct peer *peers;
    int *scan, n_scan;
    struct ticket *active, *ready;                                               /* running; all items done */
    uint32_t n_active;
    uint64_t sequence, told_ns;
    bool broken;
    struct ks_failure cause;
    struct item *spare;
    void *blocks, *scratch;
    uint64_t scratch_bytes;
    struct ticket *posted_first, *posted_last;
    uint32_t posted_any;
    struct message *stash_first, *stash_last;
    uint64_t stash_bytes;
    struct pollfd *polls;
    bool timing, asked, desperate;                                               /* desperate: nothing else moves, so take what would be better left */
    int idle;
};

/* clock.c */
uint64_t clock_now_ns(void);
/* kernels.c: target[i] = base[i] op incoming[i]; NULL where the combination makes no sense */
typedef void (*kernel)(void *target, const void *base, const void *incoming, size_t count);
typedef void (*scaler)(void *target, size_t count, int divisor);
kernel kernel_for(int element, int reduction);
scaler scaler_for(int element);
size_t element_bytes(int element);
/* link.c, tcp.c, shm.c */
struct link *tcp_open(int fd);
struct link *shm_open_link(int fd, int memory_fd, bool creator);
void link_close(struct link *);
int link_release(struct link *);
void shutdown_sending(struct link *);
ssize_t link_put(struct link *, struct iovec *, int n);                          /* bytes taken; 0: no room; -1: link->error */
size_t link_peek(struct link *, char **at, size_t want);                         /* contiguous bytes to read */
void link_consume(struct link *, size_t bytes);
bool link_take(struct link *, void *target, size_t bytes);                       /* all or nothing, small */
size_t link_read(struct link *, char *target, size_t bytes);                     /* as many as there are */
ssize_t tcp_put(struct link *, struct iovec *, int n);
size_t tcp_peek(struct link *, char **at, size_t want);
void tcp_low_water(struct link *, int bytes);
void tcp_hang_up(struct link *);
bool tcp_take(struct link *, void *target, size_t bytes);
size_t tcp_read(struct link *, char *target, size_t bytes);
ssize_t shm_put(struct link *, struct iovec *, int n);
size_t shm_peek(struct link *, char **at);
size_t shm_reserve(struct link *, char **at);                                    /* contiguous room to write into */
void shm_commit(struct link *, size_t bytes);
void shm_consume(struct link *, size_t bytes);
bool shm_take(struct link *, void *target, size_t bytes);
size_t shm_read(struct link *, char *target, size_t bytes);
bool shm_arm(struct link *, uint32_t data, bool credit);                         /* before sleeping until so many bytes are there; true: do not sleep */
void shm_disarm(struct link *);
void shm_bell(struct link *);
void shm_drain_bells(struct link *);
uint64_t shm_bytes(void);
/* transmit.c, receive.c: progress on one peer; true if anything moved */
bool transmit_progress(struct plane *, struct peer *);
struct link *transmit_through(struct plane *, struct item *forward, uint64_t done);  /* its link if the payload of forward may be written in place */
void transmit_written(struct link *, struct item *forward, size_t bytes);
bool transmit_flush(struct plane *, struct link *);                              /* completes a stale frame; true: at a boundary */
bool transmit_idle(const struct link *);
void transmit_control(struct plane *, struct link *, struct header *, const char *text);
bool receive_progress(struct plane *, struct peer *, int rank);
void item_done(struct plane *, struct item *);
static inline uint64_t item_limit(const struct item *item) {
    const struct item *gate = item->gate;
    if (!gate || gate->complete || gate->done >= item->length) return item->length;
    return gate->done;
}
static inline bool item_open(const struct item *item) {
    return !item->gate || item->gate->complete || item->gate->done > item->done;
}
/* limit.c */
struct limit *limit_of(struct plane *, const struct peer *);                     /* the drill on what goes to this peer, or NULL */
size_t limit_pass(struct limit *, struct link *, size_t want, uint64_t now);     /* how many of these bytes the slow wire has carried; 0: wait */
void limit_sent(struct limit *, struct link *, size_t bytes);
uint64_t limit_wake(const struct plane *);                                       /* when the first waiting piece is through; 0: none */
/* plan.c */
enum { TREE_BYTES = 64 << 10 };
static inline bool plan_small(uint64_t nbytes) { return nbytes <= TREE_BYTES; }
/* call.c */
const char *plan_check(const struct plane *, const struct ks_call *);            /* NULL or what is wrong */
int plan_build(struct plane *, struct ticket *);                                 /* 0 or errno */
int plan_peers(const struct plane *, int op, uint64_t nbytes, int root, int *peers);
uint64_t plan_total(const struct ks_call *);
struct item *plan_item(struct plane *, struct ticket *, int peer, uint64_t length);
const char *op_name(int op);
void plan_describe(char *text, size_t bytes, int op, int element, int reduction, uint64_t total, int root);
/* match.c */
void match_start(struct plane *, struct ticket *);
bool match_bind(struct plane *, struct peer *, int rank);                        /* false: leave unread */
void match_stashed(struct plane *, struct message *);
void match_forget(struct plane *, struct ticket *);
void match_clear(struct plane *);
void match_hangup(struct plane *, int rank);                                      /* drops a message cut off by a dead link */
bool match_wanted(const struct plane *, const struct peer *);
/* engine.c */
void engine_run(struct plane *, struct ticket *until, uint64_t deadline_ns);
void engine_abort(struct plane *);
void ticket_end(struct plane *, struct ticket *, int status);
void ticket_fail(struct plane *, struct ticket *, int peer, int error, const char *what);
void plane_break(struct plane *, int peer, int error, const char *what);
void link_failed(struct plane *, int rank, int error, const char *what);
/* block.c */
void engine_block(struct plane *, uint64_t deadline_ns);
int owing_peer(const struct plane *, const struct ticket *);
/* worker.c */
void plane_enter(struct plane *);
void plane_leave(struct plane *);
void plane_kick(struct plane *);
void plane_give_way(struct plane *);
struct ticket *plane_pop(struct plane *);
void ticket_complete(struct plane *, struct ticket *, int status);
void ticket_free(struct ticket *);
void queue_end(struct plane *, int status);
/* domain.c */
void domain_lose(struct plane *, int peer);
void domain_poison_flag(struct domain *);
/* record.c */
void record_attach(struct plane *);
void record_detach(struct plane *);
void record_queued(struct plane *);
void record_start(struct plane *, struct ticket *);
void record_waiting(struct plane *, const struct ticket *, uint64_t now);
void record_finish(struct plane *, struct ticket *, int status);
void record_install(struct plane *);
void record_header(struct domain *);
uint32_t record_hash(const char *name);

#endif
