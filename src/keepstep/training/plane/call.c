/* What a call is: its name, its size, whether it makes sense, and which peers it needs. */
#include "plane.h"
#include <stdio.h>

const char *op_name(int op) {
    static const char *const names[] = {"nothing", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
                                        "gather", "scatter", "barrier", "send", "recv"};
    return op > 0 && op <= KS_RECV ? names[op] : "an unknown call";
}

static bool reduces(int op) { return op == KS_ALL_REDUCE || op == KS_REDUCE || op == KS_REDUCE_SCATTER; }

/* For people: "all_reduce of 4096 bytes (float32 sum)". */
void plan_describe(char *text, size_t bytes, int op, int element, int reduction, uint64_t total, int root) {
    static const char *const elements[KS_ELEMENTS] = {"uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
        "bfloat16", "float32", "float64", "bool", "complex64", "complex128"};
    static const char *const reductions[8] = {"sum", "product", "min", "max", "band", "bor", "bxor", "avg"};
    const char *kind = element >= 0 && element < KS_ELEMENTS ? elements[element] : "?";
    const char *how = reduction >= 0 && reduction < 8 ? reductions[reduction] : "?";
    size_t used = (size_t)snprintf(text, bytes, "%s", op_name(op));
    if (op != KS_BARRIER && total && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " of %llu bytes", (unsigned long long)total);
    if (reduces(op) && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " (%s %s)", kind, how);
    bool rooted = op == KS_BROADCAST || op == KS_REDUCE || op == KS_GATHER || op == KS_SCATTER;
    if (rooted && used < bytes) snprintf(text + used, bytes - used, " with root %d", root);
}

static uint64_t sum(const struct ks_buffer *buffers, uint32_t n) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) bytes += buffers[i].bytes;
    return bytes;
}

/* Bytes all members must agree on; for the others what this member moves is known by its messages only. */
uint64_t plan_total(const struct ks_call *call) {
    switch (call->op) {
    case KS_ALL_REDUCE: case KS_REDUCE: case KS_REDUCE_SCATTER: case KS_SEND: return sum(call->inputs, call->n_inputs);
    case KS_BROADCAST: return call->n_inputs ? sum(call->inputs, call->n_inputs) : sum(call->outputs, call->n_outputs);
    case KS_ALL_GATHER: case KS_RECV: return sum(call->outputs, call->n_outputs);
    default: return 0;
    }
}

static const char *check_reduction(const struct ks_call *call) {
    size_t unit = element_bytes(call->element);
    if (!reduces(call->op)) return NULL;
    if (!kernel_for(call->element, call->reduction)) return "this reduction is not defined for this element type";
    for (uint32_t i = 0; i < call->n_inputs; i++)
        if (call->inputs[i].bytes % unit) return "a buffer does not hold a whole number of elements";
    return NULL;
}

static const char *check_pairs(const struct ks_call *call) {
    if (call->n_inputs != call->n_outputs) return "inputs and outputs differ in number";
    for (uint32_t i = 0; i < call->n_inputs; i++)
        if (call->inputs[i].bytes != call->outputs[i].bytes) return "an output differs in bytes from its input";
    return NULL;
}

static const char *check_one(bool right, uint64_t a, uint64_t b) {
    return !right ? "wrong number of buffers" : a != b ? "the own output differs in bytes from the own input" : NULL;
}

static const char *check_buffers(const struct plane *plane, const struct ks_call *call) {
    uint32_t in = call->n_inputs, out = call->n_outputs, size = (uint32_t)plane->size;
    bool root = call->root == plane->rank;
    switch (call->op) {
    case KS_ALL_REDUCE: return check_pairs(call);
    case KS_REDUCE: return root ? check_pairs(call) : NULL;
    case KS_BROADCAST: return root ? (out ? check_pairs(call) : NULL) : in ? "only the root has inputs" : NULL;
    case KS_ALL_GATHER: return check_one(in == 1 && out == size, in ? call->inputs[0].bytes : 0, out == size ? call->outputs[plane->rank].bytes : 0);
    case KS_REDUCE_SCATTER: return check_one(out == 1 && in == size, out ? call->outputs[0].bytes : 0, in == size ? call->inputs[plane->rank].bytes : 0);
    case KS_ALL_TO_ALL: return check_one(in == size && out == size, in == size ? call->inputs[plane->rank].bytes : 0, out == size ? call->outputs[plane->rank].bytes : 0);
    case KS_GATHER:
        if (!root) return in == 1 && !out ? NULL : "wrong number of buffers";
        return check_one(in == 1 && out == size, in ? call->inputs[0].bytes : 0, out == size ? call->outputs[plane->rank].bytes : 0);
    case KS_SCATTER:
        if (!root) return out == 1 && !in ? NULL : "wrong number of buffers";
        return check_one(out == 1 && in == size, out ? call->outputs[0].bytes : 0, in == size ? call->inputs[plane->rank].bytes : 0);
    case KS_SEND: return in == 1 && !out ? NULL : "send takes one input";
    case KS_RECV: return out == 1 && !in ? NULL : "recv takes one output";
    default: return in || out ? "barrier takes no buffers" : NULL;
    }
}

/* NULL, or what is wrong with a call before anything is sent. */
const char *plan_check(const struct plane *plane, const struct ks_call *call) {
    if (call->op < KS_ALL_REDUCE || call->op > KS_RECV) return "unknown op";
    if ((call->op >= KS_SEND) != (plane->lane == KS_P2P)) return "send and recv belong to a P2P plane, all others to a COLLECTIVE one";
    if (call->root < 0 || call->root >= plane->size) return "no such root in the group";
    if (call->op == KS_SEND && call->peer < 0) return "send needs a peer";
    if (call->op >= KS_SEND && (call->peer >= plane->size || call->peer < -1)) return "no such peer in the group";
    if (call->op >= KS_SEND && call->peer == plane->rank) return "a rank cannot send to or receive from itself";
    for (uint32_t i = 0; i < call->n_inputs; i++)
        if (!call->inputs[i].address && call->inputs[i].bytes) return "an input has no address";
    for (uint32_t i = 0; i < call->n_outputs; i++)
        if (!call->outputs[i].address && call->outputs[i].bytes) return "an output has no address";
    const char *wrong = check_buffers(plane, call);
    return wrong ? wrong : check_reduction(call);
}

static int tree_peers(int rank, int size, int root, int *peers) {
    int v = (rank - root + size) % size, n = 0, stop = v ? v & -v : size;
    if (v) peers[n++] = (v - stop + root) % size;
    for (int bit = 1; bit < stop && v + bit < size; bit <<= 1) peers[n++] = (v + bit + root) % size;
    return n;
}

/* Writes the peers a call of this kind talks to; at most size - 1. */
int plan_peers(const struct plane *plane, int op, uint64_t nbytes, int root, int *peers) {
    int rank = plane->rank, size = plane->size, n = 0, next = (rank + 1) % size, before = (rank + size - 1) % size;
    if (size == 1) return 0;
    bool rooted = op == KS_REDUCE || op == KS_BROADCAST || op == KS_GATHER || op == KS_SCATTER;
    bool tree = op == KS_BARRIER || (op <= KS_BROADCAST && plan_small(nbytes));
    if (tree) return tree_peers(rank, size, rooted ? root : 0, peers);
    if (op == KS_ALL_TO_ALL || op >= KS_SEND || ((op == KS_GATHER || op == KS_SCATTER) && rank == root)) {
        for (int peer = 0; peer < size; peer++)
            if (peer != rank) peers[n++] = peer;
        return n;
    }
    if (op == KS_GATHER || op == KS_SCATTER) return peers[0] = root, 1;
    bool chain = op == KS_REDUCE || op == KS_BROADCAST;
    if (!chain || rank != root) peers[n++] = before;
    if ((!chain || next != root) && (next != before || !n)) peers[n++] = next;
    return n;
}
