/* Links over TCP: headers and operands of reductions pass through a stage, other payload goes straight to its place. */
#include "plane.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#ifndef LOCAL_BUFFER_BYTES
#define LOCAL_BUFFER_BYTES (1 << 20)
#endif

/* Inside one host: buffers that stay in the cache. */
static bool tune_local(int fd) {
    struct sockaddr_storage ours = {0}, theirs = {0};
    socklen_t a = sizeof ours, b = sizeof theirs;
    if (getsockname(fd, (struct sockaddr *)&ours, &a) || getpeername(fd, (struct sockaddr *)&theirs, &b)) return false;
    bool v4 = ours.ss_family == AF_INET, v6 = ours.ss_family == AF_INET6;
    bool same = (v4 && ((struct sockaddr_in *)&ours)->sin_addr.s_addr == ((struct sockaddr_in *)&theirs)->sin_addr.s_addr) ||
                (v6 && !memcmp(&((struct sockaddr_in6 *)&ours)->sin6_addr, &((struct sockaddr_in6 *)&theirs)->sin6_addr, 16));
    if (!same) return false;
    int bytes = LOCAL_BUFFER_BYTES;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    return true;
}

/* Takes over a connected stream socket. */
struct link *tcp_open(int fd) {
    struct link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    int one = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* Short round trips and equal flows: plain reno shares a link more evenly and keeps it fuller than bbr or cubic. */
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    link->wake_bytes = tune_local(fd) ? WAKE_BYTES : REMOTE_WAKE_BYTES;
    link->kind = KS_TCP;
    link->low_water = 1;
    link->fd = fd;
    link->tx.header_sent = sizeof(struct header);
    return link;
}

ssize_t tcp_put(struct link *link, struct iovec *parts, int n) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
    ssize_t sent;
    do sent = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0) return sent;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return 0;
    link->error = errno;
    return -1;
}

/* Reads once from the socket; 0 when there is nothing (or the other side is gone: hup). */
static size_t tcp_receive(struct link *link, struct iovec *parts, int n, size_t room) {
    if (link->hup || link->drained) return 0;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
    ssize_t got;
    do got = recvmsg(link->fd, &message, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    link->drained = got < (ssize_t)room;
    if (got > 0) return (size_t)got;
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        link->hup = true;
        link->error = got == 0 ? ECONNRESET : errno;
    }
    return 0;
}

/* Reads into the stage until `least` bytes are there or the socket is empty. */
static size_t tcp_fill(struct link *link, size_t least, size_t want) {
    if (!link->stage && !(link->stage = malloc(STAGE_BYTES))) return 0;
    size_t have = link->stage_end - link->stage_start;
    if (have >= least) return have;
    if (link->stage_start) memmove(link->stage, link->stage + link->stage_start, have);
    link->stage_start = 0;
    link->stage_end = (uint32_t)have;
    struct iovec part = {link->stage + have, (want < STAGE_BYTES ? want : STAGE_BYTES) - have};
    link->stage_end += (uint32_t)tcp_receive(link, &part, 1, part.iov_len);
    return link->stage_end;
}

size_t tcp_peek(struct link *link, char **at, size_t want) {
    size_t have = tcp_fill(link, want, STAGE_BYTES);
    *at = link->stage + link->stage_start;
    return have;
}

bool tcp_take(struct link *link, void *target, size_t bytes) {
    if (tcp_fill(link, bytes, link->greedy ? STAGE_BYTES : PEEK_BYTES) < bytes) return false;
    memcpy(target, link->stage + link->stage_start, bytes);
    link->stage_start += (uint32_t)bytes;
    return true;
}

/* First what the stage holds, then straight from the socket, taking a following header along. */
size_t tcp_read(struct link *link, char *target, size_t bytes) {
    size_t have = link->stage_end - link->stage_start;
    if (have) {
        size_t part = have < bytes ? have : bytes;
        memcpy(target, link->stage + link->stage_start, part);
        link->stage_start += (uint32_t)part;
        return part;
    }
    if (!link->stage && !(link->stage = malloc(STAGE_BYTES))) return 0;
    link->stage_start = link->stage_end = 0;
    struct iovec parts[2] = {{target, bytes}, {link->stage, PEEK_BYTES}};
    size_t got = tcp_receive(link, parts, 2, bytes);
    if (got > bytes) {
        link->stage_end = (uint32_t)(got - bytes);
        got = bytes;
    }
    return got;
}

/* Before sleeping: be woken when this many bytes are there, not for every packet. */
void tcp_low_water(struct link *link, int bytes) {
    if (bytes == link->low_water) return;
    link->low_water = bytes;
    setsockopt(link->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

/* Ends the sending side and reads away what came in, since closing on unread bytes would take back what the peer has not read. */
void tcp_hang_up(struct link *link) {
    char rest[4096];
    shutdown(link->fd, SHUT_WR);
    for (int i = 0; i < 4096 && recv(link->fd, rest, sizeof rest, MSG_DONTWAIT) > 0; i++) continue;
}
