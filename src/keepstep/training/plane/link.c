/* One byte stream in each direction, whatever carries it. */
#include "plane.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

void link_close(struct link *link) {
    if (link->map) munmap(link->map, shm_bytes());
    if (link->kind == KS_TCP) tcp_hang_up(link);
    free(link->stage);
    close(link->fd);
    free(link);
}

/* Gives everything back but the descriptor, on which nothing is said to the other side. */
int link_release(struct link *link) {
    int fd = link->fd;
    if (link->map) munmap(link->map, shm_bytes());
    free(link->stage);
    free(link);
    return fd;
}

ssize_t link_put(struct link *link, struct iovec *parts, int n) {
    return link->kind == KS_TCP ? tcp_put(link, parts, n) : shm_put(link, parts, n);
}

size_t link_peek(struct link *link, char **at, size_t want) {
    return link->kind == KS_TCP ? tcp_peek(link, at, want) : shm_peek(link, at);
}

void link_consume(struct link *link, size_t bytes) {
    if (link->kind == KS_TCP)
        link->stage_start += (uint32_t)bytes;
    else
        shm_consume(link, bytes);
}

bool link_take(struct link *link, void *target, size_t bytes) {
    return link->kind == KS_TCP ? tcp_take(link, target, bytes) : shm_take(link, target, bytes);
}

size_t link_read(struct link *link, char *target, size_t bytes) {
    return link->kind == KS_TCP ? tcp_read(link, target, bytes) : shm_read(link, target, bytes);
}

/* Tells the other side that nothing more will come; what was sent can still be read there. */
void shutdown_sending(struct link *link) {
    if (link->kind == KS_SHM) shm_bell(link);
    shutdown(link->fd, SHUT_WR);
}
