/* Links in shared memory: one ring of bytes per direction, and a Unix socket that wakes a sleeper and tells of a death.
 * Everything moves in multiples of ALIGNMENT, so an element never straddles the end of a ring. */
#include "plane.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { PUBLISH_BYTES = 64 << 10 };
#define SHARED_MAGIC 0x31304d485353534bull

uint64_t shm_bytes(void) { return sizeof(struct shared) + 2 * RING_BYTES; }

/* Maps the memory and takes over the doorbell; NULL with errno set when the memory is not a shared link's. */
struct link *shm_open_link(int fd, int memory_fd, bool creator) {
    struct stat file;
    if (fstat(memory_fd, &file) || (uint64_t)file.st_size < shm_bytes()) {
        errno = EINVAL;
        return NULL;
    }
    struct link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->map = mmap(NULL, shm_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    if (link->map == MAP_FAILED) {
        free(link);
        return NULL;
    }
    if (creator) link->map->magic = SHARED_MAGIC;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    char *rings = (char *)(link->map + 1);
    link->kind = KS_SHM;
    link->wake_bytes = WAKE_BYTES;
    link->fd = fd;
    link->out = &link->map->channel[creator ? 0 : 1];
    link->in = &link->map->channel[creator ? 1 : 0];
    link->out_ring = rings + (creator ? 0 : RING_BYTES);
    link->in_ring = rings + (creator ? RING_BYTES : 0);
    link->head = atomic_load(&link->out->head);
    link->seen_tail = atomic_load(&link->out->tail);
    link->tail = link->seen_head = atomic_load(&link->in->tail);
    link->tx.header_sent = sizeof(struct header);
    return link;
}

void shm_bell(struct link *link) { (void)!send(link->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

void shm_drain_bells(struct link *link) {
    char bells[64];
    ssize_t got;
    do got = recv(link->fd, bells, sizeof bells, MSG_DONTWAIT);
    while (got == sizeof bells || (got < 0 && errno == EINTR));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
        link->error = ECONNRESET;
        link->hup = true;
    }
}

static size_t shm_room(struct link *link) {
    uint64_t used = link->head - link->seen_tail;
    if (used > RING_BYTES / 2) {
        link->seen_tail = atomic_load_explicit(&link->out->tail, memory_order_acquire);
        used = link->head - link->seen_tail;
    }
    if (used <= RING_BYTES) return (RING_BYTES - used) & ~(uint64_t)(ALIGNMENT - 1);
    link->error = EPROTO;
    return SIZE_MAX;
}

static void shm_publish(struct link *link) { atomic_store_explicit(&link->out->head, link->head, memory_order_release); }

static void shm_copy_in(struct link *link, const char *from, size_t bytes) {
    while (bytes) {
        size_t at = link->head % RING_BYTES, part = RING_BYTES - at;
        if (part > bytes) part = bytes;
        if (part > PUBLISH_BYTES) part = PUBLISH_BYTES;
        memcpy(link->out_ring + at, from, part);
        link->head += part;
        from += part;
        bytes -= part;
        if (part == PUBLISH_BYTES) shm_publish(link);
    }
}

/* Shows the reader `bytes` more (already written in place) and wakes it if it sleeps and they are enough. */
void shm_commit(struct link *link, size_t bytes) {
    link->head += bytes;
    shm_publish(link);
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t wanted = atomic_load_explicit(&link->out->want_data, memory_order_relaxed);
    if (!wanted) return;
    uint64_t filled = link->head - atomic_load_explicit(&link->out->tail, memory_order_relaxed);
    if (filled >= wanted && atomic_exchange(&link->out->want_data, 0)) shm_bell(link);
}

size_t shm_reserve(struct link *link, char **at) {
    size_t room = shm_room(link), start = link->head % RING_BYTES;
    *at = link->out_ring + start;
    if (link->hup || room == SIZE_MAX) return 0;
    return room < RING_BYTES - start ? room : RING_BYTES - start;
}

ssize_t shm_put(struct link *link, struct iovec *parts, int n) {
    size_t room = shm_room(link), taken = 0;
    if (link->hup || room == SIZE_MAX) {
        if (!link->error) link->error = ECONNRESET;
        return -1;
    }
    for (int i = 0; i < n && room; i++) {
        size_t part = parts[i].iov_len < room ? parts[i].iov_len : room;
        shm_copy_in(link, parts[i].iov_base, part);
        room -= part;
        taken += part;
    }
    if (!taken) return 0;
    shm_commit(link, 0);
    return (ssize_t)taken;
}

static size_t shm_filled(struct link *link) {
    if (link->seen_head == link->tail) link->seen_head = atomic_load_explicit(&link->in->head, memory_order_acquire);
    uint64_t filled = link->seen_head - link->tail;
    if (filled <= RING_BYTES && link->seen_head % ALIGNMENT == 0) return filled;
    link->error = EPROTO;
    link->hup = true;
    link->seen_head = link->tail;
    return 0;
}

size_t shm_peek(struct link *link, char **at) {
    size_t filled = shm_filled(link), start = link->tail % RING_BYTES;
    *at = link->in_ring + start;
    if (filled > RING_BYTES - start) filled = RING_BYTES - start;
    return filled < PUBLISH_BYTES ? filled : PUBLISH_BYTES;
}

void shm_consume(struct link *link, size_t bytes) {
    link->tail += bytes;
    atomic_store_explicit(&link->in->tail, link->tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&link->in->want_credit, memory_order_relaxed)) return;
    uint64_t used = atomic_load_explicit(&link->in->head, memory_order_relaxed) - link->tail;
    if (used <= RING_BYTES / 2 && atomic_exchange(&link->in->want_credit, 0)) shm_bell(link);
}

bool shm_take(struct link *link, void *target, size_t bytes) {
    if (shm_filled(link) < bytes) {
        link->seen_head = atomic_load_explicit(&link->in->head, memory_order_acquire);
        if (shm_filled(link) < bytes) return false;
    }
    size_t start = link->tail % RING_BYTES, first = RING_BYTES - start;
    if (first > bytes) first = bytes;
    memcpy(target, link->in_ring + start, first);
    memcpy((char *)target + first, link->in_ring, bytes - first);
    shm_consume(link, bytes);
    return true;
}

size_t shm_read(struct link *link, char *target, size_t bytes) {
    char *at;
    size_t part = shm_peek(link, &at);
    if (part > bytes) part = bytes;
    if (!part) return 0;
    memcpy(target, at, part);
    shm_consume(link, part);
    return part;
}

bool shm_arm(struct link *link, uint32_t data, bool credit) {
    if (data) atomic_store(&link->in->want_data, data);
    if (credit) atomic_store(&link->out->want_credit, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (data && atomic_load(&link->in->head) - link->tail >= data) return true;
    return credit && atomic_load(&link->out->tail) + RING_BYTES != link->head;
}

void shm_disarm(struct link *link) {
    atomic_store_explicit(&link->in->want_data, 0, memory_order_relaxed);
    atomic_store_explicit(&link->out->want_credit, 0, memory_order_relaxed);
}
